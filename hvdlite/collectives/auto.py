"""``Compression.auto``: each bucket goes the way that was measured to be the fastest for its size: float32, float16, quantised.

When the first such bucket of a process set comes, and every ``MEASURE_EVERY`` of them after that, all ranks time each way on
arrays of their own, together; the slowest rank's times count, so all decide alike, and rank 0 logs one line for each bucket.
Nothing of a way that is not taken remains: no residual is made before the quantised one is.

*What it costs*: a few exchanges of up to ``PROBE_BYTES`` in each way, fewer and smaller where the link is slow.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from hvdlite import kernels
from hvdlite.collectives import quantized
from hvdlite.collectives.allreduce import combine
from hvdlite.collectives.allreduce import execute as execute_dense
from hvdlite.collectives.workspace import Workspace
from hvdlite.compression.exchange import ExchangeSpec
from hvdlite.compression.policy import FP16, FP32, QUANTIZED, Decision, decide
from hvdlite.compression.spec import CodecSpec
from hvdlite.dataplane import halves
from hvdlite.dataplane import quantized as exchange
from hvdlite.dataplane.base import DataPlane
from hvdlite.fusion import ITEM_BYTES, Bucket, as_dense
from hvdlite.message import ReduceOp
from hvdlite.tensor_queue import TensorEntry

_log = logging.getLogger("hvdlite")

#: What a Request says for it.
NAME = "auto"
#: Sizes that are timed, in bytes of float32. Chosen: latency shows in the first, and the last is past the caches.
PROBE_BYTES = (64 << 10, 1 << 20, 8 << 20)
#: Rounds for each, of which the median counts; and the seconds after which a larger size is left out.
ROUNDS, ENOUGH_S = 5, 0.25
#: Buckets between two measurements. Chosen after design.md, section 5.
MEASURE_EVERY = 1000
#: The quantised way.
SPEC = ExchangeSpec(CodecSpec())


class Auto:
    """What was measured and decided on one process set. *Threads*: the background thread; ``decisions`` may be read by any."""

    def __init__(self) -> None:
        self.decisions: dict[str, Decision] = {}
        self._measured: dict[str, list[tuple[int, float]]] = {}
        self._num_buckets = 0

    def way(self, bucket: Bucket, plane: DataPlane) -> Decision:
        """How this bucket travels; all ranks of the plane ask in the same order."""
        if self._num_buckets % MEASURE_EVERY == 0:
            self._measured = measure(plane)
            old, self.decisions = self.decisions, {}
            self._former = {label: one.way for label, one in old.items()}
        self._num_buckets += 1
        decision = self.decisions.get(bucket.label)
        num_bytes = 4 * sum(one.num_elements for one in bucket.segments)
        if decision is None or decision.num_bytes != num_bytes:
            ways = dict(self._measured)
            if bucket.dtype in ("float16", "bfloat16"):
                ways[FP32] = ways.pop(FP16)  # its dense way
            former = self._former.get(bucket.label, "")
            decision = self.decisions[bucket.label] = decide(bucket.label, num_bytes, ways, former)
            if plane.rank == 0 and decision.way != former:
                _log.info("compression of %s", decision)
        return decision


def execute(bucket: Bucket, entries: Mapping[int, TensorEntry], plane: DataPlane, workspace: Workspace) -> None:
    """Run one bucket the way that is the fastest."""
    request = bucket.request
    if plane.size == 1:
        quantized.execute(_quantized(bucket), entries, plane, workspace)
        return
    auto = workspace.autos.setdefault(request.key.process_set_id, Auto())
    decision = auto.way(bucket, plane)
    if decision.way == QUANTIZED:
        quantized.execute(_quantized(bucket), entries, plane, workspace)
        return
    _take_residuals(bucket, entries, workspace)
    if decision.way == FP32 or bucket.dtype != "float32":
        for one in as_dense(bucket):
            execute_dense(one, entries, plane, workspace)
    else:
        _execute_as_halves(bucket, entries, plane)


def _quantized(bucket: Bucket) -> Bucket:
    return replace(bucket, request=bucket.request._replace(compressor=str(SPEC)))


def _take_residuals(bucket: Bucket, entries: Mapping[int, TensorEntry], workspace: Workspace) -> None:
    """Add to a bucket that travels densely from now on what the quantised way had left over, which is kept no longer."""
    store = workspace.residuals
    if not store.num_bytes:
        return
    from hvdlite.compression import codec_cpu

    for one in bucket.segments:
        entry = entries[one.slot]
        owner, names = quantized.tensor_names(entry.request)
        place = (entry.request.key.process_set_id, owner)
        store.settle(*place)
        residual = store.take((*place, names[one.tensor_index]))
        if residual is None:
            continue
        buffer = entry.inputs[one.tensor_index]
        left = np.empty(one.num_elements, np.float32)
        codec_cpu.rotate_back(SPEC.codec, residual, left)
        own = quantized.widened(buffer.array, bucket.dtype) + left
        made = np.empty_like(buffer.array)
        made[:] = quantized.narrowed(own.astype(np.float32), bucket.dtype)
        entry.outputs[one.tensor_index].array[:] = made
        entry.inputs = tuple(entry.outputs[one.tensor_index] if index == one.tensor_index else known
                             for index, known in enumerate(entry.inputs))


def _execute_as_halves(bucket: Bucket, entries: Mapping[int, TensorEntry], plane: DataPlane) -> None:
    """float32 on the wire as float16, summed in float32; again in float32 where a value or the result is too large for it."""
    sources = [entries[one.slot].inputs[one.tensor_index].array for one in bucket.segments]
    targets = [entries[one.slot].outputs[one.tensor_index].array for one in bucket.segments]
    values = np.concatenate(sources)
    kept = values.copy()
    request = bucket.request
    halved_allreduce(
        plane, values, request.prescale, request.postscale / (plane.size if request.op == ReduceOp.Average else 1))
    if not np.isfinite(values).all():  # the same on all ranks, whose results are
        values = kept
        combine(plane, values, values, request, bucket.dtype)
    at = 0
    for target in targets:
        target[:] = values[at : at + len(target)]
        at += len(target)


def halved_allreduce(plane: DataPlane, values: np.ndarray, prescale: float, postscale: float) -> None:
    """Sum in place, as float16 on the wire. *Shapes*: (n,), float32."""
    bits = np.empty(len(values), np.uint16)
    kernels.float_to_halves(values, bits, False)
    halves.allreduce(plane, bits, bits, ReduceOp.Sum, False, prescale, postscale)
    kernels.halves_to_float(bits, values, False)


def measure(plane: DataPlane) -> dict[str, list[tuple[int, float]]]:
    """Time every way on every size; pairs of bytes and seconds, equal on all ranks. Collective over the plane."""
    found: dict[str, list[tuple[int, float]]] = {FP32: [], FP16: [], QUANTIZED: []}
    for num_bytes in PROBE_BYTES:
        num_elements = num_bytes // ITEM_BYTES["float32"]
        values = np.random.default_rng(plane.rank).standard_normal(num_elements, np.float32)
        ways: dict[str, Callable[[], object]] = {
            FP32: lambda values=values: plane.allreduce(values, values, ReduceOp.Sum),  # type: ignore[misc]
            FP16: lambda values=values: halved_allreduce(plane, values, 1.0, 1.0),  # type: ignore[misc]
            QUANTIZED: _quantized_probe(plane, values),
        }
        times = np.empty((ROUNDS + 1, len(ways)))
        for number in range(ROUNDS + 1):
            for index, call in enumerate(ways.values()):
                values[:] = 1.0  # so that sums of sums stay finite
                plane.barrier()
                started = time.perf_counter()
                call()
                times[number, index] = time.perf_counter() - started
        slowest = times[1:].copy()
        flat = slowest.reshape(-1)
        plane.allreduce(flat, flat, ReduceOp.Max)
        medians = np.median(slowest, axis=0)
        for way, seconds in zip(ways, medians, strict=True):
            found[way].append((num_bytes, float(seconds)))
        if slowest.sum() > ENOUGH_S and len(found[FP32]) > 1:
            break
    return found


def _quantized_probe(plane: DataPlane, values: np.ndarray) -> Callable[[], object]:
    """As a bucket of one tensor with a residual."""
    kept = np.zeros((2, SPEC.codec.padded(len(values))), np.float32)
    addresses = [np.array([one.ctypes.data], np.int64) for one in (values, values, kept[0], kept[1])]
    addresses.append(np.zeros(1, np.int64))
    tensors = exchange.Tensors(("probe",), (len(values),), "float32", 4, *addresses)

    def call() -> object:
        levels = plane.levels()
        if levels is None:
            return exchange.allreduce(plane, SPEC, tensors, 1.0), kept
        return quantized.allreduce_by_hosts(*levels, SPEC, tensors, 1.0), kept

    return call
