"""GPU tensors through pinned host memory, where there is no NCCL or NCCL cannot do it.

Dense sums are packed on the GPU and go in segments, through two of pinned memory in turn: while one is on the wire, the next
comes from the GPU and the one before goes back. All else is copied as a whole, exchanged as tensors of the host are, and copied
back.
The background thread waits for copies to the host, user threads wait for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from hvdlite.buffer import NUMPY_DTYPES, Buffer
from hvdlite.collectives.allreduce import combine
from hvdlite.collectives.packing import packed
from hvdlite.collectives.workspace import Workspace
from hvdlite.dataplane.base import DataPlane
from hvdlite.dataplane.device import Device, DeviceArray, Event
from hvdlite.dataplane.gpus import Gpus
from hvdlite.fusion import Bucket
from hvdlite.message import Collective, ReduceOp, Request
from hvdlite.tensor_queue import TensorEntry
from hvdlite.timeline.phase import Phase

Entries = Mapping[int, TensorEntry]

#: Bytes of a segment. Chosen: long enough that starting a copy does not count; to be measured on a card.
SEGMENT_BYTES = 4 << 20


def takes(bucket: Bucket) -> bool:
    """Whether a bucket may go in segments: told by the request alone, so all ranks agree. A prescale is not for what stands in
    for a joined rank's tensors, which segments do not know."""
    request = bucket.request
    return (request.key.collective == Collective.ALLREDUCE and request.compressor == "none" and request.op != ReduceOp.Adasum
            and request.prescale == 1.0)


def allreduce(bucket: Bucket, entries: Entries, plane: DataPlane, gpus: Gpus, workspace: Workspace) -> None:
    """Run a dense bucket; every rank copies alike."""
    device = gpus.opened
    assert device is not None
    values, unpack = packed(bucket, entries, gpus)
    with workspace.timeline.timed(Phase.MPI_ALLREDUCE, bucket.label, bucket.num_bytes):
        in_segments(device, plane, values, bucket.request, workspace)
    unpack()


def in_segments(
    device: Device, plane: DataPlane, values: DeviceArray, request: Request, workspace: Workspace,
    segment_bytes: int = SEGMENT_BYTES, num_ranks: int | None = None,
) -> None:
    """Combine ``values`` of all ranks in place. ``num_ranks``: how many an average is over, if they are not the plane's."""
    dtype, step = NUMPY_DTYPES[values.dtype], segment_bytes // values.itemsize
    pinned = workspace.pinned(device, 2 * segment_bytes)
    halves = [pinned[:segment_bytes].view(dtype), pinned[segment_bytes:].view(dtype)]
    pieces = [values[start : start + step] for start in range(0, len(values), step)]
    returned: list[Event | None] = [None, None]
    device.wait_for(device.record(), device.wire)  # what is before on the stream: packing, and the last bucket's way back

    def fetch(number: int) -> Event:
        after = returned[number % 2]
        if after is not None:
            device.wait_for(after, device.wire)
        piece, here = pieces[number], halves[number % 2]
        device.copy(here.ctypes.data, piece.address, piece.nbytes, device.wire)
        return device.record(device.wire)

    coming = fetch(0) if pieces else None
    for number, piece in enumerate(pieces):
        following = fetch(number + 1) if number + 1 < len(pieces) else None
        assert coming is not None
        coming.synchronize()
        here = halves[number % 2][: len(piece)]
        combine(plane, here, here, request, values.dtype, num_ranks)
        device.copy(piece.address, here.ctypes.data, piece.nbytes)
        returned[number % 2] = device.record()
        coming = following


def whole(
    bucket: Bucket, entries: Entries, plane: DataPlane, device: Device, workspace: Workspace,
    on_host: Callable[[Bucket, Entries, DataPlane, Workspace], None],
) -> None:
    """Copy what a bucket holds to the host, run it there, and copy the results back."""
    twins: dict[int, _Twin] = {}
    for one in bucket.segments:
        if one.slot not in twins:
            # Of an allreduce only the bucket's tensors; all else has one call in a bucket, with all of its tensors.
            wanted = ({other.tensor_index for other in bucket.segments if other.slot == one.slot}
                      if bucket.request.key.collective == Collective.ALLREDUCE else None)
            twins[one.slot] = _Twin(device, entries[one.slot], wanted)
    device.record().synchronize()
    on_host(bucket, {slot: twin.entry for slot, twin in twins.items()}, plane, workspace)
    for twin in twins.values():
        twin.bring_back()


class _Twin:
    """A call's tensors, those wanted, on the host."""

    def __init__(self, device: Device, entry: TensorEntry, wanted: set[int] | None) -> None:
        self._device, self._of = device, entry
        pick = range(max(len(entry.inputs), len(entry.outputs))) if wanted is None else sorted(wanted)
        self._wanted = list(pick)
        inputs, outputs = list(entry.inputs), list(entry.outputs)
        if not entry.is_stand_in:
            for index in self._wanted:
                inputs[index] = self._fetched(entry.inputs[index])
                if outputs:
                    is_in_place = entry.outputs[index] is entry.inputs[index]
                    outputs[index] = inputs[index] if is_in_place else self._like(entry.outputs[index])
        moments = [self._moment(one) if index in self._wanted else one for index, one in enumerate(entry.moments)]
        self.entry = replace(
            entry, moments=tuple(moments), inputs=tuple(inputs), outputs=tuple(outputs), addresses=None, flats=(),
            allocate=None if entry.allocate is None else self._allocate)

    def _fetched(self, buffer: Buffer) -> Buffer:
        made = self._like(buffer)
        self._device.copy(made.array.ctypes.data, buffer.address, made.array.nbytes)
        return made

    def _moment(self, values: np.ndarray | DeviceArray) -> np.ndarray:
        if not isinstance(values, DeviceArray):
            return values
        made: np.ndarray = self._host((len(values),), values.dtype).array
        self._device.copy(made.ctypes.data, values.address, values.nbytes)
        return made

    def _like(self, buffer: Buffer) -> Buffer:
        return self._host(buffer.shape, buffer.dtype)

    def _host(self, shape: tuple[int, ...], dtype: str) -> Buffer:
        kind = NUMPY_DTYPES[dtype]
        array: Any = self._device.pinned(prod(shape) * kind.itemsize).view(kind)
        return Buffer(array, dtype, shape, "cpu", array)

    def _allocate(self, index: int, shape: tuple[int, ...]) -> Buffer:
        return self._host(shape, self._of.inputs[index].dtype)

    def bring_back(self) -> None:
        """Copy the results to the GPU; they are there in the order of its stream."""
        entry, twin = self._of, self.entry
        entry.received_splits = twin.received_splits
        if entry.is_stand_in:
            return
        if not entry.outputs:
            assert entry.allocate is not None
            entry.outputs = tuple(entry.allocate(index, one.shape) for index, one in enumerate(twin.outputs))
        for index in self._wanted:
            source, target = twin.outputs[index], entry.outputs[index]
            array = np.ascontiguousarray(source.array)
            self._device.copy(target.address, array.ctypes.data, array.nbytes)
            self._device.keep(array)
