"""Phase: what a record of the timeline is about. The spellings are Horovod's, so that traces compare."""

from __future__ import annotations

from enum import IntEnum


class Phase(IntEnum):
    """Codes are part of the ring format: append, never renumber."""

    QUEUE = 1
    NEGOTIATE_ALLREDUCE = 2
    NEGOTIATE_ALLGATHER = 3
    NEGOTIATE_BROADCAST = 4
    NEGOTIATE_ALLTOALL = 5
    NEGOTIATE_REDUCESCATTER = 6
    NEGOTIATE_BARRIER = 7
    ALLREDUCE = 10
    ALLGATHER = 11
    BROADCAST = 12
    ALLTOALL = 13
    REDUCESCATTER = 14
    BARRIER = 15
    MEMCPY_IN_FUSION_BUFFER = 20
    MEMCPY_OUT_FUSION_BUFFER = 21
    MPI_ALLREDUCE = 30
    MPI_ALLGATHER = 31
    MPI_BCAST = 32
    MPI_ALLTOALL = 33
    QUANTIZED_ALLREDUCE = 35
    MPI_REDUCESCATTER = 34
    CYCLE_START = 40
    WAIT = 50
    STEP = 51


#: The lane (thread of the trace viewer) that shows a phase.
LANES = ("wait", "negotiate", "operation", "fuse-copy", "communicate", "cycle")


def lane(phase: Phase) -> int:
    """Index into LANES."""
    if phase < Phase.ALLREDUCE:
        return 1
    if phase < Phase.MEMCPY_IN_FUSION_BUFFER:
        return 2
    if phase < Phase.MPI_ALLREDUCE:
        return 3
    if phase < Phase.CYCLE_START:
        return 4
    return 5 if phase == Phase.CYCLE_START else 0
