"""hvdlite: collective operations and distributed optimizers over MPI, in Python.

Names resolve lazily: importing the package alone loads neither NumPy nor MPI nor any framework.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from hvdlite._version import __version__ as __version__

_API = (
    "Adasum", "Average", "Max", "Min", "Product", "Sum", "add_process_set", "allgather", "allgather_async",
    "allgather_object", "allreduce", "allreduce_", "allreduce_async", "allreduce_async_", "alltoall",
    "alltoall_async", "barrier", "barrier_async", "broadcast", "broadcast_", "broadcast_async", "broadcast_async_",
    "broadcast_object", "broadcast_parameters", "cross_rank", "cross_size", "explain_compression",
    "global_process_set",
    "grouped_allgather", "grouped_allgather_async", "grouped_allreduce", "grouped_allreduce_",
    "grouped_allreduce_async", "grouped_allreduce_async_", "grouped_reducescatter", "grouped_reducescatter_async",
    "init", "is_homogeneous", "is_initialized", "join", "local_rank", "local_size", "mark", "mark_step", "rank", "reducescatter",
    "reducescatter_async", "remove_process_set", "set_loss_scale", "shutdown", "size", "start_timeline", "stop_timeline",
    "sync_residuals",
)
_ERRORS = (
    "ConfigError", "DuplicateNameError", "HorovodInternalError", "HostsUpdatedInterrupt", "HvdliteError",
    "InternalError", "InvalidRequestError", "JobFailedError", "MismatchError", "NotAMemberError", "NotInitializedError",
    "PeerFailedError", "ProcessSetRemovedError", "StalledError", "TransportError", "UnavailableError", "UnsupportedOpError",
    "WaitTimeoutError",
)
_HOME = {
    **dict.fromkeys(_API, "hvdlite.api"),
    **dict.fromkeys(_ERRORS, "hvdlite.errors"),
    "Compression": "hvdlite.compressor",
    "Config": "hvdlite.config",
    "DistributedOptimizer": "hvdlite.optimizer",
    "Handle": "hvdlite.handle",
    "ProcessSet": "hvdlite.process_set",
    "run": "hvdlite.launch.run",
}

__all__ = sorted(["__version__", *_HOME])


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(import_module(_HOME[name]), name)
    elif name in ("torch", "timeline", "launch"):
        value = import_module(f"hvdlite.{name}")
    else:
        raise AttributeError(f"module 'hvdlite' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
