"""TensorQueue: the way down, from user threads to the background thread, and who is in flight.

*Threads*: ``add`` from any thread; ``drain``, ``wait`` and ``notice_end`` from the background thread.
*Guarantees*: a key is in flight at most once on this rank; entries are drained in the order they were added;
after ``close`` every further ``add`` raises, and what was added before is still drained, so nothing is lost
at shutdown.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hvdlite.errors import DuplicateNameError
from hvdlite.handle import Handle, NameUse
from hvdlite.message import Key, Request


@dataclass(slots=True, eq=False)
class TensorEntry:
    """One submitted call: its request, the memory it reads and writes, and its handle.

    ``inputs`` and ``outputs``: one Buffer per tensor (see adapters); an in-place tensor is the same Buffer in
    both. ``outputs`` is empty where sizes are only known later; then ``allocate`` makes the result.
    ``moments``: of each input the second moment by whose root it is quantised, flat and float32, if so: NumPy arrays, or of
    tensors on a GPU also DeviceArrays.
    ``is_stand_in``: the rank has joined and has no such tensor. ``result`` turns the finished entry into what
    ``Handle.wait`` returns.
    """

    request: Request
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    handle: Handle
    result: Callable[[TensorEntry], Any]
    allocate: Callable[[int, tuple[int, ...]], Any] | None = None
    splits: tuple[int, ...] = ()
    moments: tuple[Any, ...] = ()
    received_splits: tuple[int, ...] = ()
    root_in_set: int = -1
    submitted_ns: int = 0
    reported_ns: int = 0
    is_stand_in: bool = False
    #: Of the tensors, where they are exchanged in place: the addresses, uint64; and memory in which some lie side by side, uint8.
    addresses: Any = None
    flats: tuple[Any, ...] = ()
    #: Of GPU tensors: after what their stream had to do for them, and whether the runtime's stream waits for that already.
    ready: Any = None
    is_begun: bool = False


#: A name whose operation has ended, but nobody has asked about it, stays taken for this long. Chosen: long enough for
#: two calls in a row to be told that they use one name, whether or not the first happens to end in between; short
#: enough for whoever never asks.
_UNSEEN_NS = 1_000_000
#: Names kept before those of ended operations are looked for. Chosen.
_MANY_USES = 4096


def _is_over(use: NameUse) -> bool:
    return use.ended_ns > 0 and time.monotonic_ns() - use.ended_ns >= _UNSEEN_NS


def taken(key: Key) -> DuplicateNameError:
    """The error of a call whose name is in flight."""
    return DuplicateNameError(f"{key}: this name is already in flight on this rank: "
                              "wait for the first call to finish, or give the second one another name")


class TensorQueue:
    """Entries on their way to the background thread."""

    def __init__(self) -> None:
        # deque.append and popleft are atomic, so draining needs no lock.
        self._waiting: deque[TensorEntry] = deque()
        # Guards _uses and _closed_by together, so that an entry is refused or drained, never in between.
        self._lock = threading.Lock()
        self._released = threading.Condition(self._lock)
        self._uses: dict[Key, NameUse] = {}
        #: The calls that threads make without the background thread, by ticket, and which thread that is.
        self._offers: dict[int, tuple[int, TensorEntry]] = {}
        self._prune_at = _MANY_USES
        self._num_waiting = 0
        self._closed_by: Callable[[], BaseException] | None = None
        # Held while there is nothing to wake up for; released to wake the background thread.
        self._wake = threading.Lock()
        self._wake.acquire()

    def add(self, entry: TensorEntry, *, wait_for_name: bool = False) -> None:
        """Queue an entry; with ``wait_for_name`` block until its name is free instead of refusing it.

        Raises: DuplicateNameError; the closing error after ``close``.
        """
        key = entry.request.key
        with self._lock:
            use = self._uses.get(key)
            is_offered = self._is_offered(key)
            while wait_for_name and self._closed_by is None and (is_offered or (use is not None and not use.ended_ns)):
                self._num_waiting += 1
                self._released.wait(_UNSEEN_NS / 1e9 if is_offered else None)
                self._num_waiting -= 1
                use, is_offered = self._uses.get(key), self._is_offered(key)
            if self._closed_by is not None:
                raise self._closed_by()
            if not wait_for_name and (is_offered or (use is not None and not _is_over(use))):
                raise taken(key)
            use = NameUse(self._forget)
            # A signal's handler may raise after any call: after this one the entry is in flight, its name is not taken, and
            # ``drain`` makes up for that. What follows is one step.
            self._waiting.append(entry)
            entry.handle.use = self._uses[key] = use
            if len(self._uses) > self._prune_at:
                self._prune()
        self.wake()

    def _is_offered(self, key: Key) -> bool:
        """Whether another thread makes such a call without the background thread. What this thread's offer was is over."""
        if not self._offers:  # in most cases
            return False
        own = threading.get_ident()
        return any(thread != own and entry.request.key == key for thread, entry in list(self._offers.values()))

    def offer(self, ticket: int, entry: TensorEntry) -> bool:
        """Note the call that this thread is about to make without the background thread; False: ``add`` has to look at its name.

        Raises: the closing error after ``close``.
        """
        key = entry.request.key
        with self._lock:
            if self._closed_by is not None:
                raise self._closed_by()
            use = self._uses.get(key)
            if (use is not None and not _is_over(use)) or self._is_offered(key):
                return False
            self._offers[ticket] = threading.get_ident(), entry
        return True

    def withdraw(self, ticket: int) -> None:
        """The call is over, or was not begun."""
        self._offers.pop(ticket, None)  # one step

    def adopt(self, ticket: int) -> TensorEntry | None:
        """Take over a call that a thread has begun: its name is in flight like any other. None where that has been done."""
        with self._lock:
            _, entry = self._offers.pop(ticket, (0, None))
            if entry is None:
                return None
            # Other ranks count on it: whoever took the name since an interrupt is refused when the entry comes.
            entry.handle.use = self._uses[entry.request.key] = NameUse(self._forget)
        return entry

    def _takes_name(self, entry: TensorEntry) -> bool:
        """Whether an entry whose caller was interrupted could take its name yet; else it has failed."""
        key = entry.request.key
        with self._lock:
            if entry.handle.use is None:  # else the caller was at it just now
                use = self._uses.get(key)
                if use is not None and not _is_over(use):
                    entry.handle.fail(taken(key))
                    return False
                entry.handle.use = self._uses[key] = NameUse(self._forget)
        return True

    def wake(self) -> None:
        """Make the background thread look at the queue now. Any thread."""
        try:
            self._wake.release()
        except RuntimeError:
            pass  # released already: it is about to look anyway

    def wait(self, timeout_s: float) -> bool:
        """Sleep until woken or until ``timeout_s`` has passed; tell whether something may be queued."""
        return self._wake.acquire(timeout=timeout_s) or bool(self._waiting)

    def wait_for_wake(self, timeout_s: float) -> bool:
        """Sleep until woken or until ``timeout_s`` has passed; tell which."""
        return self._wake.acquire(timeout=timeout_s)

    def drain(self) -> list[TensorEntry]:
        """Take everything queued, in order."""
        # Taken back before looking: what is added from here on releases it again, so no wake-up is lost.
        self._wake.acquire(blocking=False)
        entries = []
        while self._waiting:
            entry = self._waiting.popleft()
            if entry.handle.use is not None or self._takes_name(entry):
                entries.append(entry)
        return entries

    def waiting(self) -> list[TensorEntry]:
        """What has not been drained yet. Any thread."""
        return list(self._waiting)

    def __len__(self) -> int:
        return len(self._waiting)

    def notice_end(self) -> None:
        """Say that some handle has ended: who waits for its name may go on."""
        with self._lock:
            if self._num_waiting:
                self._released.notify_all()

    def _forget(self, key: Key, use: NameUse) -> None:
        """Free a name whose end was seen; any thread."""
        with self._lock:
            if self._uses.get(key) is use:
                del self._uses[key]

    def _prune(self) -> None:
        for key in [key for key, use in self._uses.items() if _is_over(use)]:
            del self._uses[key]
        self._prune_at = max(_MANY_USES, 2 * len(self._uses))

    def close(self, error: Callable[[], BaseException]) -> None:
        """Refuse all further entries with ``error()``, a new exception each time."""
        with self._lock:
            self._closed_by = error
            self._released.notify_all()

    def holds_only_small(
        self, threshold_bytes: int, is_single: Callable[[Request], bool], size_of: Callable[[Request], int]
    ) -> bool:
        """Tell whether something waits, all of it free-standing and together below ``threshold_bytes``."""
        waiting = list(self._waiting)
        return (
            bool(waiting)
            and all(is_single(entry.request) for entry in waiting)
            and sum(size_of(entry.request) for entry in waiting) < threshold_bytes
        )
