"""Fusion: which ready tensors travel together. Pure functions of agreed requests.

A Bucket is the unit of execution. Tensors of one request (a group, an optimizer's bucket) are laid out from
that request alone, so their result never depends on what else was ready. Free-standing requests of one
tensor that are ready in the same cycle fuse greedily in slot order, up to the threshold.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import NamedTuple

import numpy as np

from hvdlite.message import Collective, Key, Request

#: Bytes from which a tensor is exchanged where it lies instead of being packed. Chosen near where copying a
#: tensor twice costs as much as one more collective over shared memory; see tools/bench_runtime.py.
DIRECT_BYTES = 32 * 1024

#: The most that is packed of a compressed bucket that travels densely. Chosen: it stays in cache.
PACKED_BYTES = 2 << 20

#: Every packed tensor starts at a multiple of this many bytes, so that no dtype is misaligned.
ALIGNMENT_BYTES = 64

#: What a compressor quantises; other tensors of a call travel as they are.
FLOATS = frozenset(("float16", "bfloat16", "float32", "float64"))

ITEM_BYTES = {
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "int8": 1, "uint8": 1, "int16": 2, "int32": 4,
    "int64": 8, "bool": 1,
}


class Segment(NamedTuple):
    """One tensor's place in a bucket: tensor ``tensor_index`` of ``slot``'s request, from ``offset_bytes``."""

    slot: int
    tensor_index: int
    offset_bytes: int
    num_elements: int


@dataclass(frozen=True)
class Bucket:
    """Tensors with equal collective, dtype, op and scales, executed as one operation.

    ``request`` stands for all of them: read its collective, op, scales, device and process set.
    ``num_bytes`` counts the packed layout, alignment included. ``finishes``: slots that are complete once
    this bucket has run.
    """

    request: Request
    dtype: str
    segments: tuple[Segment, ...]
    num_bytes: int
    finishes: tuple[int, ...] = ()
    #: Why nothing more travels with it: a word of ``phase.REASONS``.
    reason: str = "single"

    @cached_property
    def label(self) -> str:
        """How timelines call it: by its first tensor."""
        return self.request.label

    @cached_property
    def num_elements(self) -> int:
        """Of all tensors."""
        return sum(one.num_elements for one in self.segments)

    @cached_property
    def layout(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of every tensor: its bytes, its offset in bytes, its index in its request. *Shapes*: (tensors,), int64."""
        item_bytes = ITEM_BYTES[self.dtype]
        rows = [(one.num_elements * item_bytes, one.offset_bytes, one.tensor_index) for one in self.segments]
        sizes, offsets, indices = np.array(rows, np.int64).T.copy()
        return sizes, offsets, indices

    @cached_property
    def has_one_owner(self) -> bool:
        """Whether all tensors are of one request."""
        return len({one.slot for one in self.segments}) == 1

    @cached_property
    def dense(self) -> tuple[Bucket, ...]:
        """The buckets in which the tensors of a compressed one travel when they are not: large ones alone, where they lie."""
        return tuple(_as_dense(self))


@dataclass(frozen=True)
class Plan:
    """What one cycle does, in order; ``keys``: all slots that it serves, each with its key."""

    buckets: tuple[Bucket, ...]
    keys: tuple[tuple[int, Key], ...]

    @cached_property
    def slots(self) -> tuple[int, ...]:
        """All slots that it serves."""
        return tuple(slot for slot, _ in self.keys)

    @cached_property
    def places(self) -> dict[int, int]:
        """Of each slot, which bucket is the last that holds some of it."""
        return {segment.slot: number for number, bucket in enumerate(self.buckets) for segment in bucket.segments}


def num_bytes(dtype: str, shape: Sequence[int]) -> int:
    """Size of a tensor in bytes."""
    return prod(shape) * ITEM_BYTES[dtype]


def compile_plan(requests: Iterable[tuple[int, Request]], threshold_bytes: int) -> Plan:
    """Lay out agreed requests, given in slot order, as buckets.

    Buckets come in the order of their first tensor; a bucket is closed by the threshold or the end.
    """
    open_buckets: dict[tuple[object, ...], list[tuple[int, int, int, Request]]] = {}
    filled: dict[tuple[object, ...], int] = {}
    closed: list[tuple[Request, str, list[tuple[int, int, int, Request]]]] = []
    reasons: list[str] = []
    numbers: dict[tuple[object, ...], int] = {}
    keys = []
    for slot, request in requests:
        keys.append((slot, request.key))
        if request.key.collective != Collective.ALLREDUCE:
            closed.append((request, "", [(slot, 0, 0, request)]))
            reasons.append("single")
            continue
        for index, (dtype, shape) in enumerate(zip(request.dtypes, request.shapes, strict=True)):
            size = num_bytes(dtype, shape)
            if request.compressor != "none" and dtype not in FLOATS:
                request = request._replace(compressor="none")
            item = (slot, index, size, request)
            if request.compressor == "none" and size >= min(DIRECT_BYTES, threshold_bytes + 1):
                closed.append((request, dtype, [item]))
                reasons.append("large")
                continue
            kind = _fusion_kind(slot, request, dtype)
            if kind in open_buckets and filled[kind] + aligned(size) > threshold_bytes and not _is_free(request):
                reasons[numbers[kind]] = "full"
                del open_buckets[kind]
            if kind not in open_buckets:
                open_buckets[kind] = []
                filled[kind] = 0
                closed.append((request, dtype, open_buckets[kind]))
                numbers[kind] = len(reasons)
                reasons.append("end")
            open_buckets[kind].append(item)
            filled[kind] += aligned(size)
    for kind, number in numbers.items():
        if kind in open_buckets:
            reasons[number] = _reason(kind, numbers, filled[kind] >= threshold_bytes)
    made = [replace(_bucket(*one), reason=reason) for one, reason in zip(closed, reasons, strict=True)]
    return Plan(_with_finishes(made), tuple(keys))


#: Of a fusion kind, what its parts are called where they keep tensors apart.
_KIND_PARTS = ("group", "dtype", "process set", "op", "scale", "scale", "device", "compressor")


def _reason(kind: tuple[object, ...], kinds: Iterable[tuple[object, ...]], is_full: bool) -> str:
    """Why a bucket that is open at the end of a plan holds no more."""
    if kind[0] != -1:
        return "group"
    if is_full:
        return "full"
    for other in kinds:
        if other != kind and other[0] == -1:
            return next(part for part, one, two in zip(_KIND_PARTS, kind, other, strict=True) if one != two)
    return "end"


def _with_finishes(buckets: list[Bucket]) -> tuple[Bucket, ...]:
    last = {segment.slot: number for number, bucket in enumerate(buckets) for segment in bucket.segments}
    done: dict[int, list[int]] = {}
    for slot, number in last.items():
        done.setdefault(number, []).append(slot)
    return tuple(replace(bucket, finishes=tuple(done.get(number, ()))) for number, bucket in enumerate(buckets))


def _fusion_kind(slot: int, request: Request, dtype: str) -> tuple[object, ...]:
    """Tensors of equal kind may share a bucket; those of a group only with one another."""
    group = -1 if len(request.shapes) == 1 or _is_free(request) else slot
    return (group, dtype, request.key.process_set_id, request.op, request.prescale, request.postscale,
            request.device, request.compressor)


def _as_dense(bucket: Bucket) -> list[Bucket]:
    request = bucket.request._replace(compressor="none")
    item_bytes = ITEM_BYTES[bucket.dtype]
    alone: list[Bucket] = []
    packed: list[Bucket] = []
    segments: list[Segment] = []
    offset = 0
    for one in bucket.segments:
        size = one.num_elements * item_bytes
        if size >= DIRECT_BYTES:
            alone.append(Bucket(request, bucket.dtype, (one._replace(offset_bytes=0),), size))
            continue
        if segments and offset + aligned(size) > PACKED_BYTES:
            packed.append(Bucket(request, bucket.dtype, tuple(segments), offset))
            segments, offset = [], 0
        segments.append(one._replace(offset_bytes=offset))
        offset += aligned(size)
    if segments:
        packed.append(Bucket(request, bucket.dtype, tuple(segments), offset))
    return alone + packed


def _is_free(request: Request) -> bool:
    """Whether tensors share a bucket whatever their number and group: where they are quantised no bucket changes a result,
    nothing is packed, and one long exchange keeps the wire busier than several short ones."""
    return request.compressor == "auto" or request.compressor.startswith("quantized")


def aligned(size: int) -> int:
    """What a packed tensor of ``size`` bytes takes."""
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _bucket(request: Request, dtype: str, items: list[tuple[int, int, int, Request]]) -> Bucket:
    if not dtype:
        return Bucket(request, request.dtypes[0] if request.dtypes else "", (Segment(items[0][0], 0, 0, 0),), 0)
    segments = []
    offset = 0
    for slot, index, size, owner in items:
        segments.append(Segment(slot, index, offset, prod(owner.shapes[index])))
        offset += aligned(size)
    # A tensor alone is exchanged where it lies: no padding.
    return Bucket(request, dtype, tuple(segments), items[0][2] if len(items) == 1 else offset)


def plan_gradient_buckets(sizes_bytes: Sequence[int], threshold_bytes: int) -> list[list[int]]:
    """Cut the gradients of an optimizer into buckets, in reverse order of registration.

    Returns lists of indices into ``sizes_bytes``. A bucket is closed before it would pass ``threshold_bytes``;
    a gradient that alone is larger has its own.
    """
    buckets: list[list[int]] = []
    filled = 0
    for index in reversed(range(len(sizes_bytes))):
        if not buckets or filled + sizes_bytes[index] > threshold_bytes:
            buckets.append([])
            filled = 0
        buckets[-1].append(index)
        filled += sizes_bytes[index]
    return buckets
