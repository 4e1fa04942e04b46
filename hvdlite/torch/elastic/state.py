"""State: what training needs in order to go on, committed now and then and brought back after a failure."""

from __future__ import annotations

import copy
import enum
import functools
import queue
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from hvdlite import api
from hvdlite.errors import HostsUpdatedInterrupt, InvalidRequestError
from hvdlite.torch.elastic.handlers import (
    ModelStateHandler,
    OptimizerStateHandler,
    SamplerStateHandler,
    StateDictHandler,
    StateHandler,
    get_handler_registry,
    handler_of,
    set_handler_registry,
)

__all__ = [
    "HostUpdateResult", "ModelStateHandler", "ObjectState", "OptimizerStateHandler", "SamplerStateHandler", "State",
    "StateDictHandler", "StateHandler", "TorchState", "get_handler_registry", "set_handler_registry",
]


class HostUpdateResult(enum.IntFlag):
    """What happened to the set of hosts."""

    no_update = 0
    removed = 1
    added = 2
    mixed = removed | added


class State:
    """Base of all states: when to save, and how ranks agree that the hosts have changed.

    *Threads*: ``on_hosts_updated`` from any thread; the rest from the one that trains.
    """

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int]) -> None:
        """``bcast_object(value)`` returns rank 0's value on every rank."""
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._reset_callbacks: list[Callable[[], Any]] = []
        self._host_messages: queue.Queue[tuple[float, int]] = queue.Queue()
        self._last_updated_timestamp: float = 0
        self._num_commits = 0

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], Any]]) -> None:
        """Have functions called whenever the runtime was started anew, before states are synchronised."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Adapt to a runtime that was started anew."""
        self._host_messages = queue.Queue()  # they were about the ranks before
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Take an elastic launcher's news (a HostUpdateResult); the next check acts on them."""
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """Save, so that a failure leads back to here; then look for host updates. Collective.

        Raises: HostsUpdatedInterrupt, as ``check_host_updates``.
        """
        self.save()
        self._num_commits += 1
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Act on news about hosts, on all ranks at the same point; collective. Rank 0's news count.

        Raises: HostsUpdatedInterrupt; its ``skip_sync`` is true where hosts were only removed, because all ranks that
        remain hold the same state.
        """
        before = newest = self._last_updated_timestamp
        result = int(HostUpdateResult.no_update)
        while not self._host_messages.empty():
            timestamp, update = self._host_messages.get()
            if timestamp > newest:
                newest, result = timestamp, result | int(update)
        before, self._last_updated_timestamp, result = self._bcast_object((before, newest, result))
        if self._last_updated_timestamp > before:
            raise HostsUpdatedInterrupt(skip_sync=result == HostUpdateResult.removed)

    def save(self) -> None:
        """Keep a copy of everything in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Go back to the copy."""
        raise NotImplementedError

    def sync(self) -> None:
        """Make every rank's state that of rank 0; collective."""
        raise NotImplementedError

    def reset(self) -> None:
        """Adapt to the ranks there are now."""


class ObjectState(State):
    """Plain objects as attributes, one per keyword argument.

    They are copied when saved and when restored: a list that is appended to comes back as it was, as another list.
    """

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int], **kwargs: Any) -> None:
        super().__init__(bcast_object, get_rank)
        _refuse_names(self, kwargs)
        self._assign(kwargs)
        self._saved_state = _copies(kwargs)

    def save(self) -> None:
        self._saved_state = _copies(self._objects())

    def restore(self) -> None:
        self._assign(_copies(self._saved_state))

    def sync(self) -> None:
        if self._saved_state:
            self._assign(self._bcast_object(self._objects()))
            ObjectState.save(self)

    def _objects(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._saved_state}

    def _assign(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            setattr(self, name, value)


class TorchState(ObjectState):
    """A model, an optimizer, and whatever else training needs, as attributes.

    Models, optimizers, ElasticSamplers and anything with ``state_dict`` are kept in place by a handler (see
    ``get_handler_registry``); several of each may be given by other names. The rest are plain objects.
    *Differs* from Horovod: ``sync`` sends what rank 0 has now, not what it saved last, and saves it; ``restore``
    drops gradients; a restored optimizer shares nothing with its saved copy.
    """

    _handlers: dict[str, StateHandler]

    def __init__(self, model: Any = None, optimizer: Any = None, **kwargs: Any) -> None:
        """Save once.

        Raises: InvalidRequestError where a plain object cannot be copied, or a name is taken.
        """
        _refuse_names(self, kwargs)
        self._handlers = {}
        plain = {}
        for name, value in {"model": model, "optimizer": optimizer, **kwargs}.items():
            if not self._handle(name, value):
                plain[name] = value
        super().__init__(functools.partial(api.broadcast_object, root_rank=0, name="elastic.state"), api.rank, **plain)

    def save(self) -> None:
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        for handler in self._handlers.values():
            handler.sync()
            handler.save()
        super().sync()

    def reset(self) -> None:
        for handler in self._handlers.values():
            handler.reset()

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__.get("_handlers", ()):
            self._handlers[name].set_value(value)
        elif name in self.__dict__.get("_saved_state", ()) and self._handle(name, value):
            del self._saved_state[name]  # it was a plain object, None perhaps, until now
            return
        super().__setattr__(name, value)

    def _handle(self, name: str, value: Any) -> bool:
        """Give the attribute a handler if its value has one."""
        handler = handler_of(value)
        if handler is None:
            return False
        super().__setattr__(name, value)
        self._handlers[name] = handler
        return True


def _refuse_names(state: State, names: Iterable[str]) -> None:
    for name in names:
        if hasattr(type(state), name):
            raise InvalidRequestError(f"state attribute {name!r}: {type(state).__name__} has a method of this name: rename it")


def _copies(values: Mapping[str, Any]) -> dict[str, Any]:
    """Copies of all values; what they share, their copies share."""
    memo: dict[int, Any] = {}
    copies = {}
    for name, value in values.items():
        if isinstance(value, torch.Tensor) and value.grad_fn is not None:
            value = value.detach()  # a loss, say: the graph behind it cannot be copied
        try:
            copies[name] = copy.deepcopy(value, memo)
        except Exception as reason:
            raise InvalidRequestError(
                f"state attribute {name!r}: a {type(value).__name__} cannot be copied ({reason}): "
                "keep it outside the state, or give it state_dict() and load_state_dict()") from reason
    return copies
