"""hvdlite for torch: ``import hvdlite.torch as hvd``.

The collectives are those of ``hvdlite`` (torch tensors in and out); this package adds the torch optimizer with
hooks that overlap the exchange with backward.
"""

from __future__ import annotations

try:
    import torch as _torch  # noqa: F401
except ImportError as _reason:
    from hvdlite.errors import UnavailableError as _UnavailableError

    raise _UnavailableError(f"hvdlite.torch: torch is not installed ({_reason}): pip install hvdlite[torch]") from _reason

from hvdlite import api as _api
from hvdlite.errors import HorovodInternalError, HostsUpdatedInterrupt
from hvdlite.torch import functions as _functions
from hvdlite.torch.optimizer import DistributedOptimizer as DistributedOptimizer

globals().update({_name: getattr(_api, _name) for _name in _api.__all__})
broadcast_parameters = _functions.broadcast_parameters
broadcast_optimizer_state = _functions.broadcast_optimizer_state

__all__ = [
    *_api.__all__, "DistributedOptimizer", "HorovodInternalError", "HostsUpdatedInterrupt", "broadcast_optimizer_state",
]
