"""The gradients of torch parameters on their way: hooks hand them over while backward still runs.

*Threads*: hooks run on autograd's threads, one backward at a time; everything else on the user's.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import numpy as np
import torch
from torch.utils.weak import WeakIdKeyDictionary

from hvdlite.adapters.torch import device_buffer, gpu_of
from hvdlite.compressor import NoneCompressor, Quantized
from hvdlite.dataplane.device import DeviceArray
from hvdlite.message import ReduceOp
from hvdlite.optimizer import GradientExchange, GradientSpec, agree_on_order, bucket_size
from hvdlite.process_set import Members, ProcessSet
from hvdlite.runtime import Runtime, default_runtime
from hvdlite.torch.bucket_memory import BucketMemory, memories_of
from hvdlite.torch.mpi_ops import sparse_allreduce_async

#: The hook of each parameter: one, however many optimizers have been made around it. The last one has it; an older
#: one still exchanges the parameter, when it synchronises.
_hooks: Any = WeakIdKeyDictionary()


@dataclass(frozen=True)
class ExchangeOptions:
    """How an optimizer wants its gradients exchanged; the arguments of ``DistributedOptimizer``."""

    compression: Any
    op: ReduceOp
    gradient_predivide_factor: float
    sparse_as_dense: bool
    process_set: ProcessSet | None
    #: Of a parameter: the optimizer's second moment, or None while it has none; None where it is not to be used.
    second_moment: Callable[[torch.Tensor], torch.Tensor | None] | None = None


class ParameterExchange:
    """Some parameters of one optimizer.

    A parameter's gradient leaves after ``passes`` backward passes, or at ``synchronize``; without one it takes part
    with zeros. The exchange is bound to the runtime at its first use, and again after shutdown and init.
    """

    def __init__(
        self, parameters: Sequence[torch.Tensor], names: Sequence[str], groups: Sequence[Sequence[int]], passes: int,
        options: ExchangeOptions,
    ) -> None:
        self.parameters = list(parameters)
        self.passes = passes
        self._names = list(names)
        self._groups = groups
        self._options = options
        # What is quantised is so within the exchange: here it is as if nothing were done to it.
        self._dense = NoneCompressor if isinstance(options.compression, Quantized) else options.compression
        self._runtime: Runtime | None = None
        self._exchange: GradientExchange | None = None
        self._sparse: set[int] = set()
        #: Of each bucket: the memory of its small gradients; and their places in it, if all of them are small.
        self._memories: list[dict[int, BucketMemory]] = []
        self._homes: list[list[torch.Tensor] | None] = []
        self._clear()
        self._bind()

    @property
    def is_under_way(self) -> bool:
        """Whether a backward pass ran and ``synchronize`` has not run since."""
        return any(self._counts)

    @property
    def was_overrun(self) -> bool:
        """Whether a backward pass too many ran into gradients on their way; until ``synchronize``."""
        return bool(self._overrun)

    def synchronize(self) -> None:
        """Finish the exchange; afterwards every parameter's ``grad`` is that of all ranks, or None after a pass too many.

        Raises: AssertionError where a gradient was changed while it was on its way; the exchange's errors.
        """
        self._bind()
        if self._exchange is None:
            return
        changed = [self._names[index] for index in self._sent if index not in self._overrun and not self._is_as_sent(index)]
        for number in range(len(self._exchange.buckets)):
            if self._missing[number] >= 0:
                self._send(number)
        try:
            results = self._exchange.finish(lambda index: None)
            for index in self._contexts:
                self._receive(index, results[index])
            self._exchange_sparse(self._exchange.label)
            if self._exchange.num_cuts != self._num_cuts:
                self._house(self._exchange)
        finally:
            for index in self._overrun:
                self.parameters[index].grad = None
            self._clear()
        assert not changed, (
            f"gradient {changed[0]!r} (one of {len(changed)}) was changed between backward() and step(), while it was on its "
            "way: call synchronize() first, then clip or unscale, then step() within skip_synchronize()")

    def _exchange_sparse(self, label: str) -> None:
        """Exchange the sparse gradients; only now, because their places in the buckets tell that all ranks have such."""
        options = self._options
        finish = {index: sparse_allreduce_async(gradient, f"{label}.sparse.{self._names[index]}", options.op, options.process_set)
                  for index, gradient in sorted(self._sparse_gradients.items())}
        for index, wait in finish.items():
            self.parameters[index].grad = wait()

    def reset(self) -> None:
        """Forget the current backward pass."""
        if self._exchange is not None and self._runtime is not None and self._runtime.is_running:
            self._exchange.reset()
        self._clear()

    def quantized_state(self) -> dict[str, Any]:
        """What this rank has not sent yet, for a checkpoint; empty where nothing is quantised. Never communicates."""
        if self._exchange is None or self._runtime is None or not isinstance(self._options.compression, Quantized):
            return {}
        place = (self._members.process_set_id, self._exchange.label)
        store = self._runtime.residuals
        residuals = {name: torch.from_numpy(values.copy()) for name, values, _ in store.items(*place)}
        return {
            "rank": self._members.rank_in_set, "size": self._members.size(), "steps": self._exchange.num_steps,
            "synchronized": store.is_synchronized(*place), "scale": self._options.compression.scale, "residuals": residuals}

    def load_quantized_state(self, state: Mapping[str, Any]) -> bool:
        """Take over what ``quantized_state`` gave; without residuals, and false, where it is of another rank or size."""
        if self._exchange is None or self._runtime is None or not isinstance(self._options.compression, Quantized):
            return True
        members, store = self._members, self._runtime.residuals
        store.drop(members.process_set_id, self._exchange.label)
        self._exchange.num_steps = int(state.get("steps", 0))
        residuals = state.get("residuals", {})
        own = (state.get("rank"), state.get("size")) == (members.rank_in_set, members.size())
        rotated = [scale == "rotated" for scale in (state.get("scale"), self._options.compression.scale)]
        if not residuals:
            return True
        if not (own or state.get("synchronized")) or rotated[0] != rotated[1]:
            return False
        for name in set(residuals) & set(self._names):
            # In units of the sum over the ranks: each of m ranks takes over its part of what n ranks hold.
            values = residuals[name].numpy() * (state["size"] / members.size())
            store.put((members.process_set_id, self._exchange.label, name), values, rotated[1])
        if state.get("synchronized"):
            store.note_synchronized(members.process_set_id, self._exchange.label)
        return True

    def _bind(self) -> None:
        """Use the runtime of now."""
        runtime = default_runtime()
        if runtime is self._runtime:
            return
        self._exchange = None
        members = runtime.members(self._options.process_set)
        if members.size() > 1 and members.rank_in_set >= 0:  # on every rank of the set or on none, so that labels agree
            self._exchange = self._make_exchange(runtime, members)
        self._runtime, self._members = runtime, members
        self._clear()

    def _make_exchange(self, runtime: Runtime, members: Members) -> GradientExchange:
        options, label = self._options, runtime.label("gradients", members)
        self._reorder(agree_on_order(self._names, label, members, runtime))
        factor = options.gradient_predivide_factor
        quantized = options.compression if isinstance(options.compression, Quantized) else None
        specs = [GradientSpec(
            name, p.numel() * p.element_size(), p.device.type,
            quantized is not None and quantized.takes(name, p.shape, str(p.dtype).removeprefix("torch.")))
                 for name, p in zip(self._names, self.parameters, strict=True)]
        bucket_bytes, tuner = bucket_size(specs, label, members, runtime)
        exchange = GradientExchange(
            specs, label=label, op=options.op, in_place=True, prescale_factor=1.0 / factor,
            postscale_factor=factor, process_set=options.process_set, groups=self._groups, runtime=runtime, compression=quantized,
            moment=None if quantized is None or options.second_moment is None else self._moment,
            bucket_bytes=bucket_bytes, tuner=tuner)
        self._house(exchange)
        for index, parameter in enumerate(self.parameters):
            old = _hooks.pop(parameter, None)
            if old is not None:
                old.remove()
            if parameter.requires_grad:
                _hooks[parameter] = parameter.register_post_accumulate_grad_hook(self._hook(index))
        return exchange

    def _house(self, exchange: GradientExchange) -> None:
        """Make the memory in which the small gradients of each bucket lie."""
        self._num_cuts = exchange.num_cuts
        self._homes = [None] * len(exchange.buckets)
        self._memories = [{} for _ in exchange.buckets]
        if self._dense is NoneCompressor:
            for number, bucket in enumerate(exchange.buckets):
                if exchange.is_dense(number):
                    self._make_homes(exchange, number, bucket)

    def _make_homes(self, exchange: GradientExchange, number: int, bucket: Sequence[int]) -> None:
        memories = memories_of(bucket, self.parameters)
        for memory in memories:
            exchange.give_home(number, memory.buffers, memory.flat)
            self._memories[number].update(dict.fromkeys(memory.homes, memory))
        known = self._memories[number]
        if len(known) == len(bucket):
            self._homes[number] = [known[index].homes[index] for index in bucket]
        for memory in memories:
            memory.note_users()

    def _moment(self, index: int) -> np.ndarray | DeviceArray | None:
        """Where it lies; on the host where this process cannot work on the GPU itself."""
        assert self._options.second_moment is not None and self._runtime is not None
        found = self._options.second_moment(self.parameters[index])
        if found is None:
            return None
        values = found.detach().float()
        device = None if (gpu := gpu_of(values)) is None else self._runtime.gpus.device(gpu)
        if device is None:
            return values.cpu().contiguous().reshape(-1).numpy()
        array: DeviceArray = device_buffer(values, False, device).array
        return array

    def correct_moments(self, correction: Callable[[torch.Tensor, float], None]) -> None:
        """After a step: let ``correction(parameter, factor)`` take what quantising added to squares out of second moments."""
        compression = self._options.compression
        if self._exchange is not None and isinstance(compression, Quantized):
            factor = compression.moment_correction(self._members.size())
            for index in sorted(self._exchange.last_preconditioned):
                correction(self.parameters[index], factor)

    def _reorder(self, order: Sequence[int]) -> None:
        places = {index: place for place, index in enumerate(order)}
        self.parameters = [self.parameters[index] for index in order]
        self._names = [self._names[index] for index in order]
        self._groups = [sorted(places[index] for index in group) for group in self._groups]
        self._sparse = {places[index] for index in self._sparse}

    def _hook(self, index: int) -> Callable[[torch.Tensor], None]:
        # Weak, because the garbage collector does not look into hooks: parameters would hold themselves for ever.
        weak = weakref.ref(self)

        def hand_over(parameter: torch.Tensor) -> None:
            exchange = weak()
            if exchange is not None:
                exchange._count(index)

        return hand_over

    def _count(self, index: int) -> None:
        self._bind()
        if self._exchange is None:
            return
        if self._counts[index] >= self.passes or index in self._sent:
            # The pass has been added to what is on its way: this gradient is of no use.
            self._overrun.add(index)
            raise AssertionError(
                f"gradient {self._names[index]!r}: more backward passes than backward_passes_per_step={self.passes} before "
                "step() or synchronize(): raise backward_passes_per_step, or call step() after each pass")
        self._counts[index] += 1
        if self._counts[index] == self.passes:
            gradient = self.parameters[index].grad
            self._sent[index] = (gradient, -1 if gradient is None else gradient._version)
            number = self._exchange.bucket_of(index)
            self._missing[number] -= 1
            if not self._missing[number]:
                self._send(number)

    def _clear(self) -> None:
        self._counts = [0] * len(self.parameters)
        #: Of each bucket how many gradients it waits for; -1 once it has left.
        self._missing = [] if self._exchange is None else [len(bucket) for bucket in self._exchange.buckets]
        self._sent: dict[int, tuple[torch.Tensor | None, int]] = {}
        self._overrun: set[int] = set()
        self._contexts: dict[int, tuple[torch.Tensor, Any]] = {}
        self._sparse_gradients: dict[int, torch.Tensor] = {}

    def _send(self, number: int) -> None:
        """Let a bucket leave, with what its parameters have as gradients now."""
        exchange, parameters = self._exchange, self.parameters
        assert exchange is not None
        bucket = exchange.buckets[number]
        self._missing[number] = -1
        gradients = [self._gradient(index) for index in bucket]
        homes = self._homes[number]
        if homes is None or not all(map(is_, gradients, homes)):
            gradients = self._bring_home(number, bucket, gradients)
            homes = None
        for index in bucket:
            own = parameters[index].grad
            self._sent[index] = (own, -1 if own is None else own._version)
        if homes is None:
            gradients = [self._as_sent(index, one) for index, one in zip(bucket, gradients, strict=True)]
        exchange.send(number, gradients)

    def _as_sent(self, index: int, gradient: torch.Tensor) -> torch.Tensor:
        """What travels of a gradient."""
        if gradient.is_sparse:
            self._sparse.add(index)
            if not self._options.sparse_as_dense:
                self._sent[index] = (None, 0)
                self._sparse_gradients[index] = gradient
                return gradient.new_empty(0).to_dense()  # keeps its place in the bucket
            gradient = gradient.to_dense()
        sent, context = self._dense.compress(gradient)
        if sent is not gradient or index in self._sparse:
            self._contexts[index] = (gradient, context)
        return sent

    def _bring_home(self, number: int, bucket: Sequence[int], gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        """Copy gradients that backward made anew to where their bucket wants them, which becomes their parameters' ``grad``."""
        memories = self._memories[number]
        if not memories or torch.is_inference_mode_enabled():
            return gradients
        brought: dict[int, torch.Tensor] = {}
        is_viewed = {id(one): one.is_viewed() for one in memories.values()}
        for index, gradient in zip(bucket, gradients, strict=True):
            memory = memories.get(index)
            if memory is None or gradient is memory.homes[index] or is_viewed[id(memory)]:
                continue
            parameter = self.parameters[index]
            if memory.takes(index, gradient) and parameter.grad is gradient:
                brought[index] = gradient
        if not brought:
            return gradients
        homes = {index: memories[index].homes[index] for index in brought}
        with torch.no_grad():
            torch._foreach_copy_(list(homes.values()), list(brought.values()))
        for index, home in homes.items():
            self.parameters[index].grad = home
        return [homes.get(index, gradient) for index, gradient in zip(bucket, gradients, strict=True)]

    def _gradient(self, index: int) -> torch.Tensor:
        """The parameter's gradient, or zeros; a frozen parameter is left without one."""
        parameter = self.parameters[index]
        if parameter.grad is not None:
            return parameter.grad
        if index in self._sparse and not self._options.sparse_as_dense:
            rows = torch.empty(1, 0, dtype=torch.int64, device=parameter.device)
            zeros = torch.sparse_coo_tensor(rows, parameter.detach()[:0], parameter.shape, check_invariants=False)
        else:
            zeros = torch.zeros_like(parameter, requires_grad=False)
        if parameter.requires_grad:
            parameter.grad = zeros
        return zeros

    def _is_as_sent(self, index: int) -> bool:
        gradient, version = self._sent[index]
        return gradient is None or (self.parameters[index].grad is gradient and gradient._version == version)

    def _receive(self, index: int, result: torch.Tensor) -> None:
        if index in self._sparse_gradients:
            return
        gradient, context = self._contexts[index]
        parameter = self.parameters[index]
        with torch.no_grad():
            arrived = self._dense.decompress(result, context)
            if arrived is not gradient:
                gradient.copy_(arrived)
            if index in self._sparse and parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = gradient.to_sparse(parameter.grad.sparse_dim())
