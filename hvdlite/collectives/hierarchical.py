"""The dense allreduce of GPU tensors between hosts: NCCL within each, MPI between them.

Every rank of a host gets a share of the bucket, summed by NCCL over the host; ranks of all hosts that have the same share sum it
over the host's plane, in segments through pinned memory (``staged``), so that copies and wire overlap; NCCL hands the totals out.
So each element crosses between hosts once for each host, not for each rank, and all ranks of a host are on the wire at once.

*Guarantees*: outputs are bitwise equal on all ranks: each element has one total, made by the ranks of one place.
*Failure*: the host waits for NCCL here, and asks it for errors meanwhile.
*Differs* from NCCL alone: averages are sums that are divided at the end; of 16-bit floats sums within hosts are rounded to 16
bits, those between hosts are of float32.
*Never run on a GPU so far*: tests run it on stand-ins.
"""

from __future__ import annotations

from collections.abc import Mapping

from hvdlite.collectives import staged
from hvdlite.collectives.packing import packed, prescale
from hvdlite.collectives.scaling import unscaled_op
from hvdlite.collectives.workspace import Workspace
from hvdlite.dataplane.base import DataPlane
from hvdlite.dataplane.device import DeviceArray
from hvdlite.dataplane.gpus import Gpus
from hvdlite.dataplane.nccl import NcclPlane
from hvdlite.fusion import Bucket
from hvdlite.message import ReduceOp
from hvdlite.tensor_queue import TensorEntry
from hvdlite.timeline.phase import Phase

#: Shares begin at multiples of so many bytes, the width of NCCL's accesses.
_ALIGNMENT_BYTES = 16


def allreduce(
    bucket: Bucket, entries: Mapping[int, TensorEntry], planes: tuple[NcclPlane, DataPlane], gpus: Gpus, workspace: Workspace
) -> None:
    """Run a dense bucket of what NCCL combines. ``planes``: of this rank's host, and of its place in all hosts."""
    local, cross = planes
    request, timeline = bucket.request, workspace.timeline
    with timeline.timed(Phase.MEMCPY_IN_FUSION_BUFFER, bucket.label, bucket.num_bytes):
        values, unpack = packed(bucket, entries, gpus)
        prescale(bucket, entries, values, gpus)
    op, _ = unscaled_op(request.op, 1)
    with timeline.timed(Phase.NCCL_REDUCESCATTER, bucket.label, bucket.num_bytes):
        mine = _reducescatter(local, values, op)
        gpus.wait(local.device.record())
    with timeline.timed(Phase.MPI_ALLREDUCE, bucket.label, mine.nbytes):
        staged.in_segments(local.device, cross, mine, request._replace(prescale=1.0), workspace,
                           num_ranks=local.size * cross.size)
    with timeline.timed(Phase.NCCL_ALLGATHER, bucket.label, bucket.num_bytes):
        _allgather(local, values)
    with timeline.timed(Phase.MEMCPY_OUT_FUSION_BUFFER, bucket.label, bucket.num_bytes):
        unpack()


def _reducescatter(local: NcclPlane, values: DeviceArray, op: ReduceOp) -> DeviceArray:
    """Combine this rank's share over the host, in place, and return it. The last rank's has the tail as well."""
    share, body, tail = _cut(local, values)
    mine = values[local.rank * share : (local.rank + 1) * share]
    local.reducescatter(body, mine, [share] * local.size, op)
    local.reducescatter(tail, tail, _of_the_last(local, tail), op)
    return values[local.rank * share :] if local.rank == local.size - 1 else mine


def _allgather(local: NcclPlane, values: DeviceArray) -> None:
    share, body, tail = _cut(local, values)
    local.allgather(body[local.rank * share : (local.rank + 1) * share], body, [share] * local.size)
    local.allgather(tail, tail, _of_the_last(local, tail))


def _cut(local: NcclPlane, values: DeviceArray) -> tuple[int, DeviceArray, DeviceArray]:
    """The elements of a share; what is cut into equal shares, each one call of NCCL's; and the short rest."""
    step = _ALIGNMENT_BYTES // values.itemsize
    share = len(values) // (local.size * step) * step
    return share, values[: share * local.size], values[share * local.size :]


def _of_the_last(local: NcclPlane, tail: DeviceArray) -> list[int]:
    return [0] * (local.size - 1) + [len(tail)]
