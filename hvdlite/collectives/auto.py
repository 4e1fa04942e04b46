"""``Compression.auto``: each bucket goes the way that was measured to be the fastest for its size: float32, float16, quantised.

When the first such bucket of a process set comes, and now and then afterwards, all ranks time each way on arrays of their own,
together; the slowest rank's times count, so all decide alike, and rank 0 logs one line for each bucket. Whole exchanges are
timed, of some sizes in general and, where it takes little time, of the very bucket: latency and bandwidth of the links, rates of
codec, casts and sums, and how far they overlap are in it.
Nothing of a way that is not taken remains: no residual is made before the quantised one is.

*What it costs*: a few exchanges of each of ``measure.PROBE_BYTES`` in each way, fewer where the link is slow; later at most
``MEASURE_SHARE`` of the time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from hvdlite import kernels
from hvdlite.buffer import Buffer
from hvdlite.collectives import quantized
from hvdlite.collectives.allreduce import combine
from hvdlite.collectives.allreduce import execute as execute_dense
from hvdlite.collectives.measure import ROUNDS, Measured, rounds_for, time_calls, time_ways
from hvdlite.collectives.workspace import Workspace
from hvdlite.compression.exchange import ExchangeSpec
from hvdlite.compression.policy import FP16, FP32, QUANTIZED, Decision, decide, expected_s
from hvdlite.compression.spec import CodecSpec
from hvdlite.dataplane import halves
from hvdlite.dataplane.base import DataPlane
from hvdlite.fusion import Bucket
from hvdlite.message import ReduceOp
from hvdlite.tensor_queue import TensorEntry
from hvdlite.timeline.phase import Phase

_log = logging.getLogger("hvdlite")

#: What a Request says for it.
NAME = "auto"
#: Least buckets between two measurements, and largest share of the time for them. Chosen after design.md, section 5.
MEASURE_EVERY, MEASURE_SHARE = 1000, 0.005
#: What timing one bucket may take, and how many of one measurement are timed. Chosen: dense exchanges of many tensors and of one
#: differ by up to twice, but where they take long it is the link that takes it.
BUCKET_SECONDS, MOST_BUCKETS = 2.0, 16
#: The quantised way.
SPEC = ExchangeSpec(CodecSpec())


class Auto:
    """What was measured and decided on one process set. *Threads*: the background thread; ``decisions`` may be read by any."""

    def __init__(self) -> None:
        self.decisions: dict[str, Decision] = {}
        self._former: dict[str, str] = {}
        self._measured: Measured = {}
        #: Of buckets by dtype and sizes of their tensors.
        self._of_buckets: dict[tuple[str, tuple[int, ...]], dict[str, float]] = {}
        self._num_buckets = self._next_measurement = 0
        self._next_look = 0  # at the clock, to see how often to measure
        self._measured_at = self._cost_s = 0.0

    def way(self, bucket: Bucket, entries: Mapping[int, TensorEntry], plane: DataPlane, workspace: Workspace) -> Decision:
        """How this bucket travels; all ranks of the plane ask in the same order."""
        if self._num_buckets == self._next_measurement:
            self._measure(plane, workspace)
        elif self._num_buckets == self._next_look:
            self._plan_next(plane)
        self._num_buckets += 1
        label = bucket.label
        decision = self.decisions.get(label)
        num_bytes = 4 * bucket.num_elements
        if decision is None or decision.num_bytes != num_bytes:
            ways = self._ways(bucket, entries, plane, workspace)
            former = decision.way if decision else self._former.get(label, "")
            decision = self.decisions[label] = decide(label, num_bytes, ways, former)
            if plane.rank == 0 and decision.way != former:
                _log.info("compression of %s", decision)
                now_ns = time.monotonic_ns()
                workspace.timeline.span(Phase.DECISION, str(decision), now_ns, now_ns, num_bytes)
        return decision

    def _ways(
        self, bucket: Bucket, entries: Mapping[int, TensorEntry], plane: DataPlane, workspace: Workspace
    ) -> Measured:
        """What each way is expected to take: of this very bucket, where timing that takes little time, and it is not one of very
        many; else from what was measured in general."""
        ways = dict(self._measured)
        if bucket.dtype in ("float16", "bfloat16"):
            ways[FP32] = ways.pop(FP16)  # its dense way
        if bucket.dtype != "float32":
            return ways
        num_bytes, kind = 4 * bucket.num_elements, (bucket.dtype, tuple(one.num_elements for one in bucket.segments))
        if kind not in self._of_buckets:
            expected = sum(expected_s(num_bytes, points) for points in ways.values())
            if not num_bytes or expected * ROUNDS > BUCKET_SECONDS or len(self._of_buckets) == MOST_BUCKETS:
                return ways
            started = time.monotonic()
            self._of_buckets[kind] = measure_bucket(bucket, entries, plane, workspace, rounds_for(expected))
            self._cost_s += time.monotonic() - started
        return {way: [(num_bytes, one), (2 * num_bytes, 2 * one)] for way, one in self._of_buckets[kind].items()}

    def _measure(self, plane: DataPlane, workspace: Workspace) -> None:
        started = time.monotonic()
        self._measured = measure(plane, workspace)
        self._former = {label: one.way for label, one in self.decisions.items()}
        self.decisions = {}
        self._of_buckets = {}
        self._measured_at = time.monotonic()
        self._cost_s = self._measured_at - started
        self._next_measurement = self._num_buckets + MEASURE_EVERY
        self._next_look = self._num_buckets + max(1, MEASURE_EVERY // 10)

    def _plan_next(self, plane: DataPlane) -> None:
        """Measure so seldom that it takes the share it may, on the rank where that is the most."""
        since = self._next_look - (self._next_measurement - MEASURE_EVERY)
        every = np.array([self._cost_s / MEASURE_SHARE / max(1e-9, time.monotonic() - self._measured_at) * since])
        plane.allreduce(every, every, ReduceOp.Max)
        self._next_measurement += max(0, int(every[0]) - MEASURE_EVERY)


def execute(bucket: Bucket, entries: Mapping[int, TensorEntry], plane: DataPlane, workspace: Workspace) -> None:
    """Run one bucket the way that is the fastest."""
    request = bucket.request
    if plane.size == 1:
        quantized.execute(_quantized(bucket), entries, plane, workspace)
        return
    auto = workspace.autos.get(request.key.process_set_id)
    if auto is None:
        auto = workspace.autos[request.key.process_set_id] = Auto()
    decision = auto.way(bucket, entries, plane, workspace)
    if decision.way == QUANTIZED:
        quantized.execute(_quantized(bucket), entries, plane, workspace)
        return
    if not workspace.residuals.is_empty:
        _take_residuals(bucket, entries, workspace)
    for one in bucket.dense:
        if decision.way == FP32 or bucket.dtype != "float32":
            execute_dense(one, entries, plane, workspace)
            workspace.note_passage(one)
        else:
            _execute_as_halves(one, entries, plane)


def _quantized(bucket: Bucket) -> Bucket:
    return replace(bucket, request=bucket.request._replace(compressor=str(SPEC)))


def _take_residuals(bucket: Bucket, entries: Mapping[int, TensorEntry], workspace: Workspace) -> None:
    """Add to a bucket that travels densely from now on what the quantised way had left over, which is kept no longer."""
    store = workspace.residuals
    for one in bucket.segments:
        entry = entries[one.slot]
        owner, names = quantized.tensor_names(entry.request)
        key = (entry.request.key.process_set_id, owner, names[one.tensor_index])
        if not store.has(key):
            continue
        store.settle(*key[:2])
        residual = store.take(key)
        assert residual is not None
        from hvdlite.compression import codec_cpu

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
    values = sources[0] if len(sources) == 1 else np.concatenate(sources)
    result = targets[0] if len(sources) == 1 else np.empty_like(values)
    request = bucket.request
    factor = request.postscale / (plane.size if request.op == ReduceOp.Average else 1)
    if not halved_allreduce(plane, values, result, request.prescale, factor):
        combine(plane, values, result, request, bucket.dtype)
    if len(targets) > 1:
        at = 0
        for target in targets:
            target[:] = result[at : at + len(target)]
            at += len(target)


def halved_allreduce(plane: DataPlane, values: np.ndarray, result: np.ndarray, prescale: float, postscale: float) -> bool:
    """Sum as float16 on the wire, if no value and no result is too large for it, which all ranks see alike.

    *Shapes*: (n,), float32; ``result`` may be ``values``.
    """
    bits = np.empty(len(values), np.uint16)
    kernels.float_to_halves(values, bits, False)
    halves.allreduce(plane, bits, bits, ReduceOp.Sum, False, prescale, postscale)
    if ((bits & 0x7C00) == 0x7C00).any():
        return False
    kernels.halves_to_float(bits, result, False)
    return True


def measure(plane: DataPlane, workspace: Workspace) -> Measured:
    """Time every way; equal on all ranks. Collective over the plane."""

    def prepare(values: np.ndarray) -> Mapping[str, Callable[[], object]]:
        return {
            FP32: lambda: plane.allreduce(values, values, ReduceOp.Sum),
            FP16: lambda: halved_allreduce(plane, values, values, 1.0, 1.0),
            QUANTIZED: quantized.probe(plane, SPEC, [values], workspace),
        }

    return time_ways(plane, prepare)


def measure_bucket(
    bucket: Bucket, entries: Mapping[int, TensorEntry], plane: DataPlane, workspace: Workspace, rounds: int
) -> dict[str, float]:
    """Time every way on copies of a bucket's float32 tensors; equal on all ranks. Collective over the plane."""
    workspace = workspace.unrecorded()
    given = [entries[one.slot].inputs[one.tensor_index].array for one in bucket.segments]
    copies = [one.copy() for one in given]
    buffers: dict[int, list[Buffer]] = {one.slot: list(entries[one.slot].inputs) for one in bucket.segments}
    for one, copy in zip(bucket.segments, copies, strict=True):
        buffers[one.slot][one.tensor_index] = Buffer(copy, "float32", copy.shape, "cpu", copy)
    played = {slot: replace(entries[slot], inputs=tuple(some), outputs=tuple(some), addresses=None, flats=())
              for slot, some in buffers.items()}

    def refill() -> None:
        for copy, one in zip(copies, given, strict=True):
            np.copyto(copy, one)

    def in_fp32() -> None:
        for one in bucket.dense:
            execute_dense(one, played, plane, workspace)

    def in_fp16() -> None:
        for one in bucket.dense:
            _execute_as_halves(one, played, plane)

    ways = {FP32: in_fp32, FP16: in_fp16, QUANTIZED: quantized.probe(plane, SPEC, copies, workspace)}
    return time_calls(plane, ways, refill, rounds)
