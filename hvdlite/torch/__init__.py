"""hvdlite for torch: ``import hvdlite.torch as hvd``.

The collectives are those of ``hvdlite`` (torch tensors in and out); this package adds the torch optimizer with
hooks that overlap the exchange with backward.
"""

from __future__ import annotations

from typing import Any as _Any

try:
    import torch as _torch  # noqa: F401
except ImportError as _reason:
    from hvdlite.errors import UnavailableError as _UnavailableError

    raise _UnavailableError(f"hvdlite.torch: torch is not installed ({_reason}): pip install hvdlite[torch]") from _reason

from hvdlite.api import allgather_object, broadcast_object
from hvdlite.errors import HorovodInternalError, HostsUpdatedInterrupt
from hvdlite.process_set import ProcessSet
from hvdlite.torch import elastic, mpi_ops
from hvdlite.torch.compression import Compression
from hvdlite.torch.functions import broadcast_optimizer_state, broadcast_parameters
from hvdlite.torch.mpi_ops import (
    Adasum,
    Average,
    Max,
    Min,
    Product,
    Sum,
    add_process_set,
    allgather,
    allgather_async,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    alltoall,
    alltoall_async,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    global_process_set,
    gloo_built,
    gloo_enabled,
    grouped_allgather,
    grouped_allgather_async,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter,
    grouped_reducescatter_async,
    init,
    is_homogeneous,
    is_initialized,
    join,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    poll,
    rank,
    reducescatter,
    reducescatter_async,
    remove_process_set,
    rocm_built,
    shutdown,
    size,
    sparse_allreduce_async,
    start_timeline,
    stop_timeline,
    synchronize,
)
from hvdlite.torch.optimizer import DistributedOptimizer
from hvdlite.torch.sync_batch_norm import SyncBatchNorm, convert_sync_batchnorm

__all__ = [
    "Adasum", "Average", "Compression", "DistributedOptimizer", "HorovodInternalError", "HostsUpdatedInterrupt",
    "Max", "Min", "ProcessSet", "Product", "Sum", "SyncBatchNorm", "add_process_set", "allgather", "allgather_async",
    "allgather_object", "allreduce", "allreduce_", "allreduce_async", "allreduce_async_", "alltoall",
    "alltoall_async", "barrier", "broadcast", "broadcast_", "broadcast_async", "broadcast_async_",
    "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters", "ccl_built", "convert_sync_batchnorm",
    "cross_rank", "cross_size", "cuda_built", "ddl_built", "ddp_hook", "elastic", "global_process_set", "gloo_built",
    "gloo_enabled", "grouped_allgather", "grouped_allgather_async", "grouped_allreduce", "grouped_allreduce_",
    "grouped_allreduce_async", "grouped_allreduce_async_", "grouped_reducescatter", "grouped_reducescatter_async",
    "init", "is_homogeneous", "is_initialized", "join", "local_rank", "local_size", "mpi_built", "mpi_enabled",
    "mpi_ops", "mpi_threads_supported", "nccl_built", "poll", "rank", "reducescatter", "reducescatter_async",
    "remove_process_set", "rocm_built", "shutdown", "size", "sparse_allreduce_async", "start_timeline",
    "stop_timeline", "synchronize",
]


def __getattr__(name: str) -> _Any:
    if name == "ddp_hook":  # needs torch.distributed, which not every build of torch has
        from hvdlite.torch.ddp import ddp_hook

        globals()[name] = ddp_hook
        return ddp_hook
    raise AttributeError(f"module 'hvdlite.torch' has no attribute {name!r}")
