"""Phase: what a record of the timeline is about. Horovod's phases have Horovod's spellings, so that traces compare."""

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
    #: Of the host's side only: how long it took to enqueue what the GPU's stream does later.
    NCCL_ALLREDUCE = 36
    NCCL_ALLGATHER = 37
    NCCL_BCAST = 38
    NCCL_ALLTOALL = 39
    CYCLE_START = 40
    WAIT = 50
    STEP = 51
    FORWARD = 52
    BACKWARD = 53
    INPUT = 54
    MARK = 55
    #: One bucket, from the start of its execution to the end of it; ``detail`` is the reason it was closed for.
    BUCKET = 60
    SUBMIT = 61
    #: The process did not run although it wanted to: stopped, or no processor for it.
    NOT_RUNNING = 62
    #: A reading of this rank's clock (start_ns) and of rank 0's at that moment (end_ns), ``value`` the error in ns.
    CLOCK = 63
    #: A transfer from rank ``op`` that measured the link, without other traffic of the job.
    LINK = 64
    ERROR = 65
    END = 66
    DECISION = 67
    #: ``value`` is the norm of what a quantised exchange has left over, ``num_bytes`` what went over the wire.
    RESIDUAL = 68
    #: A reading of this rank's clock (start_ns) and of the time of day at that moment (end_ns), ``value`` the error in ns.
    TIME_OF_DAY = 69
    NCCL_REDUCESCATTER = 70
    #: Several records in one, see ``composite``: in rings only, readers take them apart.
    WHOLE_OPERATION = 71
    WHOLE_BUCKET = 72


#: The lane (thread of the trace viewer) that shows a phase.
LANES = ("wait", "negotiate", "operation", "fuse-copy", "communicate", "cycle", "step", "compute", "bucket", "events")

_OF_USER = {Phase.STEP: 6, Phase.FORWARD: 7, Phase.BACKWARD: 7, Phase.INPUT: 7, Phase.MARK: 7, Phase.WAIT: 0, Phase.BUCKET: 8,
            Phase.NCCL_REDUCESCATTER: 4}

#: Phases that are moments, not spans.
INSTANTS = frozenset((Phase.CYCLE_START, Phase.SUBMIT, Phase.CLOCK, Phase.ERROR, Phase.END, Phase.DECISION, Phase.RESIDUAL))


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
    return 5 if phase == Phase.CYCLE_START else _OF_USER.get(phase, 9)


#: Why a bucket was closed, by its code in ``Record.detail``; see ``fusion.compile_plan``.
REASONS = ("", "full", "large", "group", "end", "dtype", "process set", "op", "scale", "device", "compressor", "single")
