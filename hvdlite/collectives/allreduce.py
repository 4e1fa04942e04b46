"""Allreduce: pack, combine, scale, unpack; a tensor alone is combined where it lies."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import numpy as np

from hvdlite import kernels
from hvdlite.buffer import HALVES, NUMPY_DTYPES
from hvdlite.collectives import adasum
from hvdlite.collectives.scaling import scale, unscaled_op
from hvdlite.collectives.workspace import Workspace
from hvdlite.dataplane import halves
from hvdlite.dataplane.base import DataPlane, even_counts
from hvdlite.fusion import Bucket
from hvdlite.message import ReduceOp, Request
from hvdlite.tensor_queue import TensorEntry
from hvdlite.timeline.phase import Phase

#: Looked up once.
_EXCHANGE = Phase.MPI_ALLREDUCE


def execute(bucket: Bucket, entries: Mapping[int, TensorEntry], plane: DataPlane, workspace: Workspace) -> None:
    """Run one bucket; afterwards every segment's output holds the result."""
    if len(bucket.segments) == 1:
        slot, index, _, _ = bucket.segments[0]
        entry = entries[slot]
        request, began_ns = bucket.request, time.monotonic_ns()
        if entry.is_stand_in and bucket.dtype not in HALVES:
            request = request._replace(prescale=1.0)  # what changes nothing is not to be scaled
        _combine(plane, entry.inputs[index].array, entry.outputs[index].array, bucket, request)
        workspace.passage = _EXCHANGE, began_ns, 0, 0, time.monotonic_ns()
        return
    _execute_packed(bucket, entries, plane, workspace)


def _execute_packed(
    bucket: Bucket, entries: Mapping[int, TensorEntry], plane: DataPlane, workspace: Workspace
) -> None:
    sizes, places, indices = bucket.layout
    known = entries[bucket.segments[0].slot]
    if bucket.has_one_owner and known.addresses is not None:
        sources = targets = known.addresses[indices]
        in_place = _side_by_side(sources, places, bucket, known.flats)
        if in_place is not None:
            began_ns = time.monotonic_ns()
            _combine(plane, in_place, in_place, bucket, bucket.request)
            workspace.passage = _EXCHANGE, began_ns, 0, 0, time.monotonic_ns()
            return
    else:
        sources = np.array([entries[one.slot].inputs[one.tensor_index].address for one in bucket.segments], np.uint64)
        targets = np.array([entries[one.slot].outputs[one.tensor_index].address for one in bucket.segments], np.uint64)
    buffer = workspace.fusion_buffer(bucket.num_bytes)
    values = buffer.view(NUMPY_DTYPES[bucket.dtype])
    began_ns = time.monotonic_ns()
    kernels.pack(sources, sizes, places, buffer.ctypes.data)
    packed_ns = time.monotonic_ns()
    _combine(plane, values, values, bucket, _prescaled(bucket, entries, values))
    combined_ns = time.monotonic_ns()
    kernels.unpack(targets, sizes, places, buffer.ctypes.data)
    workspace.passage = _EXCHANGE, began_ns, packed_ns, combined_ns, time.monotonic_ns()


def _side_by_side(
    addresses: np.ndarray, places: np.ndarray, bucket: Bucket, flats: Sequence[np.ndarray]
) -> np.ndarray | None:
    """The tensors as one array, where they lie in memory as they would be packed."""
    start = int(addresses[0])
    for flat in flats:
        at = start - flat.ctypes.data
        if 0 <= at <= flat.nbytes - bucket.num_bytes:
            if not (addresses - places.astype(np.uint64) == addresses[0]).all():
                return None
            return flat[at : at + bucket.num_bytes].view(NUMPY_DTYPES[bucket.dtype])
    return None


def _prescaled(bucket: Bucket, entries: Mapping[int, TensorEntry], values: np.ndarray) -> Request:
    """The bucket's request. Where some values stand in for a joined rank's, the others are scaled here, and it says so."""
    request = bucket.request
    stand_ins = [entries[one.slot].is_stand_in for one in bucket.segments]
    if request.prescale == 1.0 or bucket.dtype in HALVES or not any(stand_ins):
        return request
    for one, is_stand_in in zip(bucket.segments, stand_ins, strict=True):
        if not is_stand_in:
            start = one.offset_bytes // values.itemsize
            own = values[start : start + one.num_elements]
            scale(own, own, request.prescale, 1)
    return request._replace(prescale=1.0)


def _combine(plane: DataPlane, source: np.ndarray, target: np.ndarray, bucket: Bucket, request: Request) -> None:
    if request.op != ReduceOp.Adasum:
        combine(plane, source, target, request, bucket.dtype)
        return
    item_bytes = NUMPY_DTYPES[bucket.dtype].itemsize
    tensors = [slice(one.offset_bytes // item_bytes, one.offset_bytes // item_bytes + one.num_elements)
               for one in bucket.segments]
    adasum.combine(plane, source, target, tensors, bucket.dtype, request.prescale, request.postscale)


#: By op, not as a dict: an enumeration's hash is Python code. MPIs differ in what Min and Max make of NaN, even between the
#: ranks of one call; these let it through.
_UFUNCS = [{ReduceOp.Min: np.minimum, ReduceOp.Max: np.maximum}.get(op) for op in sorted(ReduceOp)]


def _extreme(plane: DataPlane, source: np.ndarray, target: np.ndarray, ufunc: np.ufunc) -> None:
    """Min and Max of floats: every rank's pieces to their owner, who combines them in rank order; then all gather."""
    counts = even_counts(len(source), plane.size)
    rows = np.empty((plane.size, counts[plane.rank]), source.dtype)
    plane.alltoall(source, rows.reshape(-1), np.tile(np.array(counts, np.int64), (plane.size, 1)))
    plane.allgather(ufunc.reduce(rows, axis=0), target, counts)


def combine(
    plane: DataPlane, source: np.ndarray, target: np.ndarray, request: Request, dtype: str, num_ranks: int | None = None
) -> None:
    """Prescale, combine across ranks, average and postscale. *Shapes*: both (n,); may be the same array.

    ``num_ranks``: how many an average is over, if they are not the plane's.
    """
    op, divisor = unscaled_op(request.op, num_ranks or plane.size)
    if dtype in HALVES:
        halves.allreduce(plane, source, target, op, dtype == "bfloat16", request.prescale, request.postscale / divisor)
        return
    if request.prescale != 1.0:
        scale(source, target, request.prescale, 1)
        source = target
    if (ufunc := _UFUNCS[op]) is not None and target.dtype.kind == "f":
        _extreme(plane, source, target, ufunc)
    else:
        plane.allreduce(source, target, op)
    scale(target, target, request.postscale, divisor)


def finish(target: np.ndarray, request: Request, num_ranks: int) -> None:
    """What ``combine`` does after the sum over ``num_ranks`` ranks: average and postscale. Any thread."""
    divisor = unscaled_op(request.op, num_ranks)[1]
    if request.postscale == 1.0 and divisor == 1:
        return
    # Whatever the calling thread wants to hear of otherwise: the background thread would have said nothing.
    with np.errstate(all="ignore"):
        scale(target, target, request.postscale, divisor)
