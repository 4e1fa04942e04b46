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

from hvdlite.api import *  # noqa: F403
from hvdlite.api import __all__ as _api_names
from hvdlite.errors import HorovodInternalError, HostsUpdatedInterrupt
from hvdlite.torch.functions import broadcast_optimizer_state, broadcast_parameters
from hvdlite.torch.optimizer import DistributedOptimizer

__all__ = sorted([
    *_api_names, "DistributedOptimizer", "HorovodInternalError", "HostsUpdatedInterrupt", "broadcast_optimizer_state",
])
