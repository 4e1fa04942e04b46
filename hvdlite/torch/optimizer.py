"""The torch side of the distributed optimizer: a dynamic subclass of the wrapped optimizer's class."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch

from hvdlite import api
from hvdlite.compressor import Auto
from hvdlite.errors import InvalidRequestError
from hvdlite.message import ReduceOp
from hvdlite.process_set import ProcessSet, global_process_set
from hvdlite.runtime import default_runtime
from hvdlite.torch.compression import Compression, Quantized, checked
from hvdlite.torch.functions import COMPILED_PREFIX, QUANTIZED_STATE, keeping_groups_and_state
from hvdlite.torch.gradients import ExchangeOptions, ParameterExchange
from hvdlite.torch.phases import StepPhases


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Any = Compression.none, backward_passes_per_step: int = 1, op: ReduceOp | int = ReduceOp.Average,
    gradient_predivide_factor: float = 1.0, num_groups: int = 0, groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False, process_set: ProcessSet | None = global_process_set,
) -> Any:
    """Wrap a torch optimizer so that every step uses the gradients of all ranks; the result is one of its class too.

    It shares the wrapped one's groups and state. ``named_parameters`` gives names, equal on every rank; without it
    they are numbered by group. ``compression``: how gradients travel. ``backward_passes_per_step``: gradients are
    added up locally over so many passes (not divided). ``gradient_predivide_factor`` f (Average only) divides by f
    before the sum and by size / f after it. ``groups``: a number of groups, or lists of parameters, that are
    exchanged as one each. ``sparse_as_dense``: sum sparse gradients as dense ones. ``op`` Adasum combines the
    updates instead of the gradients.
    Raises: InvalidRequestError (a ValueError) for bad arguments; TypeError for what is no compressor;
    NotImplementedError for Adasum in a process set.
    """
    _check_arguments(op, gradient_predivide_factor, backward_passes_per_step, process_set)
    compression = checked(compression)
    if isinstance(compression, Quantized) and op == ReduceOp.Adasum:
        raise InvalidRequestError("op=Adasum with quantised compression: its combination is no sum: use Compression.fp16 or none")
    moment = _second_moment(optimizer, compression)
    options = ExchangeOptions(compression, ReduceOp(op), gradient_predivide_factor, sparse_as_dense, process_set, moment)
    if num_groups:
        warnings.warn("num_groups= is the older spelling: use groups=", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    base = getattr(type(optimizer), "_wrapped_class", type(optimizer))
    side = _Adasum if op == ReduceOp.Adasum and api.size() > 1 else _Distributed
    wrapped_class: Any = type(base.__name__, (side, base), {"__module__": __name__, "_wrapped_class": base})
    wrapped = wrapped_class.__new__(wrapped_class)
    wrapped.__dict__.update(optimizer.__dict__)
    # A scheduler made before has put the old optimizer's step on the instance: it would bypass ours. The scheduler would
    # warn that this step was never called.
    if wrapped.__dict__.pop("step", None) is not None:
        optimizer._opt_called = True
    names = _names(wrapped, named_parameters)
    wrapped._distribute(names, _groups(wrapped, groups), backward_passes_per_step, options)
    return wrapped


_log = logging.getLogger("hvdlite")

#: Optimizers of torch that keep a mean of squared gradients as Adam does.
_WITH_MOMENTS = (torch.optim.Adam, torch.optim.NAdam, torch.optim.RAdam)
#: Those that divide by something of the kind, in other ways.
_ADAPTIVE = (torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.Adamax, torch.optim.RMSprop, torch.optim.Rprop)


def _second_moment(optimizer: Any, compression: Any) -> Callable[[torch.Tensor], torch.Tensor | None] | None:
    """Where quantised gradients find the second moment in whose units they travel; None where they do not."""
    if not isinstance(compression, Quantized) or isinstance(compression, Auto):
        return None
    keeps = isinstance(optimizer, _WITH_MOMENTS)
    name = getattr(type(optimizer), "_wrapped_class", type(optimizer)).__name__
    if compression.precondition == "adam" and not keeps:
        raise InvalidRequestError(f"precondition='adam': {name} keeps no exp_avg_sq: leave it out")
    if compression.precondition != "none" and keeps and compression.scale == "rotated":
        _log.info("quantised gradients of %s travel in units of the root of its exp_avg_sq", name)
        state = optimizer.state  # of the wrapped one too, and kept when it is loaded
        return lambda parameter: state.get(parameter, {}).get("exp_avg_sq")
    if keeps or isinstance(optimizer, _ADAPTIVE):
        warnings.warn(
            f"{name} divides by the size of past gradients, which drowns in what quantising adds: expect a lower accuracy: use "
            "Adam or AdamW with precondition='adam', SGD, or Compression.fp16", stacklevel=3)
    return None


class _Distributed:
    """What is added to the wrapped optimizer's class."""

    param_groups: list[dict[str, Any]]

    def _distribute(
        self, names: dict[torch.Tensor, str], groups: list[list[torch.Tensor]], passes: int, options: ExchangeOptions
    ) -> None:
        self._parameter_names = names
        self._options = options
        self._passes = passes
        self._synchronized = False
        self._should_synchronize = True
        self._exchanges: list[ParameterExchange] = []
        self._phases = StepPhases()
        runtime = default_runtime()
        self._label = runtime.label("optimizer", runtime.members(options.process_set))
        self._register(groups)

    def _register(self, groups: list[list[torch.Tensor]] | None = None) -> None:
        """Exchange also what needs a gradient by now: parameters thawed, or added, since the last time."""
        known = {parameter for one in self._exchanges for parameter in one.parameters}
        late = [(group, index, parameter) for group, one in enumerate(self.param_groups)
                for index, parameter in enumerate(one["params"]) if parameter.requires_grad and parameter not in known]
        if not late and self._exchanges:
            return
        parameters = [parameter for _, _, parameter in late]
        for group, index, parameter in late:
            self._parameter_names.setdefault(parameter, f"{group}.{index}")
        places = {parameter: place for place, parameter in enumerate(parameters)}
        indices = [[places[parameter] for parameter in group if parameter in places] for group in groups or []]
        self._exchanges.append(ParameterExchange(
            parameters, [self._parameter_names[parameter] for parameter in parameters],
            [one for one in indices if one], self._passes, self._options))

    @property
    def _is_under_way(self) -> bool:
        return any(one.is_under_way for one in self._exchanges)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change after how many backward passes gradients are exchanged; between two steps.

        Raises: InvalidRequestError for a number below 1.
        """
        _check_passes(passes)
        self._passes = passes
        for one in self._exchanges:
            one.passes = passes

    def synchronize(self) -> None:
        """Finish the exchange of all gradients; parameters without one take part with zeros.

        Raises: AssertionError where gradients were changed since backward; the exchange's errors.
        """
        self._phases.backward_ended()
        self._register()
        failure: BaseException | None = None
        for one in self._exchanges:
            try:
                one.synchronize()
            except (Exception, AssertionError) as error:
                failure = failure or error
        if failure is not None:
            raise failure
        self._synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Within it, ``step`` does not synchronise: for use after ``synchronize``, to clip in between."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Synchronise, then step as the wrapped optimizer does; a closure is synchronised each time it has run.

        Raises: AssertionError within ``skip_synchronize`` with gradients in flight.
        """
        if closure is not None and self._should_synchronize:
            result = super().step(self._synchronizing(closure))  # type: ignore[misc]
            self._phases.step_ended(default_runtime().marks, self._label)
            return result
        if self._should_synchronize:
            assert not any(one.was_overrun for one in self._exchanges), (
                "step() after more backward passes than backward_passes_per_step: the gradients are lost: call synchronize() "
                "and zero_grad(), and start over")
            if self._synchronized:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize(), after synchronize(): the gradients are "
                    "exchanged once more; use `with optimizer.skip_synchronize(): optimizer.step()`",
                    stacklevel=2)
            self.synchronize()
        else:
            assert not self._is_under_way, (
                "step() within skip_synchronize(), but gradients are in flight: call synchronize() before")
        self._synchronized = False
        result = super().step() if closure is None else super().step(closure)  # type: ignore[misc]
        for one in self._exchanges:
            one.correct_moments(self._correct_moment)
        self._phases.step_ended(default_runtime().marks, self._label)
        return result

    def _correct_moment(self, parameter: torch.Tensor, factor: float) -> None:
        """Let the second moment have ``factor`` of the square that the step just taken added to it."""
        beta = next(group["betas"][1] for group in self.param_groups if any(one is parameter for one in group["params"]))
        moment = self.state[parameter].get("exp_avg_sq")  # type: ignore[attr-defined]
        if moment is not None and parameter.grad is not None:
            with torch.no_grad():
                gradient = parameter.grad.to(moment.dtype)
                gradient = torch.where(torch.isfinite(parameter.grad).all(), gradient, 0)  # asking would wait for a GPU
                moment.addcmul_(gradient, gradient, value=(1 - float(beta)) * (factor - 1))

    def _synchronizing(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            with torch.enable_grad():
                loss = closure()
            self.synchronize()
            self._synchronized = False
            return self._averaged(loss)

        return run

    def _averaged(self, loss: Any) -> Any:
        """The loss of all ranks: optimizers that decide by it, as LBFGS does, decide alike everywhere."""
        members = default_runtime().members(self._options.process_set)
        if members.size() == 1 or members.rank_in_set < 0 or not isinstance(loss, (float, torch.Tensor)):
            return loss
        value = loss.detach() if isinstance(loss, torch.Tensor) else torch.tensor(loss, dtype=torch.float64)
        mean = api.allreduce(value, op=ReduceOp.Average, name=f"{self._label}.loss", process_set=self._options.process_set)
        return mean if isinstance(loss, torch.Tensor) else mean.item()

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """As the wrapped optimizer's.

        Raises: AssertionError between backward and step or synchronize, where gradients are in flight.
        """
        assert not self._is_under_way, (
            "zero_grad() between backward() and step(): gradients are in flight: call step() or synchronize() first")
        self._synchronized = False
        super().zero_grad(*args, **kwargs)  # type: ignore[misc]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As the wrapped optimizer's; the new parameters are exchanged as well."""
        super().add_param_group(param_group)  # type: ignore[misc]
        if "_exchanges" in self.__dict__:
            self._register()

    def state_dict(self) -> dict[str, Any]:
        """As the wrapped optimizer's; with quantised compression also what this rank has not sent yet, under "hvdlite".

        Never communicates: every rank saves its own, or calls ``sync_residuals()`` before, after which that of one rank does.
        """
        state: dict[str, Any] = super().state_dict()  # type: ignore[misc]
        quantized = [one.quantized_state() for one in self.__dict__.get("_exchanges", ())]
        if any(quantized):
            state[QUANTIZED_STATE] = quantized
        return state

    def load_state_dict(self, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """As the wrapped optimizer's; a backward pass that was not stepped yet is forgotten.

        What another rank, or a job of another size, had not sent yet is left out, with a warning.
        """
        for one in self.__dict__.get("_exchanges", ()):
            one.reset()
        self._synchronized = False
        with keeping_groups_and_state(self):
            super().load_state_dict(state_dict, *args, **kwargs)  # type: ignore[misc]
        exchanges = self.__dict__.get("_exchanges", ())
        saved = [*state_dict.get(QUANTIZED_STATE, ()), *({} for _ in exchanges)]
        if not all([one.load_quantized_state(state) for one, state in zip(exchanges, saved, strict=False)]):
            warnings.warn(
                "the state is that of another rank, or of a job of another size: what that one's quantised gradients have left "
                "over is dropped: save every rank's own, or call hvdlite.sync_residuals() on all ranks before one of them saves",
                stacklevel=2)


class _Adasum:
    """The side for op=Adasum: every rank steps by itself, then the steps are combined."""

    param_groups: list[dict[str, Any]]

    def _distribute(
        self, names: dict[torch.Tensor, str], groups: list[list[torch.Tensor]], passes: int, options: ExchangeOptions
    ) -> None:
        self._parameter_names = names
        self._options = options
        self._passes = passes
        self._label = default_runtime().label("adasum")
        self._phases = StepPhases()

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Accepted; gradients add up locally until ``step`` whatever the number."""
        _check_passes(passes)
        self._passes = passes

    def synchronize(self) -> None:
        """Nothing is in flight before ``step``."""

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Raises: AssertionError: here a step cannot do without the exchange."""
        raise AssertionError("skip_synchronize() does not go with op=Adasum: step() exchanges the steps themselves")
        yield

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step as the wrapped optimizer does, then replace every parameter's change by the Adasum of all ranks' changes."""
        parameters = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        before = [p.detach().clone() for p in parameters]
        result = super().step() if closure is None else super().step(closure)  # type: ignore[misc]
        compression = self._options.compression
        with torch.no_grad():
            changes = [compression.compress(p.detach() - old) for p, old in zip(parameters, before, strict=True)]
            combined = api.grouped_allreduce_([one for one, _ in changes], name=self._label, op=ReduceOp.Adasum)
            for p, old, one, (_, context) in zip(parameters, before, combined, changes, strict=True):
                p.copy_(old + compression.decompress(one, context))
        self._phases.step_ended(default_runtime().marks, self._label)
        return result

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """As the wrapped optimizer's."""
        with keeping_groups_and_state(self):
            super().load_state_dict(*args, **kwargs)  # type: ignore[misc]


def _check_arguments(op: ReduceOp | int, predivide: float, passes: int, process_set: ProcessSet | None) -> None:
    if op not in (ReduceOp.Average, ReduceOp.Sum, ReduceOp.Adasum):
        raise InvalidRequestError(f"op {op!r} makes no sense for gradients: use Average, Sum or Adasum")
    if predivide != 1.0 and op != ReduceOp.Average:
        raise InvalidRequestError("gradient_predivide_factor goes with op=Average only: leave it at 1.0")
    _check_passes(passes)
    if op == ReduceOp.Adasum and process_set not in (None, global_process_set):
        raise NotImplementedError("op=Adasum combines all ranks only: leave process_set at the global one")


def _check_passes(passes: int) -> None:
    if not isinstance(passes, int) or passes <= 0:
        raise InvalidRequestError(f"backward_passes_per_step={passes!r}: pass a number above 0")


def _groups(optimizer: Any, groups: int | Sequence[Sequence[torch.Tensor]] | None) -> list[list[torch.Tensor]]:
    """The groups asked for, as lists of parameters."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    if groups is None:
        return []
    if isinstance(groups, int) and not isinstance(groups, bool) and groups > 0:
        size, extra = divmod(len(parameters), groups)
        starts = [number * size + min(number, extra) for number in range(groups + 1)]
        return [parameters[start:stop] for start, stop in pairwise(starts)]
    if not isinstance(groups, (list, tuple)) or not all(isinstance(group, (list, tuple)) for group in groups):
        raise InvalidRequestError(f"groups={groups!r}: pass a number above 0, or a list of lists of parameters")
    flat = [p for group in groups for p in group]
    if not all(isinstance(p, torch.Tensor) for p in flat):
        raise InvalidRequestError("groups holds something that is no parameter: pass lists of parameters")
    if len({id(p) for p in flat}) < len(flat):
        raise InvalidRequestError("groups has a parameter twice: every parameter may be in one group only")
    return [list(group) for group in groups]


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
    # A compiled module's parameters go by the names of the module inside.
    by_parameter = {parameter: name.replace(COMPILED_PREFIX, "") for name, parameter in pairs}
    unnamed = [number for parameter, number in numbered.items() if parameter not in by_parameter]
    if unnamed:
        raise InvalidRequestError(
            f"named_parameters leaves out {len(unnamed)} of the optimizer's parameters "
            f"(group.index {', '.join(unnamed)}): name them all")
    return by_parameter
