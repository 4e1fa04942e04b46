"""Allreduce: pack, combine, scale, unpack; a tensor alone is combined where it lies."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hvdlite import kernels
from hvdlite.buffer import HALVES, NUMPY_DTYPES
from hvdlite.collectives.scaling import scale, unscaled_op
from hvdlite.collectives.workspace import Workspace
from hvdlite.dataplane import halves
from hvdlite.dataplane.base import DataPlane
from hvdlite.fusion import Bucket
from hvdlite.message import Request
from hvdlite.tensor_queue import TensorEntry
from hvdlite.timeline.phase import Phase


def execute(bucket: Bucket, entries: Mapping[int, TensorEntry], plane: DataPlane, workspace: Workspace) -> None:
    """Run one bucket; afterwards every segment's output holds the result."""
    if len(bucket.segments) == 1:
        slot, index, _, _ = bucket.segments[0]
        entry = entries[slot]
        with workspace.timeline.timed(Phase.MPI_ALLREDUCE, entry.request.key.name, bucket.num_bytes):
            combine(plane, entry.inputs[index].array, entry.outputs[index].array, _request(bucket, entry), bucket.dtype)
        return
    _execute_packed(bucket, entries, plane, workspace)


def _execute_packed(
    bucket: Bucket, entries: Mapping[int, TensorEntry], plane: DataPlane, workspace: Workspace
) -> None:
    timeline, name = workspace.timeline, bucket.request.key.name
    item_bytes = NUMPY_DTYPES[bucket.dtype].itemsize
    sizes = np.array([segment.num_elements * item_bytes for segment in bucket.segments], np.int64)
    places = np.array([segment.offset_bytes for segment in bucket.segments], np.int64)
    sources = np.array([entries[one.slot].inputs[one.tensor_index].address for one in bucket.segments], np.uint64)
    targets = np.array([entries[one.slot].outputs[one.tensor_index].address for one in bucket.segments], np.uint64)
    buffer = workspace.fusion_buffer(bucket.num_bytes)
    values = buffer.view(NUMPY_DTYPES[bucket.dtype])
    with timeline.timed(Phase.MEMCPY_IN_FUSION_BUFFER, name, bucket.num_bytes):
        kernels.pack(sources, sizes, places, buffer.ctypes.data)
    with timeline.timed(Phase.MPI_ALLREDUCE, name, bucket.num_bytes):
        combine(plane, values, values, _request(bucket, entries[bucket.segments[0].slot]), bucket.dtype)
    with timeline.timed(Phase.MEMCPY_OUT_FUSION_BUFFER, name, bucket.num_bytes):
        kernels.unpack(targets, sizes, places, buffer.ctypes.data)


def _request(bucket: Bucket, entry: TensorEntry) -> Request:
    """The bucket's; values that stand in for a joined rank's are not to be scaled."""
    return bucket.request._replace(prescale=1.0) if entry.is_stand_in and bucket.dtype not in HALVES else bucket.request


def combine(plane: DataPlane, source: np.ndarray, target: np.ndarray, request: Request, dtype: str) -> None:
    """Prescale, combine across ranks, average and postscale. *Shapes*: both (n,); may be the same array."""
    op, divisor = unscaled_op(request.op, plane.size)
    if dtype in HALVES:
        halves.allreduce(plane, source, target, op, dtype == "bfloat16", request.prescale, request.postscale / divisor)
        return
    if request.prescale != 1.0:
        scale(source, target, request.prescale, 1)
        source = target
    plane.allreduce(source, target, op)
    scale(target, target, request.postscale, divisor)
