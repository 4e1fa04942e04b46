"""Distributed optimizers: one core that knows named gradients and handles, and a thin side per framework.

``GradientExchange`` is the core. ``hvdlite.torch`` has the side for torch, with hooks that overlap the exchange
with backward; ``PlainOptimizer`` here is the side for arrays: an optimizer is anything whose ``step`` takes a
dict of gradients.
"""

from __future__ import annotations

import hashlib
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np

from hvdlite import submission
from hvdlite.adapters import adapter_for
from hvdlite.bucket_size import PROBED_BYTES, SMALLEST_MODEL_BYTES, Cache, LiveTuner, Tuner, appender, probe
from hvdlite.buffer import Buffer, Memory
from hvdlite.compressor import NoneCompressor, Quantized, checked
from hvdlite.errors import InvalidRequestError, MismatchError, format_ranks
from hvdlite.fusion import plan_gradient_buckets
from hvdlite.handle import Handle
from hvdlite.message import Collective, ReduceOp
from hvdlite.objects import allgather_object
from hvdlite.process_set import Members, ProcessSet
from hvdlite.runtime import Runtime, default_runtime
from hvdlite.submission import Submission
from hvdlite.tensor_queue import TensorEntry

_log = logging.getLogger("hvdlite")

#: Dense steps before gradients are quantised in units of their second moments, which mean little before. Measured
#: (design.md, section 5).
LEAST_WARMUP_STEPS = 20

#: Base class's package -> module with a ``DistributedOptimizer`` for it. Adding a framework is one file and one row.
_SIDES = {"torch": "hvdlite.torch"}


class GradientSpec(NamedTuple):
    """A gradient's name, size, kind of device, and whether compression takes it; the same on every rank, in the same order."""

    name: str
    num_bytes: int
    device: str = "cpu"
    is_quantized: bool = False


def agree_on_order(names: Sequence[str], label: str, members: Members, runtime: Runtime) -> list[int]:
    """Return this rank's indices in the order in which the first rank of the set names the same gradients.

    Collective over the set. Raises: MismatchError, on every rank, where one has a name that another lacks.
    """
    digest = hashlib.sha256("\n".join(names).encode()).digest()
    if len(set(allgather_object(digest, f"{label}.digest", members, runtime))) == 1:
        return list(range(len(names)))
    everyones = allgather_object(list(names), f"{label}.names", members, runtime)
    differing = sorted(set().union(*everyones) - set.intersection(*map(set, everyones)))
    if differing:
        holders = format_ranks(rank for rank, one in zip(members.ranks, everyones, strict=True) if differing[0] in one)
        raise MismatchError(
            f"{label}: {len(differing)} gradients are not on every rank, as {differing[0]!r}, on {holders} only: wrap the same "
            "parameters under the same names on every rank")
    places = {name: index for index, name in enumerate(names)}
    return [places[name] for name in everyones[0]]


def bucket_size(
    gradients: Sequence[GradientSpec], label: str, members: Members, runtime: Runtime
) -> tuple[int, LiveTuner | None]:
    """How large the buckets of an optimizer shall be, in bytes, and what tries others with --autotune.

    Collective over the set. An explicit fusion threshold is obeyed. Otherwise: what the first rank has in its file, else what a
    short probe finds, which goes into that file.
    """
    config = runtime.config
    total = sum(one.num_bytes for one in gradients)
    if "fusion_threshold_bytes" in config.explicit or members.size() == 1:
        if config.autotune and members.size() > 1 and members.rank_in_set == 0:
            _log.warning("%s: --autotune leaves the fusion threshold as it was set, at %d bytes", label,
                         config.fusion_threshold_bytes)
        return config.fusion_threshold_bytes, None
    is_first = members.rank_in_set == 0
    cache = Cache(config)
    kind = runtime.kind_of_job(members, [one.num_bytes for one in gradients])
    known = allgather_object((total, cache.get(kind) if is_first else None, all(one.device == "cpu" for one in gradients)),
                             f"{label}.bucket_size", members, runtime)
    size = known[0][1]
    if any(other != total for other, *_ in known) or total < SMALLEST_MODEL_BYTES:
        return config.fusion_threshold_bytes, None  # differing gradients are reported when they are exchanged

    def slowest(seconds: Sequence[float]) -> list[float]:
        call = Submission(Collective.ALLREDUCE, np.array(seconds), name=f"{label}.seconds", process_set=members, runtime=runtime)
        result: np.ndarray = submission.allreduce(call, in_place=True, average=None, op=ReduceOp.Max, prescale_factor=1.0,
                                                   postscale_factor=1.0).wait()
        return list(result.tolist())

    dense = [one for one in gradients if not one.is_quantized]  # the others share an exchange whatever their buckets
    if size is None and sum(one.num_bytes for one in dense) >= SMALLEST_MODEL_BYTES and all(on_host for *_, on_host in known):
        size, why = _probed(dense, f"{label}.probe", members, runtime, slowest)
        if is_first:
            _log.info("%s: buckets of %d bytes: %s", label, size, why)
            cache.put(kind, size, "probe", why)
    size = config.fusion_threshold_bytes if size is None else size
    if not config.autotune:
        return size, None
    append = appender(config.autotune_log if is_first else "", label)

    def note(record: dict[str, Any]) -> None:
        append(record)
        if record["event"] == "choice" and is_first:
            _log.info("%s: --autotune stays with buckets of %d bytes: %s", label, record["bytes"], record["why"])
            cache.put(kind, record["bytes"], "autotune", record["why"])

    return size, LiveTuner(Tuner(size, total), slowest, note)


def _probed(
    gradients: Sequence[GradientSpec], label: str, members: Members, runtime: Runtime,
    slowest: Callable[[Sequence[float]], list[float]],
) -> tuple[int, str]:
    """Time the exchange of zeros in place of the last of the gradients, which are the first to leave."""
    taken: list[GradientSpec] = []
    for one in reversed(gradients):
        taken.append(one)
        if sum(other.num_bytes for other in taken) >= PROBED_BYTES:
            break
    taken.reverse()
    arrays = [np.zeros(min(one.num_bytes, PROBED_BYTES) // 4, np.float32) for one in taken]

    def make(size: int) -> Callable[[], Any]:
        exchange = GradientExchange(
            taken, label=f"{label}.{size}", in_place=True, process_set=members, runtime=runtime, bucket_bytes=size)
        return lambda: exchange.finish(lambda index: arrays[index])

    return probe(make, slowest, runtime.config.fusion_threshold_bytes, sum(array.nbytes for array in arrays))


class GradientExchange:
    """The gradients of one optimizer, in buckets that are fixed from names and sizes alone.

    A bucket is one request: it is submitted when its last gradient is ready, so what travels together never
    depends on timing, and neither does the result. Buckets are filled in reverse order of registration, which
    is about the order in which backward produces gradients.

    *Threads*: one user thread at a time.
    """

    num_cuts = 0

    def __init__(
        self, gradients: Sequence[GradientSpec], *, label: str, op: ReduceOp = ReduceOp.Average, in_place: bool,
        prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet | Members | None = None,
        groups: Sequence[Sequence[int]] = (), runtime: Runtime | None = None, compression: Quantized | None = None,
        moment: Callable[[int], Any] | None = None, bucket_bytes: int | None = None,
        tuner: LiveTuner | None = None,
    ) -> None:
        """``label`` tells this optimizer's operations from another's; equal on all ranks. ``groups``: indices of
        gradients that make a bucket of their own, whatever its size; the rest is cut into buckets of ``bucket_bytes``, by default
        the fusion threshold, and anew whenever ``tuner`` says so.
        ``compression``: of the gradients that are quantised, which never share a bucket with others. ``moment(index)``: the
        second moment of a gradient, flat float32, the same on all ranks, in whose units it is quantised; where it gives None
        the gradient travels densely."""
        self._runtime = runtime or default_runtime()
        self._gradients, self._groups = list(gradients), [list(group) for group in groups]
        self._names = [one.name for one in gradients]
        self._tuner = tuner
        self._cut(self._runtime.config.fusion_threshold_bytes if bucket_bytes is None else bucket_bytes)
        self._compression = compression
        self._moment = moment
        self._warmup_steps = compression.warmup_steps if compression is not None else 0
        if moment is not None:
            self._warmup_steps = max(self._warmup_steps, LEAST_WARMUP_STEPS)
        self._preconditioned: set[int] = set()
        #: The gradients that the last step quantised in units of their second moments.
        self.last_preconditioned: set[int] = set()
        #: Steps exchanged so far, by which a warm-up ends; the same on every rank.
        self.num_steps = 0
        if compression is not None:
            place = (self._runtime.members(process_set).process_set_id, label)
            weakref.finalize(self, self._runtime.residuals.drop_later, *place)
        self.label = label
        self._op = op
        self._in_place = in_place
        self._scales = (prescale_factor, postscale_factor)
        self._process_set = process_set
        self._ready: dict[int, Any] = {}
        self._handles: dict[int, Handle] = {}

    def _cut(self, bucket_bytes: int) -> None:
        """Fix the buckets; nothing is known of where their gradients lie."""
        gradients, groups = self._gradients, self._groups
        grouped = {index for group in groups for index in group}
        rest = [index for index in range(len(gradients)) if index not in grouped]
        self._buckets = [
            list(part) for group in groups for quantized in (False, True)
            if (part := [index for index in group if gradients[index].is_quantized is quantized])]
        kinds = [(one.device, one.is_quantized) for one in gradients]
        for kind in dict.fromkeys(kinds[index] for index in rest):  # a bucket travels from one device, in one way
            here = [index for index in rest if kinds[index] == kind]
            planned = plan_gradient_buckets([gradients[index].num_bytes for index in here], bucket_bytes)
            self._buckets += [[here[place] for place in bucket] for bucket in planned]
        self._bucket_names = [tuple(self._names[index] for index in bucket) for bucket in self._buckets]
        self._bucket_of = {index: number for number, bucket in enumerate(self._buckets) for index in bucket}
        self._is_quantized = [gradients[bucket[0]].is_quantized for bucket in self._buckets]
        self._homes: dict[int, Buffer] = {}
        self._flats: list[tuple[np.ndarray, ...]] = [()] * len(self._buckets)
        self._memories: list[Memory | None] = [None] * len(self._buckets)
        self._seen: list[list[weakref.ref[Any]]] = [[] for _ in self._buckets]
        self._missing = [len(bucket) for bucket in self._buckets]
        #: How often the buckets were cut: what is known by number is void when it grows.
        self.num_cuts += 1

    @property
    def buckets(self) -> list[list[int]]:
        """The gradients of each bucket, in the order in which they travel."""
        return self._buckets

    def bucket_of(self, index: int) -> int:
        """The number of the bucket of gradient ``index``."""
        return self._bucket_of[index]

    def is_dense(self, number: int) -> bool:
        """Whether no compression takes a bucket."""
        return not self._is_quantized[number]

    def give_home(self, number: int, homes: Mapping[int, Buffer], flat: np.ndarray) -> None:
        """Say where some gradients of a bucket lie in most steps: side by side in ``flat``, as they would be packed."""
        self._homes.update(homes)
        self._flats[number] += (flat,)

    @property
    def is_under_way(self) -> bool:
        """Whether some gradient was handed over and ``finish`` has not run since."""
        return bool(self._ready)

    def is_ready(self, index: int) -> bool:
        """Whether gradient ``index`` was handed over."""
        return index in self._ready

    def ready(self, index: int, gradient: Any) -> None:
        """Hand over gradient ``index`` (its place in the registration); its bucket leaves when it is full.

        Raises: AssertionError when it was handed over before.
        """
        assert index not in self._ready, (
            f"gradient {self._names[index]!r}: computed again before step() or synchronize(): "
            "run one backward pass per step, or accumulate with backward_passes_per_step")
        self._ready[index] = gradient
        number = self._bucket_of[index]
        self._missing[number] -= 1
        if not self._missing[number]:
            self._submit(number)

    def send(self, number: int, gradients: Sequence[Any]) -> None:
        """Hand over all gradients of a bucket at once."""
        self._ready.update(zip(self._buckets[number], gradients, strict=True))
        self._missing[number] = 0
        self._submit(number)

    def finish(self, absent: Callable[[int], Any]) -> dict[int, Any]:
        """Supply what is missing by ``absent(index)``, wait for all, return the results by index.

        Raises: the first error of any bucket, after all have ended; then the exchange starts afresh.
        """
        for index in range(len(self._names)):
            if index not in self._ready:
                self.ready(index, absent(index))
        self.last_preconditioned, self._preconditioned = self._preconditioned, set()
        results: dict[int, Any] = {}
        failure: BaseException | None = None
        for number, handle in sorted(self._handles.items()):
            try:
                arrived, bucket = handle.wait(), self._buckets[number]
                results.update(zip(bucket, [self._ready[index] for index in bucket] if self._in_place else arrived, strict=True))
            except Exception as error:
                failure = failure or error
        self._start_afresh()
        if failure is not None:
            members = self._runtime.members(self._process_set)
            self._runtime.residuals.forget_round(members.process_set_id, self.label)
            raise failure
        self.num_steps += 1
        if self._tuner is not None:
            bucket_bytes = self._tuner.step()
            if bucket_bytes is not None:
                self._cut(bucket_bytes)
            elif self._tuner.choice is not None:
                self._tuner = None
        return results

    def reset(self) -> None:
        """Forget what was handed over; waits for the buckets that have left already, whose names are in use."""
        for handle in self._handles.values():
            try:
                handle.wait()
            except Exception as error:
                _log.debug("%s: %s", handle.name, error)  # its result is not wanted any more
        self._start_afresh()

    def _start_afresh(self) -> None:
        self._ready.clear()
        self._handles.clear()
        self._missing = [len(bucket) for bucket in self._buckets]

    def _submit(self, number: int) -> None:
        bucket = self._buckets[number]
        compressor, moments = self._way(bucket, self._is_quantized[number])
        # Named by number: where the ranks' gradients differ, the agreement on this one name says so.
        call = Submission(
            Collective.ALLREDUCE, [self._ready[index] for index in bucket], is_group=True, name=f"{self.label}.{number}",
            process_set=self._process_set, names=self._bucket_names[number], runtime=self._runtime)
        self._handles[number] = submission.allreduce(
            call, in_place=self._in_place, average=None, op=self._op, prescale_factor=self._scales[0],
            postscale_factor=self._scales[1], compressor=compressor, moments=moments,
            memory=self._memory(number, call) if self._in_place else None,
            # No list of the tensors: the background thread would hold on to them a little longer than who waits for them.
            result=_nothing if self._in_place else None)

    def _memory(self, number: int, call: Submission) -> Memory | None:
        """Where the bucket's gradients lie. Looked up once while they are the same tensors in every step: then they are held,
        which those of an optimizer that makes new ones in every step must not be."""
        tensors = call.tensors
        known = self._memories[number]
        if known is not None and all(map(_is_of, known.buffers, tensors)):
            return known
        self._memories[number] = None
        homes = [self._homes.get(index) for index in self._buckets[number]]
        at_home = [home is not None and _is_of(home, one) for home, one in zip(homes, tensors, strict=True)]
        if all(at_home):
            buffers = tuple(home for home in homes if home is not None)
        else:
            call.tensors = [one for one, is_home in zip(tensors, at_home, strict=True) if not is_home]
            others = iter(call.buffers(writable=True))
            buffers = tuple(home if is_home and home is not None else next(others)
                            for home, is_home in zip(homes, at_home, strict=True))
            call.tensors = tensors
        if any(one.write_back is not None for one in buffers):
            return None
        memory = Memory(buffers, np.array([one.address for one in buffers], np.uint64), self._flats[number])
        seen = self._seen[number]
        if len(seen) == len(tensors) and all(before() is one for before, one in zip(seen, tensors, strict=True)):
            self._memories[number] = memory
        else:
            self._seen[number] = [weakref.ref(one) for one in tensors]
        return memory

    def _way(self, bucket: Sequence[int], is_quantized: bool) -> tuple[str, tuple[Any, ...]]:
        """How a bucket travels in this step, and its second moments, if it does by these."""
        if self._compression is None or not is_quantized or self.num_steps < self._warmup_steps:
            return "none", ()
        if self._moment is None:
            return self._compression.wire_name, ()
        moments = [one for one in map(self._moment, bucket) if one is not None]
        if len(moments) < len(bucket):
            return "none", ()
        self._preconditioned.update(bucket)
        return self._compression.preconditioned_name, tuple(moments)


class PlainOptimizer:
    """Wraps an optimizer over arrays: ``step(gradients)`` averages them over the ranks first.

    The arrays given stay as they are; the wrapped ``step`` gets new ones of the same kind. Every other
    attribute is the wrapped optimizer's.
    """

    def __init__(
        self, optimizer: Any, *, op: ReduceOp = ReduceOp.Average, process_set: ProcessSet | None = None, compression: Any = None,
        second_moment: Callable[[str], Any] | None = None,
    ) -> None:
        """``second_moment(name)``: of an optimizer as Adam, its mean of squared gradients, the same on every rank, or None
        while there is none: quantised gradients travel in units of its root. Their squares come out too large: multiply them by
        ``compression.moment_correction(num_ranks)`` where they enter that mean."""
        self.optimizer = optimizer
        self._second_moment = second_moment
        self._compression = NoneCompressor if compression is None else checked(compression)
        self._quantized = self._compression if isinstance(self._compression, Quantized) else None
        self._op = op
        self._process_set = process_set
        self._exchange: GradientExchange | None = None
        self._bucket_bytes: int | None = None
        self._tuner: LiveTuner | None = None
        self._specs: list[GradientSpec] = []
        runtime = default_runtime()
        self.label = runtime.label("gradients", runtime.members(process_set))

    def step(self, gradients: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Average the named gradients over the ranks and take the wrapped optimizer's step with them.

        Raises: MismatchError where ranks pass different names or shapes.
        """
        names = sorted(gradients)
        specs = [self._spec(name, gradients[name]) for name in names]
        if self._exchange is None:
            runtime = default_runtime()
            described = [f"{spec.name} ({spec.num_bytes} bytes)" for spec in specs]
            members = runtime.members(self._process_set)
            if members.rank_in_set >= 0:
                agree_on_order(described, self.label, members, runtime)
                self._bucket_bytes, self._tuner = bucket_size(specs, self.label, members, runtime)
        if self._exchange is None or specs != self._specs:
            self._specs = specs
            self._exchange = GradientExchange(
                specs, label=self.label, op=self._op, in_place=False, process_set=self._process_set, compression=self._quantized,
                moment=self._moment_of(names), bucket_bytes=self._bucket_bytes, tuner=self._tuner)
        if self._quantized is not None:
            averaged = self._exchange.finish(lambda index: gradients[names[index]])
            result = self.optimizer.step({name: averaged[index] for index, name in enumerate(names)}, *args, **kwargs)
        else:
            sent = {name: self._compression.compress(gradients[name]) for name in names}
            arrived = self._exchange.finish(lambda index: sent[names[index]][0])
            result = self.optimizer.step(
                {name: self._compression.decompress(arrived[index], sent[name][1]) for index, name in enumerate(names)},
                *args, **kwargs)
        default_runtime().marks.step(self.label)
        return result

    def _moment_of(self, names: Sequence[str]) -> Callable[[int], np.ndarray | None] | None:
        second_moment = self._second_moment
        if second_moment is None or self._quantized is None:
            return None

        def moment(index: int) -> np.ndarray | None:
            values = second_moment(names[index])
            return None if values is None else adapter_for(values).buffer(values, False).array.astype(np.float32)

        return moment

    def _spec(self, name: str, gradient: Any) -> GradientSpec:
        size, quantized = _size_bytes(name, gradient), self._quantized
        return GradientSpec(name, size, is_quantized=quantized is not None and quantized.takes(
            name, gradient.shape, str(gradient.dtype).rpartition(".")[2]))

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # not there while unpickling
            raise AttributeError(name)
        return getattr(self.optimizer, name)


def DistributedOptimizer(optimizer: Any, **arguments: Any) -> Any:
    """Wrap an optimizer so that every step uses the gradients of all ranks.

    A torch optimizer goes to ``hvdlite.torch.DistributedOptimizer`` with the same arguments; anything else with
    a ``step`` that takes a dict of gradients becomes a PlainOptimizer (``op``, ``process_set``, ``compression``).
    Raises: InvalidRequestError for what is neither.
    """
    for base in type(optimizer).__mro__:
        module = _SIDES.get(base.__module__.partition(".")[0])
        if module:
            return import_module(module).DistributedOptimizer(optimizer, **arguments)
    if not callable(getattr(optimizer, "step", None)):
        raise InvalidRequestError(
            f"DistributedOptimizer: {type(optimizer).__name__} has no step(): "
            "pass an optimizer whose step takes a dict of gradients")
    return PlainOptimizer(optimizer, **arguments)


def _nothing(entry: TensorEntry) -> None:
    """In place: who waits has the tensors."""


def _is_of(buffer: Buffer, tensor: Any) -> bool:
    """Whether the buffer is this tensor's, and where it lies now: a torch tensor may be given other memory."""
    return buffer.tensor is tensor and (not buffer.known_address or buffer.known_address == tensor.data_ptr())


def _size_bytes(name: str, gradient: Any) -> int:
    size = getattr(gradient, "nbytes", None)
    if size is None:
        raise InvalidRequestError(f"gradient {name!r}: {type(gradient).__name__} is no array: pass arrays")
    return int(size)
