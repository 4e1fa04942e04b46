"""The collective operations, one file each: how a bucket of it is executed on a data plane.

``EXECUTE`` is the table; every entry is ``execute(bucket, entries, plane, workspace)``, called by the
background thread on every rank in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping

from hvdlite.collectives import allgather, allreduce, alltoall, auto, barrier, broadcast, quantized, reducescatter
from hvdlite.collectives.workspace import Workspace
from hvdlite.dataplane.base import DataPlane
from hvdlite.fusion import Bucket
from hvdlite.tensor_queue import TensorEntry


def _allreduce(bucket: Bucket, entries: Mapping[int, TensorEntry], plane: DataPlane, workspace: Workspace) -> None:
    compressor = bucket.request.compressor
    way = allreduce if compressor == "none" else auto if compressor == auto.NAME else quantized
    way.execute(bucket, entries, plane, workspace)


EXECUTE = {
    "allreduce": _allreduce,
    "allgather": allgather.execute,
    "broadcast": broadcast.execute,
    "alltoall": alltoall.execute,
    "reducescatter": reducescatter.execute,
    "barrier": barrier.execute,
}
