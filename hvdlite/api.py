"""The framework-neutral functions: NumPy arrays, torch tensors, CuPy arrays in, the same kind out.

Every collective comes as ``x_async`` (returns a Handle at once) and ``x`` (waits); ``x_`` works in place.
Common arguments: ``name`` identifies the operation on every rank, needed when ranks or threads call in
different orders; ``process_set`` limits it to some ranks. Common errors: InvalidRequestError at the call;
HorovodInternalError (MismatchError, PeerFailedError ...) while waiting, the same on every rank;
NotInitializedError before ``init`` and after the end.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hvdlite import submission
from hvdlite.compression.policy import Decision
from hvdlite.compressor import compressed_allreduce
from hvdlite.errors import InvalidRequestError
from hvdlite.handle import Handle
from hvdlite.membership import add_process_set, join, register_at_init, remove_process_set
from hvdlite.message import Collective, ReduceOp
from hvdlite.objects import allgather_object, broadcast_object
from hvdlite.process_set import ProcessSet, global_process_set
from hvdlite.runtime import default_runtime, is_initialized, shutdown, start_default
from hvdlite.submission import Submission
from hvdlite.timeline.marks import Marked

Average, Sum, Adasum = ReduceOp.Average, ReduceOp.Sum, ReduceOp.Adasum
Min, Max, Product = ReduceOp.Min, ReduceOp.Max, ReduceOp.Product


def init(comm: Any = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Start the runtime of this process; collective over all ranks of the job, harmless when running.

    Without a starter it is a job of one rank and needs no MPI. The environment is read here. ``comm``: an mpi4py
    communicator or a list of world ranks, instead of all ranks. ``process_sets``: sets to register at once; the string
    "dynamic" is accepted, sets may come and go in any case.
    Raises: ConfigError (a setting; a starter that is not of mpi4py's MPI); UnavailableError (no MPI);
    InvalidRequestError (``comm`` or ``process_sets``).
    """
    runtime = start_default(comm)
    if isinstance(process_sets, str):
        if process_sets.lower() != "dynamic":
            raise InvalidRequestError(f"init(process_sets={process_sets!r}): pass a list of ProcessSet, or 'dynamic'")
    elif process_sets:
        register_at_init(process_sets, runtime)


def rank() -> int:
    """This process's number among all, from 0."""
    return default_runtime().topology.rank


def size() -> int:
    """How many processes the job has."""
    return default_runtime().topology.size


def local_rank() -> int:
    """This process's number among those of its host."""
    return default_runtime().topology.local_rank


def local_size() -> int:
    """How many processes run on this host."""
    return default_runtime().topology.local_size


def cross_rank() -> int:
    """This host's number among those that have this local rank."""
    return default_runtime().topology.cross_rank


def cross_size() -> int:
    """How many hosts have this local rank."""
    return default_runtime().topology.cross_size


def is_homogeneous() -> bool:
    """Whether every host has equally many processes of the job."""
    return default_runtime().topology.is_homogeneous


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Record into a Chrome JSON file from now on, as with HOROVOD_TIMELINE; rank 0 writes, all ranks may call.

    Where ``file_path`` is a directory, or ends with a slash, every rank that calls records into rings in it, for hvdtrace.
    Raises: ConfigError where the file cannot be made.
    """
    default_runtime().start_timeline(file_path, mark_cycles)


def mark_step() -> None:
    """Say that a training step has ended, for the timeline; call it once in each step, on every rank.

    The wrapped optimizers do it by themselves, until a call tells better. Costs nothing to speak of while nothing is recorded.
    """
    default_runtime().marks.step()


def mark(name: str) -> Marked:
    """A context manager that records what this thread does inside: ``with hvdlite.mark("input"): batch = next(batches)``.

    "input", "forward" and "backward" are what ``hvdtrace report`` tells apart from other computing; any name is shown.
    """
    return Marked(default_runtime().marks, name)


def sync_residuals(process_set: ProcessSet | None = None) -> None:
    """Replace what quantised exchanges have left over by its mean over the ranks: the sum stays, and all ranks hold the same.

    Collective. Before a checkpoint that one rank writes for all, or a change of the number of ranks.
    """
    runtime = default_runtime()
    members = runtime.members(process_set)
    for process_set_id, owner in runtime.residuals.owners():
        if process_set_id == members.process_set_id:
            arrays = [values for _, values, _ in runtime.residuals.items(process_set_id, owner)]
            grouped_allreduce_(arrays, op=Average, name=f"residuals.{owner}", process_set=process_set)
            runtime.residuals.note_synchronized(process_set_id, owner)


def explain_compression() -> list[Decision]:
    """What ``Compression.auto`` has decided on this rank: for each bucket its way, and the seconds each way would take."""
    return default_runtime().background.decisions


def set_loss_scale(scale: float) -> None:
    """Say that gradients are ``scale`` times what they would be: what quantised exchanges have left over is multiplied by
    ``scale`` divided by what it was before (at first 1), so that it stays in the gradients' units.

    Raises: InvalidRequestError for a number that is not above 0 and finite.
    """
    if not 0 < scale < float("inf"):
        raise InvalidRequestError(f"set_loss_scale({scale!r}): pass a finite number above 0")
    default_runtime().residuals.set_loss_scale(float(scale))


def stop_timeline() -> None:
    """Finish the file of ``start_timeline`` or HOROVOD_TIMELINE; harmless when none is open."""
    default_runtime().stop_timeline()


def _waiting(function: Callable[..., Handle]) -> Callable[..., Any]:
    """The variant that waits; same arguments."""

    @functools.wraps(function)
    def wait(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs).wait()

    return _renamed(wait, function)


def _renamed(wait: Callable[..., Any], function: Callable[..., Handle]) -> Callable[..., Any]:
    wait.__name__ = wait.__qualname__ = function.__name__.replace("_async", "")
    wait.__doc__ = f"Run ``{function.__name__}`` and wait for its result.\n\n{function.__doc__}"
    return wait


def _allreduce(
    function_name: str, is_group: bool, in_place: bool, doc: str
) -> tuple[Callable[..., Handle], Callable[..., Any]]:
    """The variant that starts, and the one that waits; a small tensor of that is exchanged by the calling thread itself."""
    def make(is_awaited: bool) -> Callable[..., Any]:
        def start(
            tensor: Any, average: bool | None = None, name: str | None = None, op: ReduceOp | int | None = None,
            prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet | None = None,
            compression: Any = None,
        ) -> Any:
            call = Submission(Collective.ALLREDUCE, tensor, is_group=is_group, name=name, process_set=process_set,
                              is_awaited=is_awaited)
            handle = compressed_allreduce(call, compression, in_place=in_place, average=average, op=op,
                                          prescale_factor=prescale_factor, postscale_factor=postscale_factor)
            return handle.wait() if is_awaited else handle

        return start

    start = make(False)
    start.__name__ = start.__qualname__ = function_name
    start.__doc__ = doc
    return start, _renamed(make(True), start)


_ALLREDUCE_DOC = """{what} over all ranks; ``op`` is Average (default), Sum, Min, Max, Product or Adasum.

    Values are multiplied by ``prescale_factor`` before and by ``postscale_factor`` after. float16 and bfloat16
    are summed in float32; integers average toward zero, exactly. ``average`` is the older spelling of ``op``.
    ``compression``: how the values travel, as Compression.fp16 or .onebit.
    """

allreduce_async, allreduce = _allreduce(
    "allreduce_async", False, False, _ALLREDUCE_DOC.format(what="Combine a tensor elementwise into a new one"))
allreduce_async_, allreduce_ = _allreduce(
    "allreduce_async_", False, True, _ALLREDUCE_DOC.format(what="Combine a tensor elementwise in place"))
grouped_allreduce_async, grouped_allreduce = _allreduce(
    "grouped_allreduce_async", True, False,
    _ALLREDUCE_DOC.format(what="Combine a list of tensors as one operation into new ones"))
grouped_allreduce_async_, grouped_allreduce_ = _allreduce(
    "grouped_allreduce_async_", True, True,
    _ALLREDUCE_DOC.format(what="Combine a list of tensors as one operation in place"))


def _allgather(function_name: str, is_group: bool, doc: str) -> Callable[..., Handle]:
    def start(tensor: Any, name: str | None = None, process_set: ProcessSet | None = None) -> Handle:
        return submission.allgather(
            Submission(Collective.ALLGATHER, tensor, is_group=is_group, name=name, process_set=process_set))

    start.__name__ = start.__qualname__ = function_name
    start.__doc__ = doc
    return start


allgather_async = _allgather(
    "allgather_async", False,
    "Concatenate every rank's tensor along the first dimension, which may differ, in rank order.")
grouped_allgather_async = _allgather(
    "grouped_allgather_async", True,
    "Concatenate every rank's tensors, each along its first dimension, which may differ, as one operation.")
allgather, grouped_allgather = _waiting(allgather_async), _waiting(grouped_allgather_async)


def broadcast_async(tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet | None = None) -> Handle:
    """Return a tensor with the values of global rank ``root_rank``."""
    call = Submission(Collective.BROADCAST, tensor, name=name, process_set=process_set)
    return submission.broadcast(call, in_place=False, root_rank=root_rank)


def broadcast_async_(tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet | None = None) -> Handle:
    """Overwrite the tensor with the values of global rank ``root_rank``."""
    call = Submission(Collective.BROADCAST, tensor, name=name, process_set=process_set)
    return submission.broadcast(call, in_place=True, root_rank=root_rank)


def alltoall_async(
    tensor: Any, splits: Any = None, name: str | None = None, process_set: ProcessSet | None = None
) -> Handle:
    """Send ``splits[r]`` rows to rank r, evenly without ``splits``; concatenate what arrives in rank order.

    Result: the tensor; with ``splits`` the pair of it and the received splits (int32, one per rank).
    """
    call = Submission(Collective.ALLTOALL, tensor, name=name, process_set=process_set)
    return submission.alltoall(call, splits=splits)


def _reducescatter(function_name: str, is_group: bool, doc: str) -> Callable[..., Handle]:
    def start(
        tensor: Any, name: str | None = None, op: ReduceOp | int | None = None, process_set: ProcessSet | None = None,
        prescale_factor: float = 1.0, postscale_factor: float = 1.0,
    ) -> Handle:
        call = Submission(Collective.REDUCESCATTER, tensor, is_group=is_group, name=name, process_set=process_set)
        return submission.reducescatter(call, op=op, prescale_factor=prescale_factor, postscale_factor=postscale_factor)

    start.__name__ = start.__qualname__ = function_name
    start.__doc__ = doc
    return start


reducescatter_async = _reducescatter(
    "reducescatter_async", False,
    "Combine as allreduce (Average or Sum) and keep this rank's rows; the first ranks get one row more.")
grouped_reducescatter_async = _reducescatter(
    "grouped_reducescatter_async", True, "Combine and cut a list of tensors as ``reducescatter`` does, as one operation.")
reducescatter, grouped_reducescatter = _waiting(reducescatter_async), _waiting(grouped_reducescatter_async)


def barrier_async(process_set: ProcessSet | None = None) -> Handle:
    """Complete once every rank has called it."""
    return submission.barrier(Submission(Collective.BARRIER, None, process_set=process_set))


broadcast, broadcast_ = _waiting(broadcast_async), _waiting(broadcast_async_)
alltoall = _waiting(alltoall_async)
barrier = _waiting(barrier_async)


def broadcast_parameters(parameters: Mapping[str, Any] | Sequence[tuple[str, Any]], root_rank: int = 0) -> None:
    """Overwrite named arrays on every rank with those of ``root_rank``, in place.

    Raises: InvalidRequestError where an entry is no array that can be written; MismatchError where the ranks'
    shapes or dtypes differ.
    """
    pairs = sorted(parameters.items() if isinstance(parameters, Mapping) else parameters)
    handles = [broadcast_async_(tensor, root_rank, name=f"parameter.{name}") for name, tensor in pairs]
    for handle in handles:
        handle.wait()


__all__ = [
    "Adasum", "Average", "Max", "Min", "Product", "Sum", "add_process_set", "allgather", "allgather_async",
    "allgather_object", "allreduce", "allreduce_", "allreduce_async", "allreduce_async_", "alltoall",
    "alltoall_async", "barrier", "barrier_async", "broadcast", "broadcast_", "broadcast_async", "broadcast_async_",
    "broadcast_object", "broadcast_parameters", "cross_rank", "cross_size", "explain_compression", "global_process_set",
    "grouped_allgather", "grouped_allgather_async", "grouped_allreduce", "grouped_allreduce_",
    "grouped_allreduce_async", "grouped_allreduce_async_", "grouped_reducescatter", "grouped_reducescatter_async",
    "init", "is_homogeneous", "is_initialized", "join", "local_rank", "local_size", "mark", "mark_step", "rank", "reducescatter",
    "reducescatter_async", "remove_process_set", "set_loss_scale", "shutdown", "size", "start_timeline", "stop_timeline",
    "sync_residuals",
]
