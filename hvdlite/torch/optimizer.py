"""The torch side of the distributed optimizer: hooks hand gradients over while backward still runs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hvdlite.errors import InvalidRequestError
from hvdlite.message import ReduceOp
from hvdlite.optimizer import GradientExchange, GradientSpec
from hvdlite.process_set import ProcessSet
from hvdlite.runtime import default_runtime


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None, *,
    op: ReduceOp = ReduceOp.Average, gradient_predivide_factor: float = 1.0, process_set: ProcessSet | None = None,
) -> Any:
    """Wrap a torch optimizer; the returned one has its class as a base and shares its groups and state.

    ``named_parameters`` gives names, equal on every rank; without it they are numbered by group.
    ``gradient_predivide_factor`` f (Average only) divides by f before the sum and by size / f after it.
    Raises: InvalidRequestError for duplicate or missing names and bad arguments.
    """
    if gradient_predivide_factor != 1.0 and op != ReduceOp.Average:
        raise InvalidRequestError("gradient_predivide_factor goes with op=Average only: leave it at 1.0")
    base = type(optimizer)
    wrapped_class: Any = type(base.__name__, (_Distributed, base), {"__module__": __name__})
    wrapped = wrapped_class.__new__(wrapped_class)
    wrapped.__dict__.update(optimizer.__dict__)
    # A scheduler made before may have put the old optimizer's step on the instance: it would bypass ours.
    wrapped.__dict__.pop("step", None)
    wrapped._distribute(_names(wrapped, named_parameters), op, gradient_predivide_factor, process_set)
    return wrapped


class _Distributed:
    """What is added to the wrapped optimizer's class."""

    param_groups: list[dict[str, Any]]

    def _distribute(
        self, names: dict[torch.Tensor, str], op: ReduceOp, predivide: float, process_set: ProcessSet | None
    ) -> None:
        runtime = default_runtime()
        members = process_set or runtime.process_sets[0]
        self._parameters = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        self._is_distributed = members.size() > 1 and runtime.topology.rank in members.ranks
        self._synchronized = False
        self._skips = False
        if not self._is_distributed:
            return
        self._exchange = GradientExchange(
            [GradientSpec(names[p], p.numel() * p.element_size()) for p in self._parameters],
            label=runtime.label("gradients"), op=op, in_place=True, prescale_factor=1.0 / predivide,
            postscale_factor=predivide, process_set=process_set, runtime=runtime)
        for index, parameter in enumerate(self._parameters):
            parameter.register_post_accumulate_grad_hook(_hook(self._exchange, index))

    def synchronize(self) -> None:
        """Finish the exchange of all gradients; parameters without one take part with zeros."""
        if self._is_distributed:
            self._exchange.finish(self._absent)
        self._synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Within it, ``step`` does not synchronise: for use after ``synchronize``, to clip in between."""
        self._skips = True
        try:
            yield
        finally:
            self._skips = False

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Synchronise, then step as the wrapped optimizer does."""
        if not self._skips:
            if self._synchronized:
                warnings.warn(
                    "step() after synchronize() exchanges the gradients once more: call it within skip_synchronize()",
                    stacklevel=2)
            self.synchronize()
        self._synchronized = False
        return super().step(closure)  # type: ignore[misc]

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """As the wrapped optimizer's.

        Raises: AssertionError between backward and step or synchronize, where gradients are in flight.
        """
        assert not (self._is_distributed and self._exchange.is_under_way), (
            "zero_grad() between backward() and step(): gradients are in flight: call step() or synchronize() first")
        super().zero_grad(*args, **kwargs)  # type: ignore[misc]

    def _absent(self, index: int) -> torch.Tensor:
        parameter = self._parameters[index]
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        return parameter.grad


def _hook(exchange: GradientExchange, index: int) -> Callable[[torch.Tensor], None]:
    def hand_over(parameter: torch.Tensor) -> None:
        exchange.ready(index, parameter.grad)

    return hand_over


def _names(optimizer: Any, named_parameters: Iterable[tuple[str, torch.Tensor]] | None) -> dict[torch.Tensor, str]:
    """A unique name for every parameter of the optimizer."""
    numbered = {
        parameter: f"{group}.{index}"
        for group, one in enumerate(optimizer.param_groups) for index, parameter in enumerate(one["params"])}
    if named_parameters is None:
        return numbered
    pairs = list(named_parameters)
    if any(not (isinstance(pair, tuple) and len(pair) == 2) for pair in pairs):
        raise InvalidRequestError("named_parameters holds no (name, parameter) pairs: pass model.named_parameters()")
    names = [name for name, _ in pairs]
    duplicates = sorted({name for name in names if names.count(name) > 1})
    if duplicates:
        raise InvalidRequestError(
            f"named_parameters names {', '.join(map(repr, duplicates))} twice: give every parameter its own name")
    by_parameter = {parameter: name for name, parameter in pairs}
    unnamed = [number for parameter, number in numbered.items() if parameter not in by_parameter]
    if unnamed:
        raise InvalidRequestError(
            f"named_parameters leaves out {len(unnamed)} of the optimizer's parameters "
            f"(group.index {', '.join(unnamed)}): name them all")
    return by_parameter
