"""A small allreduce that its caller waits for, without the background thread: the calling thread agrees and exchanges itself.

Waking the background thread and being woken by it costs more than both collectives. While the background thread has nothing to
do it leaves the communicators open (``open``); a caller then runs one cycle for its own tensor in compiled code and returns.
To the other ranks this is a cycle like any other: it makes no difference to them who runs it.

*Why compiled code*: a signal's handler in Python may raise between any two steps of Python code in the main thread, also between
the two collectives, and then the other ranks would wait for ever. One call of compiled code can't be interrupted. It
waits for other ranks as long as the background thread would before its first sleep, then hands over what it has begun.

*Threads*: who owns the communicators is told by one word that is changed by compare-and-swap. The background thread takes it in
``close``, a caller inside ``run``; all other state belongs to the owner.
*Guarantees*: what was begun is either over when ``run`` returns or handed over; slots are used in the same order on every rank,
because each rank notes its own calls in the order of its cycles (``finished``) and the background thread looks at these first.
"""

from __future__ import annotations

import ctypes
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from hvdlite.backoff import LONGEST_TRANSFER_SLEEP_S, complete
from hvdlite.control.base import Begun, Note, Outcome
from hvdlite.control.mpi import MpiControl, transport_error
from hvdlite.dataplane.mpi import SMALL_BYTES
from hvdlite.errors import UnavailableError
from hvdlite.message import ReduceOp
from hvdlite.response_cache import SlotTable
from hvdlite.tensor_queue import TensorEntry, TensorQueue

#: How long a caller looks for the other ranks. Chosen: as long as the background thread does before its first sleep.
_PATIENCE_NS = 200_000
#: Calls noted until the background thread looks at them. Chosen: more than fit between two of its heartbeats.
_NUM_NOTES = 8192
#: Seconds after which the background thread looks again whether a caller has gone. Chosen: a call takes that long.
_LOOK_AGAIN_S = 50e-6
#: Tests of a request between two looks at the clock.
_TESTS = 16

# Who owns the communicators.
_BACKGROUND, _NOBODY, _CALLER, _HANDED_OVER = 0, 1, 2, 3
# What ``run`` returns instead of a number of calls.
_BUSY, _LEFT = -1, -2


# Where each word of the shared state stands; addresses and MPI's handles as integers. Of the functions: where they are.
# _VERSION grows when the slots may have changed; _NOTED says how many of the _CALLS the background thread has looked at;
# _AGREEMENT is the persistent request's address, _EXCHANGE an MPI_Request; _SECONDS and _NANOSECONDS are a timespec.
(
    _OWNER, _VERSION, _BEGUN, _TICKET, _CALLS, _NOTED, _NOTES, _ERROR, _NUM_WORDS, _SENT, _RECEIVED, _AGREEMENT, _EXCHANGE, _FLAG,
    _COMMUNICATOR, _SUM, _IN_PLACE, _STATUS, _START, _TEST, _IALLREDUCE, _CLOCK_GETTIME, _YIELD, _CLOCK, _SECONDS, _NANOSECONDS,
    _CLOSING,  # the background thread wants to be the owner: who is in is the last one
    _DATATYPES,  # one word for each of _DTYPES
) = range(28)

_DTYPES = ("float32", "float64", "int32", "int64")
_CODES = {name: code for code, name in enumerate(_DTYPES)}
_OPS = frozenset((ReduceOp.Average.value, ReduceOp.Sum.value))
_NUM_CELLS = _DATATYPES + len(_DTYPES)
#: Of one call: its ticket and slot, and when it was made, began to agree, was agreed, and ended.
_NOTE_WORDS = 6

# Compiled code knows plain integers only.
_AGREEING, _EXCHANGING, _FAILED = int(Begun.AGREEING), int(Begun.EXCHANGING), int(Begun.FAILED)


def _call(typing_context: Any, builder: Any, arguments: Any) -> Any:
    """Call the C function at the address ``arguments[0]`` with integers and pointers; its result is an int."""
    kind = ir.FunctionType(ir.IntType(32), [ir.IntType(64)] * (len(arguments) - 1))
    return builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), arguments[1:])


def _generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    return _call(context, builder, arguments)


_WORD = types.int64


@intrinsic
def _call_0(typing_context: Any, function: Any) -> Any:
    return types.int32(_WORD), _generate


@intrinsic
def _call_1(typing_context: Any, function: Any, a: Any) -> Any:
    return types.int32(_WORD, _WORD), _generate


@intrinsic
def _call_2(typing_context: Any, function: Any, a: Any, b: Any) -> Any:
    return types.int32(_WORD, _WORD, _WORD), _generate


@intrinsic
def _call_3(typing_context: Any, function: Any, a: Any, b: Any, c: Any) -> Any:
    return types.int32(_WORD, _WORD, _WORD, _WORD), _generate


@intrinsic
def _call_7(typing_context: Any, function: Any, a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any) -> Any:
    return types.int32(_WORD, _WORD, _WORD, _WORD, _WORD, _WORD, _WORD, _WORD), _generate


@intrinsic
def _words(typing_context: Any, address: Any) -> Any:
    """An address as a pointer to 64-bit words, for ``carray``."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())

    return types.CPointer(types.int64)(types.int64), generate


@intrinsic
def _swap(typing_context: Any, address: Any, expected: Any, new: Any) -> Any:
    """Change the word at an address if it is as expected, as one step; tell whether it was."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        done = builder.cmpxchg(pointer, arguments[1], arguments[2], "seq_cst", "seq_cst")
        return builder.extract_value(done, 1)

    return types.boolean(types.int64, types.int64, types.int64), generate


@numba.njit(inline="always")
def _now(cells: int) -> int:
    c = numba.carray(_words(cells), (_NUM_CELLS,))
    _call_2(c[_CLOCK_GETTIME], c[_CLOCK], cells + 8 * _SECONDS)
    return c[_SECONDS] * 1_000_000_000 + c[_NANOSECONDS]


@numba.njit(inline="always")
def _complete(cells: int, request: int) -> bool:
    """Test a request for a while; tell whether it is over."""
    c = numba.carray(_words(cells), (_NUM_CELLS,))
    until = 0
    while True:
        for _ in range(_TESTS):
            c[_FLAG] = 0
            error = _call_3(c[_TEST], request, cells + 8 * _FLAG, c[_STATUS])
            if error:
                c[_ERROR], c[_BEGUN] = error, _FAILED
                return False
            if c[_FLAG] & 0xFFFFFFFF:
                return True
        _call_0(c[_YIELD])  # to a rank that shares this core
        now = _now(cells)
        if not until:
            until = now + _PATIENCE_NS
        elif now > until:
            return False


def _run(cells: int, ticket: int, version: int, slot: int, tensor: int, count: int, datatype: int, made_ns: int) -> int:
    """One cycle for one tensor, summed in place; the call's number, or _BUSY, or _LEFT to the background thread."""
    c = numba.carray(_words(cells), (_NUM_CELLS,))
    owner = cells + 8 * _OWNER
    if not _swap(owner, _NOBODY, _CALLER):
        return _BUSY
    number = c[_CALLS]
    if c[_VERSION] != version or c[_CLOSING] or number - c[_NOTED] >= _NUM_NOTES:
        _swap(owner, _CALLER, _NOBODY)
        return _BUSY
    num_words = c[_NUM_WORDS]
    sent = numba.carray(_words(c[_SENT]), (1 + 2 * num_words,))
    received = numba.carray(_words(c[_RECEIVED]), (1 + 2 * num_words,))
    place, bit = slot >> 6, 1 << (slot & 63)
    c[_TICKET] = ticket
    sent[1 + place] |= bit
    sent[1 + num_words + place] &= ~bit
    began_ns = _now(cells)
    c[_BEGUN] = _AGREEING
    error = _call_1(c[_START], c[_AGREEMENT])
    if error:
        c[_ERROR], c[_BEGUN] = error, _FAILED
    is_over = not error and _complete(cells, c[_AGREEMENT])
    if is_over:  # else MPI may not have read it yet
        sent[1 + place] &= ~bit
        sent[1 + num_words + place] |= bit
    # Anything but this one tensor, ready everywhere, is left to the background thread.
    is_over = is_over and received[0] == sent[0]
    for word in range(num_words):
        ready = received[1 + word] & ~received[1 + num_words + word]
        is_over = is_over and ready == (bit if word == place else 0)
    if not is_over:
        _swap(owner, _CALLER, _HANDED_OVER)
        return _LEFT
    agreed_ns = _now(cells)
    c[_BEGUN] = _EXCHANGING
    request = cells + 8 * _EXCHANGE
    error = _call_7(c[_IALLREDUCE], c[_IN_PLACE], tensor, count, c[_DATATYPES + datatype], c[_SUM], c[_COMMUNICATOR], request)
    if error:
        c[_ERROR], c[_BEGUN] = error, _FAILED
    if error or not _complete(cells, request):
        _swap(owner, _CALLER, _HANDED_OVER)
        return _LEFT
    notes = numba.carray(_words(c[_NOTES]), (_NUM_NOTES * _NOTE_WORDS,))
    at = number % _NUM_NOTES * _NOTE_WORDS
    notes[at], notes[at + 1], notes[at + 2] = ticket, slot, made_ns
    notes[at + 3], notes[at + 4], notes[at + 5] = began_ns, agreed_ns, _now(cells)
    c[_BEGUN] = 0
    c[_CALLS] = number + 1
    _swap(owner, _CALLER, _NOBODY)
    return number


def _take(cells: int) -> bool:
    """Make the background thread the owner, unless a caller is at work; tell whether it is."""
    owner = cells + 8 * _OWNER
    return _swap(owner, _NOBODY, _BACKGROUND) or _swap(owner, _HANDED_OVER, _BACKGROUND)


def _give(cells: int) -> bool:
    """Let callers in, who then see all that the background thread has written before."""
    return _swap(cells + 8 * _OWNER, _BACKGROUND, _NOBODY)


class MpiFastPath:
    """The calls that need no background thread, over the communicators of a control plane and a data plane."""

    def __init__(self, control: MpiControl, communicator: Any) -> None:
        """``communicator``: the data plane's. Raises: UnavailableError where MPI can't be called like this."""
        self._control = control
        self._mpi = mpi = control.mpi
        self._words = np.zeros(_NUM_CELLS, np.int64)
        self._cells = cells = self._words.data
        self._notes = np.zeros((_NUM_NOTES, _NOTE_WORDS), np.int64)
        self._address = self._words.ctypes.data
        self._kept: list[Any] = [communicator, mpi.Status()]
        self._run, self._take, self._give = self._compiled(_run, 8), self._compiled(_take, 1), self._compiled(_give, 1)
        # One number for each call, because a signal's handler may make one in the middle of another.
        self._tickets = itertools.count(1)
        self._agreement: Any = None
        #: Of calls that are to be recorded, by ticket.
        self._recorded: dict[int, TensorEntry] = {}
        self.is_recording = False
        try:
            library = ctypes.CDLL(mpi.__file__)  # finds what this module of mpi4py is linked to, whichever MPI that is
            for cell, name in ((_START, "MPI_Start"), (_TEST, "MPI_Test"), (_IALLREDUCE, "MPI_Iallreduce")):
                cells[cell] = _address_of(getattr(library, name))
            for cell, name in ((_CLOCK_GETTIME, "clock_gettime"), (_YIELD, "sched_yield")):
                cells[cell] = _address_of(getattr(ctypes.CDLL(None), name))
        except (OSError, AttributeError) as reason:
            raise UnavailableError(f"MPI's functions can't be called directly: {reason}") from reason
        cells[_CLOCK] = time.CLOCK_MONOTONIC
        cells[_COMMUNICATOR], cells[_SUM], cells[_IN_PLACE] = self._handle(communicator), self._handle(mpi.SUM), int(mpi.IN_PLACE)
        cells[_STATUS] = mpi._addressof(self._kept[1])
        cells[_NOTES] = self._notes.ctypes.data
        for code, dtype in enumerate(_DTYPES):
            cells[_DATATYPES + code] = self._handle(mpi.Datatype.fromcode(np.dtype(dtype).char))

    def _compiled(self, function: Any, num_arguments: int) -> Any:
        """A C function of words, called without the GIL; cached on disk where some place for the cache is writable."""
        signature = types.int64(*[types.int64] * num_arguments)
        try:
            made = numba.cfunc(signature, nopython=True, cache=True)(function)
        except RuntimeError:  # nothing writable: hvdlite.kernels has said so
            made = numba.cfunc(signature, nopython=True)(function)
        self._kept.append(made)
        return ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * num_arguments)(made.address)

    def _handle(self, of: Any) -> int:
        size = self._mpi._sizeof(of)
        return int.from_bytes(ctypes.string_at(self._mpi._addressof(of), size), "little", signed=True)

    def _code(self, entry: TensorEntry) -> int | None:
        """The code of what ``entry`` exchanges, if such a call can be made here."""
        request, inputs = entry.request, entry.inputs
        if len(inputs) != 1 or request.op not in _OPS or request.key.process_set_id or request.compressor != "none":
            return None
        if inputs[0] is not entry.outputs[0] or inputs[0].write_back or entry.ready or request.prescale != 1.0 or (
                request.device != "cpu" or not 0 < inputs[0].array.nbytes <= SMALL_BYTES):
            return None
        return _CODES.get(request.dtypes[0])

    def run(self, entry: TensorEntry, slots: SlotTable, queue: TensorQueue) -> Outcome:
        cells = self._cells
        if cells[_OWNER] != _NOBODY or cells[_CLOSING]:
            return Outcome.NOTHING
        code, version, slot = self._code(entry), cells[_VERSION], slots.matches(entry.request)
        if code is None or slot is None:
            return Outcome.NOTHING
        ticket = next(self._tickets)
        try:
            if not queue.offer(ticket, entry):
                return Outcome.NOTHING
            buffer, is_recording = entry.inputs[0], self.is_recording
            if is_recording:
                self._recorded[ticket] = entry
            number = self._run(self._address, ticket, version, slot, buffer.address, len(buffer.array), code, entry.submitted_ns)
            if is_recording:
                if number < 0:
                    self._recorded.pop(ticket, None)
                else:
                    queue.wake()
            if number == _LEFT:
                queue.wake()
                return Outcome.BEGUN
            queue.withdraw(ticket)
        except BaseException:  # of a signal's handler, most likely right after the compiled code
            if cells[_TICKET] != ticket or not cells[_BEGUN]:  # else it was handed over, and is in flight
                queue.withdraw(ticket)
            queue.wake()
            raise
        return Outcome.NOTHING if number < 0 else Outcome.DONE

    def open(self, bits: int, num_words: int) -> None:
        request = self._control.lay_out(bits, num_words)
        if request is None:
            return
        cells = self._cells
        if request is not self._agreement:
            self._agreement = request
            cells[_AGREEMENT] = self._mpi._addressof(request)
            cells[_NUM_WORDS] = (num_words - 1) // 2
            cells[_SENT], cells[_RECEIVED] = self._control.addresses()
        cells[_VERSION] += 1
        cells[_CLOSING] = 0
        self._give(self._address)

    def close(self) -> None:
        if self._cells[_OWNER] == _BACKGROUND:
            return
        self._cells[_CLOSING] = 1
        while not self._take(self._address):
            time.sleep(_LOOK_AGAIN_S)

    @property
    def num_calls(self) -> int:
        """How many calls ended in their caller's thread."""
        return self._cells[_CALLS]

    def finished(self) -> Iterator[Note]:
        cells = self._cells
        for number in range(cells[_NOTED], cells[_CALLS]):
            ticket, slot, made_ns, *times_ns = self._notes[number % _NUM_NOTES].tolist()
            yield Note(slot, self._recorded.pop(ticket, None), made_ns, *times_ns)
        cells[_NOTED] = cells[_CALLS]

    @property
    def begun(self) -> Begun:
        return Begun(self._cells[_BEGUN])

    def take_over(self, queue: TensorQueue) -> TensorEntry | None:
        return queue.adopt(self._cells[_TICKET])

    def agree(self, pause: Callable[[float], bool], waited_s: float) -> int:
        agreed = self._control.agree_on_begun(pause, waited_s)
        self._cells[_BEGUN] = 0
        return agreed

    def complete_exchange(self, pause: Callable[[float], bool]) -> None:
        try:
            if self._cells[_BEGUN] == _FAILED:
                raise self._mpi.Exception(self._cells[_ERROR])
            request = self._mpi.Request()
            size = self._mpi._sizeof(request)
            ctypes.memmove(self._mpi._addressof(request), self._address + 8 * _EXCHANGE, size)
            complete(request, pause, longest_s=LONGEST_TRANSFER_SLEEP_S)
        except self._mpi.Exception as error:
            raise transport_error("a small allreduce", error) from error
        self._cells[_BEGUN] = 0


def _address_of(function: Any) -> int:
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return address
