"""The collectives for torch: those of ``hvdlite.api``, differentiable where they wait and make a new tensor.

``x_async`` starts (its handle goes to ``synchronize`` or ``poll``), ``x`` waits, ``x_`` works in place, ``grouped_x``
takes a list as one operation; what each does is said in ``hvdlite.api``. Here are gradients, compression, sparse
tensors, and the questions about the installation.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import torch

from hvdlite import api, submission
from hvdlite.api import (  # noqa: F401
    Adasum,
    Average,
    Max,
    Min,
    Product,
    Sum,
    add_process_set,
    cross_rank,
    cross_size,
    global_process_set,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    rank,
    remove_process_set,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from hvdlite.errors import HorovodInternalError, InvalidRequestError, UnavailableError  # noqa: F401
from hvdlite.handle import Handle
from hvdlite.message import Collective, ReduceOp
from hvdlite.process_set import ProcessSet
from hvdlite.submission import Submission
from hvdlite.torch.compression import Compression, Quantized, checked

Tensors = Sequence[torch.Tensor]


def _noted_by_autograd(function: Callable[..., Any]) -> Callable[..., Any]:
    """An in-place call after which autograd refuses to use what it had saved of the tensors, as after torch's own."""

    @functools.wraps(function)
    def call(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        result = function(tensors, *args, **kwargs)
        for one in [tensors] if isinstance(tensors, torch.Tensor) else tensors:
            if isinstance(one, torch.Tensor) and not one.is_inference():
                torch.autograd.graph.increment_version(one)
        return result

    return call


allreduce_async, grouped_allreduce_async = api.allreduce_async, api.grouped_allreduce_async
allgather_async, grouped_allgather_async = api.allgather_async, api.grouped_allgather_async
reducescatter_async, grouped_reducescatter_async = api.reducescatter_async, api.grouped_reducescatter_async
broadcast_async = api.broadcast_async
allreduce_async_, allreduce_ = _noted_by_autograd(api.allreduce_async_), _noted_by_autograd(api.allreduce_)
broadcast_async_, broadcast_ = _noted_by_autograd(api.broadcast_async_), _noted_by_autograd(api.broadcast_)
grouped_allreduce_async_ = _noted_by_autograd(api.grouped_allreduce_async_)
grouped_allreduce_ = _noted_by_autograd(api.grouped_allreduce_)


def synchronize(handle: Any) -> Any:
    """Wait for an operation and return its result; None for what is no handle of a running operation.

    Raises: HorovodInternalError where the operation failed.
    """
    return handle.wait() if hasattr(handle, "wait") else None


def poll(handle: Handle) -> bool:
    """Tell whether an operation has ended, well or not; ``synchronize`` does not block then.

    Raises: InvalidRequestError for what is no handle.
    """
    if not isinstance(handle, Handle):
        raise InvalidRequestError(f"poll({handle!r}): this is no handle: pass what an _async call returned")
    return handle.done()


def allreduce(
    tensor: torch.Tensor, average: bool | None = None, name: str | None = None, compression: Any = Compression.none,
    op: ReduceOp | int | None = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
) -> torch.Tensor:
    """Combine a tensor elementwise into a new one, sent as ``compression`` says; differentiable.

    Gradient: the same operation on the result's gradient; for Average and Sum.
    """
    if compression is Compression.none and average is None and isinstance(tensor, torch.Tensor) and not (
            tensor.requires_grad and torch.is_grad_enabled()):  # most calls, with less work
        op = handle_average_backwards_compatibility(op, None)
        return api.allreduce(tensor, None, name, op, prescale_factor, postscale_factor, process_set)
    arguments = (average, name, compression, op, prescale_factor, postscale_factor, process_set)
    return _allreduce([tensor], api.allreduce_async, *arguments)[0]


def grouped_allreduce(
    tensors: Tensors, average: bool | None = None, name: str | None = None, compression: Any = Compression.none,
    op: ReduceOp | int | None = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
) -> list[torch.Tensor]:
    """``allreduce`` of a list as one operation."""
    arguments = (average, name, compression, op, prescale_factor, postscale_factor, process_set)
    return _allreduce(list(tensors), api.grouped_allreduce_async, *arguments)


def _allreduce(
    tensors: list[torch.Tensor], start: Callable[..., Handle], average: bool | None, name: str | None, compression: Any,
    op: ReduceOp | int | None, prescale: float, postscale: float, process_set: ProcessSet | None,
) -> list[torch.Tensor]:
    op = handle_average_backwards_compatibility(op, average)

    compression = checked(compression)
    quantized = compression if isinstance(compression, Quantized) else None

    def run(given: Tensors) -> list[torch.Tensor]:
        return _list(start(_one_or_all(start, given), None, name, op, prescale, postscale, process_set, quantized).wait())

    def gradient(given: Tensors) -> list[torch.Tensor]:
        if op not in (Average, Sum, Adasum):
            raise InvalidRequestError(f"allreduce {name or '(unnamed)'!r}: op {op.name} has no gradient: use detach()")
        none = Compression.none
        return _allreduce(list(given), start, None, _named(name, ".grad"), none, op, prescale, postscale, process_set)

    if quantized:
        return _differentiable(run, gradient, tensors)
    compressed, context = zip(*[compression.compress(one) for one in tensors], strict=True) if tensors else ((), ())
    results = _differentiable(run, gradient, compressed)
    return [compression.decompress(one, ctx) for one, ctx in zip(results, context, strict=True)]


def allgather(tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet | None = None) -> torch.Tensor:
    """Concatenate every rank's tensor along the first dimension, which may differ; differentiable.

    Gradient: this rank's rows of the result's gradient, averaged over the ranks.
    """
    return _allgather([tensor], api.allgather_async, name, process_set)[0]


def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet | None = None
) -> list[torch.Tensor]:
    """``allgather`` of a list as one operation."""
    return _allgather(list(tensors), api.grouped_allgather_async, name, process_set)


def _allgather(
    tensors: list[torch.Tensor], start: Callable[..., Handle], name: str | None, process_set: ProcessSet | None
) -> list[torch.Tensor]:
    def run(given: Tensors) -> list[torch.Tensor]:
        return _list(start(_one_or_all(start, given), name, process_set).wait())

    def gradient(given: Tensors) -> list[torch.Tensor]:
        averaged = grouped_allreduce(given, name=_named(name, ".grad"), op=Average, process_set=process_set)
        own = torch.tensor([[len(one) for one in tensors]])
        rows = api.allgather(own, name=_named(name, ".rows"), process_set=process_set)
        before = rows[: _place(process_set)].sum(0).tolist()
        return [one.narrow(0, first, len(tensor)) for one, first, tensor in zip(averaged, before, tensors, strict=True)]

    return _differentiable(run, gradient, tensors)


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet | None = None
) -> torch.Tensor:
    """Return a tensor with the values of global rank ``root_rank``; differentiable.

    Gradient: averaged over the ranks on the root, zero elsewhere.
    """
    def gradient(given: Tensors) -> list[torch.Tensor]:
        averaged = allreduce(given[0], name=_named(name, ".grad"), op=Average, process_set=process_set)
        return [averaged if rank() == root_rank else averaged * 0]

    return _differentiable(
        lambda given: [api.broadcast(given[0], root_rank, name, process_set)], gradient, [tensor])[0]


def alltoall_async(
    tensor: torch.Tensor, splits: Any = None, name: str | None = None, process_set: ProcessSet | None = None
) -> Handle:
    """Start an alltoall; the result is always the pair (tensor, received splits), also without ``splits``."""
    call = Submission(Collective.ALLTOALL, tensor, name=name, process_set=process_set)
    return submission.alltoall(call, splits=splits, with_received_splits=True)


def alltoall(
    tensor: torch.Tensor, splits: Any = None, name: str | None = None, process_set: ProcessSet | None = None
) -> Any:
    """Send ``splits[r]`` rows to rank r, evenly without ``splits``; differentiable.

    Result: the tensor; with ``splits`` the pair of it and the received splits (int32, one per rank).
    """
    received: list[torch.Tensor] = []

    def run(given: Tensors) -> list[torch.Tensor]:
        result, counts = alltoall_async(given[0], splits, name, process_set).wait()
        received.append(counts)
        return [result]

    def gradient(given: Tensors) -> list[torch.Tensor]:
        back = alltoall(given[0], received[0], _named(name, ".grad"), process_set)[0]
        if len(back) < len(tensor):  # rows that were not sent have no influence
            back = torch.cat([back, back.new_zeros(len(tensor) - len(back), *back.shape[1:])])
        return [back]

    result = _differentiable(run, gradient, [tensor])[0]
    return result if splits is None else (result, received[0])


def reducescatter(
    tensor: torch.Tensor, name: str | None = None, compression: Any = Compression.none, op: ReduceOp | int = Average,
    process_set: ProcessSet | None = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Combine as allreduce (Average or Sum) and keep this rank's rows; differentiable.

    Gradient: every rank's gradient, gathered; times the number of ranks for Sum, and the scales.
    """
    arguments = (name, compression, op, process_set, prescale_factor, postscale_factor)
    return _reducescatter([tensor], api.reducescatter_async, *arguments)[0]


def grouped_reducescatter(
    tensors: Tensors, name: str | None = None, compression: Any = Compression.none, op: ReduceOp | int = Average,
    process_set: ProcessSet | None = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """``reducescatter`` of a list as one operation."""
    arguments = (name, compression, op, process_set, prescale_factor, postscale_factor)
    return _reducescatter(list(tensors), api.grouped_reducescatter_async, *arguments)


def _reducescatter(
    tensors: list[torch.Tensor], start: Callable[..., Handle], name: str | None, compression: Any, op: ReduceOp | int,
    process_set: ProcessSet | None, prescale: float, postscale: float,
) -> list[torch.Tensor]:
    def run(given: Tensors) -> list[torch.Tensor]:
        return _list(start(_one_or_all(start, given), name, op, process_set, prescale, postscale).wait())

    def gradient(given: Tensors) -> list[torch.Tensor]:
        factor = prescale * postscale * (_size(process_set) if op == Sum else 1)
        gathered = grouped_allgather(given, name=_named(name, ".grad"), process_set=process_set)
        return gathered if factor == 1 else [one * factor for one in gathered]

    compressed, context = zip(*[checked(compression).compress(one) for one in tensors], strict=True) if tensors else ((), ())
    results = _differentiable(run, gradient, compressed)
    return [compression.decompress(one, ctx) for one, ctx in zip(results, context, strict=True)]


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str | None, op: ReduceOp | int, process_set: ProcessSet | None = None
) -> Callable[[], torch.Tensor]:
    """Start the sum (or Average) of sparse COO tensors by gathering indices and values; call the result to wait for it.

    Raises: InvalidRequestError for another op or a dense tensor.
    """
    if not tensor.is_sparse or op not in (Average, Sum):
        raise InvalidRequestError(f"sparse allreduce {name!r}: takes a sparse COO tensor and op Average or Sum")
    # Coalesced, so that a rank sends no row twice; transposed, because rows are what is concatenated.
    own = tensor.detach().coalesce()
    indices = api.allgather_async(own.indices().t().contiguous(), _named(name, ".indices"), process_set)
    values = api.allgather_async(own.values(), _named(name, ".values"), process_set)

    def finish() -> torch.Tensor:
        everyones, where = values.wait(), indices.wait().t()
        if op == Average:
            everyones = everyones / _size(process_set)
        total = torch.sparse_coo_tensor(where, everyones, tensor.shape, device=tensor.device, check_invariants=False)
        return total.coalesce()

    return finish


def join(device: int = -1) -> int:
    """Say that this rank has no data left, and wait until all have; return the rank that came last.

    Meanwhile it takes part in the allreduces of the others with values that change no result. ``device`` is accepted
    for compatibility.
    """
    return api.join()


def barrier(process_set: ProcessSet | None = None) -> None:
    """Return once every rank has called it."""
    api.barrier(process_set)


class _Differentiable(torch.autograd.Function):
    """A collective with its gradient, given as two functions of lists of tensors."""

    @staticmethod
    def forward(ctx: Any, run: Any, gradient: Any, *tensors: torch.Tensor) -> Any:
        ctx.gradient = gradient
        return tuple(run(tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return (None, None, *ctx.gradient(list(gradients)))


def _differentiable(
    run: Callable[[Tensors], list[torch.Tensor]], gradient: Callable[[Tensors], list[torch.Tensor]], tensors: Tensors
) -> list[torch.Tensor]:
    if torch.is_grad_enabled() and any(one.requires_grad for one in tensors):
        return list(_Differentiable.apply(run, gradient, *tensors))
    return run(tensors)


def _one_or_all(start: Callable[..., Handle], tensors: Tensors) -> Any:
    """What ``start`` takes: a list if it is a grouped call, else the only tensor."""
    return list(tensors) if start.__name__.startswith("grouped") else tensors[0]


def _list(result: Any) -> list[torch.Tensor]:
    return result if isinstance(result, list) else [result]


def _named(name: str | None, part: str) -> str | None:
    return None if name is None else name + part


def _size(process_set: ProcessSet | None) -> int:
    return (process_set or global_process_set).members().size()


def _place(process_set: ProcessSet | None) -> int:
    return (process_set or global_process_set).members().rank_in_set


# -- questions about the installation; those about "built" may be asked before init() --------------------------------

def mpi_built() -> bool:
    """Whether MPI can be used: mpi4py is installed."""
    return find_spec("mpi4py") is not None


def mpi_enabled() -> bool:
    """Whether jobs run over MPI; the same question here."""
    return mpi_built()


def mpi_threads_supported() -> bool:
    """Whether the running MPI lets several threads call it.

    Raises: NotInitializedError.
    """
    return submission.default_runtime().supports_mpi_threads


def nccl_built() -> int:
    """NCCL's version code, 0 where CuPy or NCCL is missing. Whether it is used depends on the GPUs too, and is logged."""
    from hvdlite.dataplane.gpus import load_nccl

    try:
        return int(load_nccl()[0].get_version())
    except (UnavailableError, RuntimeError):
        return 0


def _not_built() -> bool:
    """Whether this optional part is there: it is not."""
    return False


gloo_built = gloo_enabled = ddl_built = ccl_built = cuda_built = rocm_built = _not_built


def handle_average_backwards_compatibility(op: ReduceOp | int | None, average: bool | None) -> ReduceOp:
    """Resolve ``op`` and the older ``average``.

    Raises: InvalidRequestError when both are given, and for what is no op.
    """
    if op is not None:
        if average is not None:
            raise InvalidRequestError("op and average are both given: op alone says it (op=Average, op=Sum)")
        if op not in list(ReduceOp):
            raise InvalidRequestError(f"op {op!r} is no reduction: use Average, Sum, Min, Max, Product or Adasum")
        return ReduceOp(op)
    if average is not None:
        warnings.warn("average= is the older spelling: use op=Average or op=Sum", DeprecationWarning, stacklevel=4)
    return ReduceOp.Sum if average is False else ReduceOp.Average
