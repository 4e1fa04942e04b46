"""How a TorchState saves, restores and synchronises one attribute, by the type of its value."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, Protocol, runtime_checkable

import torch

from hvdlite import api
from hvdlite.torch import functions
from hvdlite.torch.elastic.sampler import ElasticSampler

_ROOT_RANK = 0


class StateHandler:
    """Base of all handlers. A new handler has saved its value once."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def save(self) -> None:
        """Keep a copy that nothing else refers to."""
        raise NotImplementedError

    def restore(self) -> None:
        """Make the value what it was when it was saved, in place."""
        raise NotImplementedError

    def sync(self) -> None:
        """Make the value that of rank 0 on every rank, in place; collective."""
        raise NotImplementedError

    def reset(self) -> None:
        """Adapt the value to the ranks there are now."""

    def set_value(self, value: Any) -> None:
        """Take another value and save it."""
        self.value = value
        self.save()


class StateDictHandler(StateHandler):
    """Anything with ``state_dict`` and ``load_state_dict``: learning rate schedulers, gradient scalers ..."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self.save()

    def save(self) -> None:
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        self._load(copy.deepcopy(self._saved))  # what is loaded may become part of the value and change with it

    def sync(self) -> None:
        self._load(api.broadcast_object(self.value.state_dict(), _ROOT_RANK, name="elastic.state_dict"))

    def _load(self, state: Any) -> None:
        self.value.load_state_dict(state)


class ModelStateHandler(StateDictHandler):
    """A model: parameters and buffers."""

    def sync(self) -> None:
        functions.broadcast_parameters(self.value.state_dict(), _ROOT_RANK)


class OptimizerStateHandler(StateDictHandler):
    """An optimizer: its state, bit by bit, and its options."""

    def restore(self) -> None:
        """Gradients go too: they belong to the step that was given up, and a loop may add to them before it clears them."""
        super().restore()
        for group in self.value.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def sync(self) -> None:
        functions.broadcast_optimizer_state(self.value, _ROOT_RANK)

    def _load(self, state: Any) -> None:
        super()._load(state)
        functions.undo_casts(self.value, state)


class SamplerStateHandler(StateDictHandler):
    """An ElasticSampler."""

    def reset(self) -> None:
        self.value.reset()


@runtime_checkable
class _HasStateDict(Protocol):
    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any) -> Any: ...


#: Type -> handler; the first row whose type fits counts. Part of the interface: users add rows of their own.
_registry: list[tuple[type, type[StateHandler]]] = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
    (_HasStateDict, StateDictHandler),
]


def get_handler_registry() -> list[tuple[type, type[StateHandler]]]:
    """The rows (type, handler class); the first whose type fits a value counts."""
    return _registry


def set_handler_registry(registry: Iterable[tuple[type, type[StateHandler]]]) -> None:
    """Replace the rows; states that exist keep their handlers."""
    _registry[:] = list(registry)


def handler_of(value: Any) -> StateHandler | None:
    """A new handler for a value, or None where it is a plain object."""
    for kind, handler in _registry:
        if isinstance(value, kind):
            return handler(value)
    return None
