"""The collective operations, one file each: how a bucket of it is executed on a data plane.

``EXECUTE`` is the table; every entry is ``execute(bucket, entries, plane, workspace)``, called by the
background thread on every rank in the same order.
"""

from __future__ import annotations

from hvdlite.collectives import allgather, allreduce, alltoall, barrier, broadcast, reducescatter

EXECUTE = {
    "allreduce": allreduce.execute,
    "allgather": allgather.execute,
    "broadcast": broadcast.execute,
    "alltoall": alltoall.execute,
    "reducescatter": reducescatter.execute,
    "barrier": barrier.execute,
}
