"""From a call to a queued entry: the one place where each collective's arguments are checked and worded.

Bad input raises here, at the call, with nothing submitted; then the call may be corrected and repeated.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from hvdlite.adapters import adapter_for
from hvdlite.buffer import Buffer, Memory
from hvdlite.dataplane import order
from hvdlite.errors import InvalidRequestError, NotAMemberError, UnsupportedOpError, format_ranks
from hvdlite.fusion import FLOATS
from hvdlite.handle import Handle
from hvdlite.message import ANY_LENGTH, SINGULAR, Collective, Key, ReduceOp, Request
from hvdlite.process_set import Members, ProcessSet
from hvdlite.runtime import Runtime, default_runtime
from hvdlite.tensor_queue import TensorEntry

_WITHOUT_TENSORS = SINGULAR | {Collective.BARRIER}

#: What may be given as op, and its code.
_OPS: dict[str, dict[Any, int]] = {
    Collective.ALLREDUCE: {
        op: op.value for op in ReduceOp},
    Collective.REDUCESCATTER: {op: op.value for op in (ReduceOp.Average, ReduceOp.Sum)},
}


class Submission:
    """One call on its way: who runs it, under which key, on which tensors.

    ``tensors`` is one tensor, or a sequence when ``is_group``, which may have ``names`` of their own; ``runtime``
    defaults to the process's. ``is_awaited``: the caller does nothing until it has ended.
    """

    __slots__ = ("collective", "is_awaited", "is_group", "name", "names", "process_set", "runtime", "tensors")

    def __init__(
        self, collective: str, tensors: Any, *, is_group: bool = False, name: str | None = None,
        process_set: ProcessSet | Members | None = None, names: tuple[str, ...] = (), runtime: Runtime | None = None,
        is_awaited: bool = False,
    ) -> None:
        self.runtime = runtime or default_runtime()
        self.process_set = self.runtime.members(process_set)
        self.collective = collective
        self.is_awaited = is_awaited
        self.is_group = is_group
        self.name = name
        self.names = names
        self.tensors = list(tensors) if is_group else [] if tensors is None and collective in _WITHOUT_TENSORS else [tensors]
        if self.process_set.rank_in_set < 0:
            raise NotAMemberError(
                f"{self.label}: rank {self.runtime.topology.rank} is not in process set {self.process_set.process_set_id} "
                f"({format_ranks(self.process_set.ranks)}): call it on its members only")
        if is_group and not self.tensors:
            raise self.invalid("the group is empty: pass at least one tensor")

    @property
    def label(self) -> str:
        """How messages call it."""
        return f"unnamed {self.collective}" if self.name is None else f"{self.collective} {self.name!r}"

    def invalid(self, what: str) -> InvalidRequestError:
        """The error for a wrong argument; ``what`` continues the sentence."""
        return InvalidRequestError(f"{self.label}: {what}")

    def op(self, op: ReduceOp | int | None, average: bool | None = None) -> int:
        """Resolve ``op`` and the older ``average``."""
        if op is None:
            if average is not None:
                warnings.warn("average= is the older spelling: use op=Average or op=Sum", DeprecationWarning,
                              stacklevel=_level_of_caller())
            return ReduceOp.Sum.value if average is False else ReduceOp.Average.value
        if average is not None:
            raise self.invalid("op and average are both given: op alone says it (op=Average, op=Sum)")
        allowed = _OPS[self.collective]
        code = allowed.get(op)
        if code is None:
            raise UnsupportedOpError(
                f"{self.label}: op {op!r} is not supported: use one of {', '.join(one.name for one in allowed)}")
        return code

    def buffers(self, *, writable: bool = False, like: Sequence[Buffer] | None = None) -> tuple[Buffer, ...]:
        """View the tensors; with ``like`` make new ones of the same shapes instead."""
        made: list[Buffer] = []
        try:
            for index, tensor in enumerate(self.tensors):
                adapter = adapter_for(tensor)
                if like is None:
                    if adapter.gpu_of is None:
                        made.append(adapter.buffer(tensor, writable))
                    else:
                        made.append(self._view(adapter, tensor, writable))
                elif like[index].on is not None:
                    made.append(adapter.device_empty(like[index].shape, like[index].dtype, like[index]))
                else:
                    made.append(adapter.empty(like[index].shape, like[index].dtype, tensor))
        except InvalidRequestError as reason:
            where = f"tensor {len(made)} of the group: " if self.is_group else ""
            raise self.invalid(f"{where}{reason}") from reason
        if len(made) > 1 and len(devices := {buffer.device for buffer in made}) > 1:
            raise self.invalid(f"its tensors are on {' and '.join(sorted(devices))}: put them all on one device")
        return tuple(made)

    def small_copy(self) -> tuple[Buffer, ...]:
        """A copy of a tensor that is alone, to be combined in place, if it is so small that this is cheaper; else nothing."""
        if self.is_group:
            return ()
        try:
            made = adapter_for(self.tensors[0]).small_copy(self.tensors[0])
        except InvalidRequestError:
            return ()  # whoever views it words this
        return () if made is None else (made,)

    def _view(self, adapter: Any, tensor: Any, writable: bool) -> Buffer:
        """A tensor where it lies; one on a GPU as a copy on the host where this process cannot work on the GPU itself."""
        index = adapter.gpu_of(tensor)
        device = None if index is None else self.runtime.gpus.device(index)
        made: Buffer = adapter.buffer(tensor, writable) if device is None else adapter.device_buffer(tensor, writable, device)
        return made

    def allocator(self, like: Sequence[Buffer]) -> Callable[[int, tuple[int, ...]], Buffer]:
        """How the background thread makes tensor ``index``'s result once its shape is known."""
        if like[0].on is not None and like[0].current_stream is not None:
            stream, device = like[0].current_stream(), like[0].on

            def allocate(index: int, shape: tuple[int, ...]) -> Buffer:
                made: Buffer = adapter_for(self.tensors[index]).device_empty(shape, like[index].dtype, like[index], stream)
                order.order_after(device, stream)
                return made

            return allocate
        return lambda index, shape: adapter_for(self.tensors[index]).empty(shape, like[index].dtype, self.tensors[index])

    def add_singular(self, ranks: tuple[int, ...] = ()) -> Handle:
        """Queue what is about all ranks and not about tensors."""
        name = self.runtime.label(self.collective) if self.name is None else self.name
        request = Request(Key(0, self.collective, name), (), (ranks,))
        return self.runtime.submit(TensorEntry(request, (), (), Handle(request.key), _first))

    def add(
        self, inputs: tuple[Buffer, ...], outputs: tuple[Buffer, ...] = (), *,
        result: Callable[[TensorEntry], Any] | None = None, is_ragged: bool = False, op: int = ReduceOp.Sum.value,
        root_rank: int = -1, prescale: float = 1.0, postscale: float = 1.0, splits: tuple[int, ...] = (),
        compressor: str = "none", moments: tuple[Any, ...] = (), memory: Memory | None = None,
    ) -> Handle:
        """Queue the call."""
        runtime, process_set = self.runtime, self.process_set
        name = runtime.unnamed(process_set.process_set_id, self.collective) if self.name is None else self.name
        dtypes: tuple[str, ...]
        shapes: tuple[tuple[int, ...], ...]
        if len(inputs) == 1:  # most calls, in a third of the time
            dtypes, shapes = (inputs[0].dtype,), (inputs[0].shape,)
        else:
            dtypes, shapes = tuple([buffer.dtype for buffer in inputs]), tuple([buffer.shape for buffer in inputs])
        if is_ragged:
            shapes = tuple([(ANY_LENGTH, *shape[1:]) for shape in shapes])
        request = runtime.request(
            process_set.process_set_id, self.collective, name, dtypes, shapes, op, root_rank, float(prescale), float(postscale),
            inputs[0].device if inputs else "cpu", self.names, compressor)
        entry = TensorEntry(
            request, inputs, outputs, Handle(request.key), result or (self._all if self.is_group else _first),
            None if outputs or not inputs else self.allocator(inputs), splits, moments,
            root_in_set=process_set.ranks.index(root_rank) if root_rank >= 0 else -1)
        if inputs and inputs[0].on is not None:
            entry.ready = order.mark_ready(inputs[0])
        if memory is not None:
            entry.addresses, entry.flats = memory.addresses, memory.flats
        return runtime.submit(entry, wait_for_name=self.name is None, is_awaited=self.is_awaited)

    @staticmethod
    def _all(entry: TensorEntry) -> list[Any]:
        return [buffer.tensor for buffer in entry.outputs]


def _level_of_caller() -> int:
    """The ``stacklevel`` by which a warning points to the first line outside of this package."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "hvdlite":
        level, frame = level + 1, frame.f_back
    return level


def _first(entry: TensorEntry) -> Any:
    return entry.outputs[0].tensor if entry.outputs else None


def allreduce(
    call: Submission, *, in_place: bool, average: bool | None, op: ReduceOp | int | None,
    prescale_factor: float, postscale_factor: float, compressor: str = "none",
    result: Callable[[TensorEntry], Any] | None = None, moments: tuple[Any, ...] = (), memory: Memory | None = None,
) -> Handle:
    """Queue an allreduce of one tensor or a group; ``compressor`` is an ExchangeSpec in words, "auto" or "none".

    ``memory``: of tensors in place, if it is known already.
    """
    chosen = call.op(op, average)
    copied = () if in_place or compressor != "none" else call.small_copy()
    inputs = memory.buffers if memory is not None else copied or call.buffers(writable=in_place)
    _refuse_bool(call, inputs)
    if chosen == ReduceOp.Adasum:
        _check_adasum(call, inputs)
    if compressor != "none":
        if chosen not in (ReduceOp.Average, ReduceOp.Sum):
            raise call.invalid(f"op {ReduceOp(chosen).name} of quantised values: use Average or Sum, or leave compression out")
        if not any(buffer.dtype in FLOATS for buffer in inputs):
            compressor = "none"  # integers arrive exactly, as with every compressor
    outputs = inputs if in_place or copied else call.buffers(like=inputs)
    return call.add(inputs, outputs, op=chosen, prescale=prescale_factor, postscale=postscale_factor, compressor=compressor,
                    result=result, moments=moments, memory=memory)


def reducescatter(call: Submission, *, op: ReduceOp | int | None, prescale_factor: float, postscale_factor: float) -> Handle:
    """Queue a reducescatter of one tensor or a group."""
    chosen = call.op(op)
    inputs = call.buffers()
    _refuse_bool(call, inputs)
    _refuse_scalars(call, inputs)
    return call.add(inputs, op=chosen, prescale=prescale_factor, postscale=postscale_factor)


def allgather(call: Submission) -> Handle:
    """Queue an allgather of one tensor or a group."""
    inputs = call.buffers()
    _refuse_scalars(call, inputs)
    return call.add(inputs, is_ragged=True)


def broadcast(call: Submission, *, in_place: bool, root_rank: int) -> Handle:
    """Queue a broadcast; ``root_rank`` is a global rank."""
    if root_rank not in call.process_set.ranks:
        raise call.invalid(
            f"root_rank {root_rank} is not in the process set ({format_ranks(call.process_set.ranks)}): name one of its ranks")
    inputs = call.buffers(writable=in_place)
    return call.add(inputs, inputs if in_place else call.buffers(like=inputs), root_rank=int(root_rank))


def alltoall(call: Submission, *, splits: Any, with_received_splits: bool = False) -> Handle:
    """Queue an alltoall; with ``splits``, or when asked for, the result is (tensor, received_splits)."""
    inputs = call.buffers()
    _refuse_scalars(call, inputs)
    rows = inputs[0].shape[0]
    if splits is None:
        num_ranks = call.process_set.size()
        if rows % num_ranks:
            raise call.invalid(f"{rows} rows cannot be cut evenly for {num_ranks} ranks: pass splits")
        counts = (rows // num_ranks,) * num_ranks
    else:
        counts = _checked_splits(call, splits, rows)
        with_received_splits = True
    result = (lambda entry: (_first(entry), _splits_like(splits, entry))) if with_received_splits else None
    return call.add(inputs, is_ragged=True, splits=counts, result=result)


def barrier(call: Submission) -> Handle:
    """Queue a barrier."""
    return call.add(())


def join(call: Submission) -> Handle:
    """Queue this rank's end of data; the result is the rank that joined last."""
    return call.add_singular()


def change_process_sets(call: Submission, ranks: tuple[int, ...]) -> Handle:
    """Queue the making of a set of ``ranks`` (the result is its id), or the removal of the set ``ranks[0]``."""
    return call.add_singular(ranks)


def _checked_splits(call: Submission, splits: Any, rows: int) -> tuple[int, ...]:
    import numpy as np

    table = np.asarray(splits)
    num_ranks = call.process_set.size()
    if table.ndim != 1 or (table.size and not np.issubdtype(table.dtype, np.integer)):
        raise call.invalid("splits is no 1-D sequence of integers: pass one number of rows per rank")
    if len(table) != num_ranks:
        raise call.invalid(f"splits has {len(table)} entries for {num_ranks} ranks: pass one number of rows per rank")
    if (table.size and table.min() < 0) or table.sum() > rows:
        raise call.invalid(f"splits {table.tolist()} do not fit {rows} rows: pass numbers >= 0 that sum to at most that")
    return tuple(table.tolist())


def _splits_like(splits: Any, entry: TensorEntry) -> Any:
    """The received splits as an int32 tensor of the sent tensor's framework, on the host."""
    like = splits if hasattr(splits, "dtype") else entry.inputs[0].tensor
    made = adapter_for(like).empty((len(entry.received_splits),), "int32", like)
    made.array[:] = entry.received_splits
    if made.write_back:
        made.write_back()
    return made.tensor


def _check_adasum(call: Submission, inputs: Sequence[Buffer]) -> None:
    size = call.process_set.size()
    if call.process_set.process_set_id != 0:
        raise NotImplementedError(f"{call.label}: Adasum combines all ranks only: leave process_set at the global one")
    if size & (size - 1):
        raise NotImplementedError(f"{call.label}: Adasum needs a power of two of ranks and there are {size}: use another op")
    for buffer in inputs:
        if not buffer.dtype.startswith(("float", "bfloat")):
            raise call.invalid(f"Adasum of dtype {buffer.dtype}: it combines floating-point tensors only")


def _refuse_bool(call: Submission, inputs: Sequence[Buffer]) -> None:
    for buffer in inputs:
        if buffer.dtype == "bool":
            raise call.invalid("dtype bool has no sum or order here: convert it, for example to uint8")


def _refuse_scalars(call: Submission, inputs: Sequence[Buffer]) -> None:
    if any(not buffer.shape for buffer in inputs):
        raise call.invalid("the tensor has no dimension to split or concatenate: reshape it to (1,)")
