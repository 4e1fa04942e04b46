"""The quantised allreduce of a bucket: residuals, and where hosts hold several ranks, dense sums inside of them.

*Guarantees*: outputs are bitwise equal on all ranks, and do not depend on what shares the bucket.

Several ranks on each of several hosts: every tensor is cut, in whole groups, for the ranks of a host; each sums its piece
densely, in the order of ranks, exchanges it with the ranks of other hosts that have the same piece, quantised, and hands the
result to the ranks of its host. So a host's interface carries what one rank's would. Where hosts hold different numbers of
ranks, or it was measured to be slower (many ranks on a processor, a fast network), all exchange directly.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from hvdlite import kernels
from hvdlite.buffer import NUMPY_DTYPES
from hvdlite.collectives.measure import time_ways
from hvdlite.collectives.scaling import scale
from hvdlite.collectives.workspace import Workspace
from hvdlite.compression.exchange import ExchangeSpec, owned_groups
from hvdlite.compression.residual import ResidualKey
from hvdlite.compression.rotation import GROUP
from hvdlite.dataplane import quantized
from hvdlite.dataplane.base import DataPlane
from hvdlite.dataplane.device import Device
from hvdlite.dataplane.quantized import Tensors
from hvdlite.fusion import Bucket
from hvdlite.message import Key, ReduceOp, Request
from hvdlite.tensor_queue import TensorEntry
from hvdlite.timeline.phase import Phase

_log = logging.getLogger("hvdlite")

#: What routes are timed on, in bytes of float32; and what another than the first must gain to be taken. Chosen: of two that
#: are about equal the same should be taken in every run, and the first has the fewest quantisations.
ROUTE_PROBE_BYTES, LEAST_GAIN_OF_OTHERS = (1 << 20, 16 << 20), 0.15


#: Operations between two records of residuals. Chosen: seldom, and prime, so that every bucket has its turn.
RECORD_EVERY = 53


def execute(bucket: Bucket, entries: Mapping[int, TensorEntry], plane: DataPlane, workspace: Workspace) -> None:
    """Run one bucket; afterwards every segment's output holds the result."""
    request = bucket.request
    factor = request.prescale * request.postscale / (plane.size if request.op == ReduceOp.Average else 1)
    if plane.size == 1:
        for one in bucket.segments:
            entry = entries[one.slot]
            _scale_alone(entry.inputs[one.tensor_index].array, entry.outputs[one.tensor_index].array, bucket.dtype, factor)
        return
    exchange = ExchangeSpec.parse(request.compressor)
    keys, tensors = find_tensors(bucket, entries, workspace, exchange)
    route = route_of(plane, exchange, workspace)
    with workspace.timeline.timed(Phase.QUANTIZED_ALLREDUCE, bucket.label, bucket.num_bytes):
        is_finite = allreduce(plane, route, tensors, factor, workspace)
    _record(bucket, exchange, keys, workspace)
    workspace.residuals.end({key: bool(finite) for key, finite in zip(keys, is_finite, strict=True) if key is not None})


def _record(bucket: Bucket, exchange: ExchangeSpec, keys: list[ResidualKey | None], workspace: Workspace) -> None:
    """Now and then, what is sent and how much is left over; reading all residuals takes a pass over memory."""
    timeline = workspace.timeline
    if not timeline.is_recording or (timeline.operation >= 2 * RECORD_EVERY and timeline.operation % RECORD_EVERY):
        return
    codec, now_ns = exchange.codec, time.monotonic_ns()
    left = [workspace.residuals.arrays(key, codec.padded(one.num_elements), codec.scale == "rotated")[1]
            for key, one in zip(keys, bucket.segments, strict=True) if key is not None]
    norm = float(np.sqrt(sum(float(np.dot(one, one)) for one in left)))
    wire = sum(codec.wire_bytes(one.num_elements) for one in bucket.segments)
    timeline.span(Phase.RESIDUAL, bucket.label, now_ns, now_ns, wire, count=bucket.num_elements, value=norm)


def tensor_names(request: Request) -> tuple[str, tuple[str, ...]]:
    """Whose the residuals of a request's tensors are, and the tensors' names: an optimizer's label and its gradients' names, or
    a call's own name."""
    name = request.key.name
    if request.names:
        return name.rpartition(".")[0], request.names
    if len(request.shapes) == 1:
        return name, (name,)
    return name, tuple(f"{name}.{index}" for index in range(len(request.shapes)))


def has_residuals(request: Request) -> bool:
    """Whether the call can have residuals: two unnamed calls have nothing to do with one another."""
    return not request.key.name.startswith(f"{request.key.collective}.noname.")


def find_tensors(
    bucket: Bucket, entries: Mapping[int, TensorEntry], workspace: Workspace, exchange: ExchangeSpec,
    device: Device | None = None,
) -> tuple[list[ResidualKey | None], Tensors]:
    """The bucket's tensors with their residuals, all on ``device`` or on the host, and the keys of these; None for a tensor
    without one."""
    store, begun = workspace.residuals, set[Key]()
    keys: list[ResidualKey | None] = []
    names, found = [], []
    for one in bucket.segments:
        entry = entries[one.slot]
        request = entry.request
        owner, of_tensors = tensor_names(request)
        name = of_tensors[one.tensor_index]
        current = shadow = 0
        # What is quantised in units of a second moment has no residual: feedback harms there (design.md, section 5).
        has_residual = one.num_elements and has_residuals(request) and not exchange.is_preconditioned
        key = (request.key.process_set_id, owner, name) if has_residual else None
        if key is not None:
            if request.key not in begun:
                begun.add(request.key)
                store.begin(request.key.process_set_id, owner, request.key.name)
            length, is_rotated = exchange.codec.padded(one.num_elements), exchange.codec.scale == "rotated"
            arrays = store.arrays(key, length, is_rotated, device)
            current, shadow = (array.ctypes.data if device is None else array.address for array in arrays)
            if device is not None:
                device.keep(arrays)  # whatever becomes of the residual meanwhile
        keys.append(key)
        names.append(name)
        moment = 0  # where a rank has joined
        if entry.moments:
            values = entry.moments[one.tensor_index]
            moment = values.ctypes.data if device is None else values.address
        found.append((entry.inputs[one.tensor_index].address, entry.outputs[one.tensor_index].address, current, shadow, moment))
    addresses = np.array(found, np.int64).T
    sizes = tuple(one.num_elements for one in bucket.segments)
    return keys, Tensors(tuple(names), sizes, bucket.dtype, NUMPY_DTYPES[bucket.dtype].itemsize, *addresses)


@dataclass(frozen=True)
class Route:
    """The schedule of a quantised exchange, and whether hosts sum densely inside first; ``exchange`` has the schedule."""

    exchange: ExchangeSpec
    by_hosts: bool

    def __str__(self) -> str:
        return f"{self.exchange.schedule}{' between hosts' if self.by_hosts else ''}"


def allreduce(plane: DataPlane, route: Route, tensors: Tensors, factor: float, workspace: Workspace) -> np.ndarray:
    """Exchange directly, or between hosts."""
    levels = plane.levels() if route.by_hosts else None
    if levels is None:
        return quantized.allreduce(plane, route.exchange, tensors, factor)
    return allreduce_by_hosts(*levels, route.exchange, tensors, factor, workspace)


def route_of(plane: DataPlane, exchange: ExchangeSpec, workspace: Workspace) -> Route:
    """The way of this exchange that is the fastest one on this plane, of those that are left open. Collective when it is new.

    Measured once: were it chosen bucket by bucket, a result would depend on what shares its bucket.
    """
    known = workspace.routes.setdefault(plane, {})
    if exchange not in known:
        known[exchange] = _fastest_route(plane, exchange, workspace)
    return known[exchange]


def _fastest_route(plane: DataPlane, exchange: ExchangeSpec, workspace: Workspace) -> Route:
    """Of those that are as good, the first one."""
    levels = None if workspace.hierarchical == "off" else plane.levels()
    inside = [] if levels is None else [(True, levels[1].size)]
    direct = [] if inside and workspace.hierarchical == "on" else [(False, plane.size)]
    open_ones = ("two_shot", "ring") if exchange.schedule == "auto" else (exchange.schedule,)
    plain = replace(exchange, is_preconditioned=False)
    routes = {}
    for by_hosts, num_ranks in inside + direct:
        for schedule in open_ones[:1] if num_ranks == 2 else open_ones:  # two ranks send the same messages in both
            route = Route(replace(plain, schedule=schedule), by_hosts)
            routes[str(route)] = route
    first = next(iter(routes))
    chosen = first
    if len(routes) > 1:

        def prepare(values: np.ndarray) -> Mapping[str, Callable[[], object]]:
            return {name: _probe(plane, route, [values], workspace) for name, route in routes.items()}

        seconds = {name: points[-1][1] for name, points in time_ways(plane, prepare, ROUTE_PROBE_BYTES).items()}
        fastest = min(seconds, key=seconds.__getitem__)
        if seconds[fastest] < (1 - LEAST_GAIN_OF_OTHERS) * seconds[first]:
            chosen = fastest
        if plane.rank == 0:
            _log.info("schedule of %s on %d ranks: %s: %s", exchange.codec, plane.size,
                      ", ".join(f"{name} {1e3 * one:.3g} ms" for name, one in seconds.items()), chosen)
    return Route(replace(exchange, schedule=routes[chosen].exchange.schedule), routes[chosen].by_hosts)


def probe(
    plane: DataPlane, exchange: ExchangeSpec, arrays: Sequence[np.ndarray], workspace: Workspace
) -> Callable[[], object]:
    """An exchange of float32 arrays as the tensors of a bucket, to be timed."""
    return _probe(plane, route_of(plane, exchange, workspace), arrays, workspace)


def _probe(plane: DataPlane, route: Route, arrays: Sequence[np.ndarray], workspace: Workspace) -> Callable[[], object]:
    sizes = tuple(map(len, arrays))
    kept = [np.zeros((2, route.exchange.codec.padded(size)), np.float32) for size in sizes]
    at, residuals, shadows = (
        np.array([one.ctypes.data for one in some], np.int64)
        for some in (arrays, [one[0] for one in kept], [one[1] for one in kept]))
    names = tuple(f"probe.{index}" for index in range(len(sizes)))
    tensors = Tensors(names, sizes, "float32", 4, at, at, residuals, shadows, np.zeros(len(sizes), np.int64))
    return lambda: (allreduce(plane, route, tensors, 1.0, workspace), arrays, kept)  # with the memory that it works on


def allreduce_by_hosts(
    local: DataPlane, cross: DataPlane, exchange: ExchangeSpec, tensors: Tensors, factor: float, workspace: Workspace
) -> np.ndarray:
    """Sum within hosts, exchange between them, hand out within hosts."""
    cuts = cuts_of(tensors, local.size)
    pieces = cuts[:, 1:] - cuts[:, :-1]  # (tensors, ranks of the host), in elements
    counts = pieces.sum(axis=0)
    dtype = NUMPY_DTYPES[tensors.dtype]
    # Scratch that stays: fresh memory of this size costs as much time as the sums.
    num_packed, num_rows = int(counts.sum()), local.size * int(counts[local.rank])
    scratch = workspace.fusion_buffer((num_packed + num_rows) * tensors.item_bytes).view(dtype)
    packed, rows = scratch[:num_packed], scratch[num_packed:].reshape(local.size, -1)
    places, sizes = _places(pieces, tensors.item_bytes)
    offsets = (cuts[:, :-1] * tensors.item_bytes).T.reshape(-1)
    kernels.pack(_each(tensors.sources, local.size) + offsets.astype(np.uint64), sizes, places, packed.ctypes.data)
    local.alltoall(packed, rows.reshape(-1), np.tile(counts, (local.size, 1)))
    mine = _sum_in_order(rows, tensors.dtype)

    own = pieces[:, local.rank]
    starts = cuts[:, local.rank]
    at = (np.cumsum(own) - own) * 4 + mine.ctypes.data

    def shifted(addresses: np.ndarray) -> np.ndarray:
        return np.where(addresses, addresses + 4 * starts, 0)

    part = Tensors(tensors.names, tuple(own.tolist()), "float32", 4, at, at, shifted(tensors.residuals), shifted(tensors.shadows),
                   shifted(tensors.moments))
    is_finite = quantized.allreduce(cross, exchange, part, factor)

    local.allgather(narrowed(mine, tensors.dtype), packed, counts.tolist())
    kernels.unpack(_each(tensors.targets, local.size) + offsets.astype(np.uint64), sizes, places, packed.ctypes.data)
    verdicts = np.empty(local.size * len(is_finite), np.uint8)
    local.allgather(is_finite.view(np.uint8), verdicts, [len(is_finite)] * local.size)
    return np.logical_and.reduce(verdicts.reshape(local.size, -1), axis=0)


def cuts_of(tensors: Tensors, num_ranks: int) -> np.ndarray:
    """Of each tensor where the pieces of a host's ranks begin and the last ends. *Shapes*: (tensors, num_ranks + 1)."""
    return np.array([_cuts(size, name, num_ranks) for size, name in zip(tensors.sizes, tensors.names, strict=True)])


def _cuts(size: int, name: str, num_ranks: int) -> list[int]:
    """Where the piece of each rank of a host begins within a tensor, and its end, in elements."""
    groups = owned_groups(-(-size // GROUP), num_ranks, name)
    return [min(size, GROUP * end) for end in accumulate(groups, initial=0)]


def _places(pieces: np.ndarray, item_bytes: int) -> tuple[np.ndarray, np.ndarray]:
    """Offsets and sizes in bytes of all pieces, those of the host's first rank first. *Shapes*: (ranks * tensors,), int64."""
    sizes = np.ascontiguousarray(pieces.T).reshape(-1) * item_bytes
    return np.cumsum(sizes) - sizes, sizes


def _each(addresses: np.ndarray, num_ranks: int) -> np.ndarray:
    return np.tile(addresses, num_ranks).astype(np.uint64)


def _sum_in_order(rows: np.ndarray, dtype: str) -> np.ndarray:
    """Add up the ranks' rows in float32, or float64, in the order of ranks; as float32. Float rows may be overwritten."""
    total = widened(rows[0], dtype)
    for row in rows[1:]:
        total += widened(row, dtype)
    return total.astype(np.float32, copy=False)


def widened(values: np.ndarray, dtype: str) -> np.ndarray:
    """16-bit floats as float32, others as they are."""
    if dtype not in ("float16", "bfloat16"):
        return values
    made = np.empty(len(values), np.float32)
    kernels.halves_to_float(values.view(np.uint16), made, dtype == "bfloat16")
    return made


def narrowed(values: np.ndarray, dtype: str) -> np.ndarray:
    """The way back of ``widened``, also to float64."""
    if dtype not in ("float16", "bfloat16"):
        return values.astype(NUMPY_DTYPES[dtype], copy=False)
    bits = np.empty(len(values), np.uint16)
    kernels.float_to_halves(values, bits, dtype == "bfloat16")
    return bits.view(NUMPY_DTYPES[dtype])


def _scale_alone(source: np.ndarray, target: np.ndarray, dtype: str, factor: float) -> None:
    """The result where there is one rank: nothing is quantised."""
    if factor == 1.0:
        target[:] = source
    elif dtype == "bfloat16":
        target[:] = narrowed(widened(source, dtype) * np.float32(factor), dtype)
    else:
        scale(source, target, factor, 1)
