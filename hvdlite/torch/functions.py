"""Making ranks start alike: parameters and optimizer state from one rank."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from hvdlite import api
from hvdlite.errors import InvalidRequestError, MismatchError, format_ranks
from hvdlite.process_set import ProcessSet

#: What torch.compile puts before the names of a module's parameters.
COMPILED_PREFIX = "_orig_mod."
#: How many names one message spells out. Chosen: fits a terminal.
_NAMES_SHOWN = 5


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[Any], root_rank: int, process_set: ProcessSet | None = None
) -> None:
    """Overwrite tensors on every rank with those of ``root_rank``, in place.

    ``params``: ``model.state_dict()``, ``model.named_parameters()``, pairs or tensors. A compiled module's names count
    as those of the module inside. Raises: InvalidRequestError where an entry is no tensor; MismatchError, on every
    rank, where the ranks' names, shapes or dtypes differ.
    """
    pairs = _named_tensors(params)
    _check_alike([f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in pairs], process_set)
    handles = [api.broadcast_async_(tensor, root_rank, f"parameter.{name}", process_set) for name, tensor in pairs]
    for handle in handles:
        handle.wait()


#: Where a state dict has what quantised exchanges of this rank have left over.
QUANTIZED_STATE = "hvdlite"


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None,
    process_set: ProcessSet | None = None,
) -> None:
    """Load ``root_rank``'s ``optimizer.state_dict()`` on every rank; parameters are not touched, no step is taken.

    ``model`` is accepted for compatibility. Raises: InvalidRequestError for LBFGS, whose state is no set of tensors
    per parameter.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise InvalidRequestError(
            "broadcast_optimizer_state: LBFGS keeps state that cannot be loaded: create it after the broadcast")
    if not optimizer.state:
        _make_zero_gradients(optimizer)
    is_root = api.rank() == root_rank
    tensors: list[torch.Tensor] = []
    state = optimizer.state_dict()
    own = {QUANTIZED_STATE: state.pop(QUANTIZED_STATE)} if QUANTIZED_STATE in state else {}  # every rank keeps its own
    frame = _without_tensors(state, tensors) if is_root else None
    frame = api.broadcast_object(frame, root_rank, process_set=process_set)
    if not is_root:
        state = _with_tensors(frame, tensors)
    handles = [api.broadcast_async_(one, root_rank, f"optimizer_state.{index}", process_set)
               for index, one in enumerate(tensors)]
    for handle in handles:
        handle.wait()
    if not is_root:
        with keeping_groups_and_state(optimizer):
            optimizer.load_state_dict({**state, **own})
        undo_casts(optimizer, state)


def undo_casts(optimizer: Any, state: dict[str, Any]) -> None:
    """Put back what ``load_state_dict`` cast: torch gives floating state the dtype of its parameter."""
    indices = [index for group in state.get("param_groups", ()) for index in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, parameter in zip(indices, parameters, strict=False):
        live = optimizer.state.get(parameter, {})
        for name, value in state.get("state", {}).get(index, {}).items():
            if isinstance(value, torch.Tensor) and name in live and live[name].dtype != value.dtype:
                live[name] = value.to(live[name].device)


@contextmanager
def keeping_groups_and_state(optimizer: Any) -> Iterator[None]:
    """Within it state is loaded into the groups and the state that were there.

    A wrapped optimizer shares them with the one inside, and so with a scheduler made before wrapping; torch would put
    new ones in their place.
    """
    groups, kept, state = optimizer.param_groups, list(optimizer.param_groups), optimizer.state
    yield
    for one, loaded in zip(kept, map(dict, optimizer.param_groups), strict=True):
        one.clear()
        one.update(loaded)
    loaded = dict(optimizer.state)
    state.clear()
    state.update(loaded)
    optimizer.param_groups, optimizer.state = groups, state


def _make_zero_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Scripts written for Horovod find a gradient, of zeros, at every parameter of an optimizer that never stepped."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, requires_grad=False)


def _named_tensors(params: Any) -> list[tuple[str, torch.Tensor]]:
    if not isinstance(params, (Mapping, Iterable)) or isinstance(params, (str, torch.Tensor)):
        raise InvalidRequestError(
            f"broadcast_parameters: {type(params).__name__} holds no parameters: pass model.state_dict() or named_parameters()")
    entries = list(params.items() if isinstance(params, Mapping) else params)
    pairs = [one if isinstance(one, tuple) and len(one) == 2 else (f"{index:06d}", one) for index, one in enumerate(entries)]
    for name, tensor in pairs:
        if not isinstance(tensor, torch.Tensor):
            raise InvalidRequestError(f"broadcast_parameters: {name!r} is a {type(tensor).__name__}: pass tensors only")
    return sorted(((str(name).replace(COMPILED_PREFIX, ""), tensor) for name, tensor in pairs), key=lambda pair: pair[0])


def _check_alike(described: list[str], process_set: ProcessSet | None) -> None:
    """Compare what every rank is about to send: a rank that lacks a tensor would leave the others waiting for it."""
    digest = hashlib.sha256("\n".join(described).encode()).hexdigest()
    if len(set(api.allgather_object(digest, process_set=process_set))) == 1:
        return
    everyones = [set(one) for one in api.allgather_object(described, process_set=process_set)]
    ranks = list((process_set or api.global_process_set).members().ranks)
    differing = sorted(set().union(*everyones) - set.intersection(*everyones))
    sides = [f"{text} on {format_ranks(rank for rank, one in zip(ranks, everyones, strict=True) if text in one)} only"
             for text in differing[:_NAMES_SHOWN]]
    more = f" and {len(differing) - _NAMES_SHOWN} more" if len(differing) > _NAMES_SHOWN else ""
    raise MismatchError(
        f"broadcast_parameters: the ranks' tensors differ: {'; '.join(sides)}{more}: build the same model on every rank")


class _Place(NamedTuple):
    """Where a tensor was taken out of a state."""

    number: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    device_kind: str


def _without_tensors(value: Any, tensors: list[torch.Tensor]) -> Any:
    """A copy of nested dicts, lists and tuples with a _Place for every tensor, which goes to ``tensors``."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return _Place(len(tensors) - 1, tuple(value.shape), value.dtype, value.device.type)
    if isinstance(value, dict):
        return {key: _without_tensors(one, tensors) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_without_tensors(one, tensors) for one in value)
    return value


def _with_tensors(value: Any, tensors: list[torch.Tensor]) -> Any:
    """The way back, with new tensors that wait to be overwritten."""
    if isinstance(value, _Place):
        tensors.append(torch.empty(value.shape, dtype=value.dtype, device=value.device_kind))
        return tensors[-1]
    if isinstance(value, dict):
        return {key: _with_tensors(one, tensors) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_with_tensors(one, tensors) for one in value)
    return value
