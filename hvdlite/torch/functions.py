"""Making ranks start alike: parameters and optimizer state from one rank."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from hvdlite import api
from hvdlite.errors import InvalidRequestError


def broadcast_parameters(parameters: Mapping[str, Any] | Iterable[tuple[str, Any]], root_rank: int) -> None:
    """Overwrite named tensors (``model.state_dict()`` or ``model.named_parameters()``) with those of ``root_rank``.

    In place. Raises: InvalidRequestError where an entry is no tensor; MismatchError where the ranks' differ.
    """
    pairs = sorted(parameters.items() if isinstance(parameters, Mapping) else parameters)
    for name, tensor in pairs:
        if not isinstance(tensor, torch.Tensor):
            raise InvalidRequestError(f"broadcast_parameters: {name!r} is a {type(tensor).__name__}: pass tensors only")
    api.broadcast_parameters(pairs, root_rank)


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int) -> None:
    """Load ``root_rank``'s ``optimizer.state_dict()`` on every rank; parameters are not touched.

    Raises: InvalidRequestError for LBFGS, whose state is no set of tensors per parameter.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise InvalidRequestError(
            "broadcast_optimizer_state: LBFGS keeps state that cannot be loaded: create it after the broadcast")
    state = _broadcast_object(optimizer.state_dict(), root_rank, "optimizer_state")
    if api.rank() != root_rank:
        optimizer.load_state_dict(state)


def _broadcast_object(value: Any, root_rank: int, name: str) -> Any:
    """Send any picklable object. The ranks of a job trust one another: they run the same program."""
    is_root = api.rank() == root_rank
    payload = np.frombuffer(pickle.dumps(value), np.uint8).copy() if is_root else None
    length = api.broadcast(np.array([0 if payload is None else len(payload)], np.int64), root_rank, name=f"{name}.size")
    data = api.broadcast_(payload if payload is not None else np.empty(int(length[0]), np.uint8), root_rank, name=f"{name}.data")
    return value if is_root else pickle.loads(data.tobytes())
