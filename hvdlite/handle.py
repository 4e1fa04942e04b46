"""Handle: the way back up, from the background thread to whoever waits for an operation."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from hvdlite.errors import WaitTimeoutError
from hvdlite.message import Key

_log = logging.getLogger("hvdlite")
#: Guards the creation of, and additions to, any handle's list of callbacks.
_callbacks_lock = threading.Lock()


class NameUse:
    """One use of a name on this rank, which ends when somebody sees that the operation has ended."""

    __slots__ = ("ended_ns", "forget")

    def __init__(self, forget: Callable[[Key, NameUse], None]) -> None:
        self.ended_ns = 0
        self.forget = forget


class Handle:
    """An operation in flight.

    *Threads*: completed once by the background thread; any number of threads may wait or ask.
    Nothing is lost at shutdown: the background thread fails every handle it still holds before it ends.
    """

    __slots__ = ("_arrive", "_callbacks", "_done", "_error", "_gate", "_key", "_result", "awaited_ns", "use")

    def __init__(self, key: Key) -> None:
        self._key = key
        # A lock taken here and released once at completion: half the cost of an Event.
        self._gate = threading.Lock()
        self._gate.acquire()
        self._done = False
        self._result: Any = None
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[Handle], object]] | None = None
        #: The use of the name that ends with this operation; the queue's.
        self.use: NameUse | None = None
        self._arrive: Callable[[], None] | None = None
        #: Since when a thread has been blocked in ``wait``; 0 while none is.
        self.awaited_ns = 0

    @property
    def name(self) -> str:
        """The operation and the tensor's name, for people."""
        return str(self._key)

    def done(self) -> bool:
        """Tell whether the operation has ended, well or not; never blocks."""
        if self._done and self.use is not None:
            self._see()
        return self._done

    def _see(self) -> None:
        use, self.use = self.use, None
        if use is not None:
            use.forget(self._key, use)

    def wait(self, timeout_s: float | None = None) -> Any:
        """Block until the operation ends and return its result. A GPU may still be at work on that: the calling thread's stream
        waits for it, the thread does not.

        Raises: the operation's error (a HorovodInternalError); WaitTimeoutError after ``timeout_s`` seconds,
        with the operation still in flight.
        """
        if not self._done:
            self.awaited_ns = self.awaited_ns or time.monotonic_ns()
            if not self._gate.acquire(timeout=-1 if timeout_s is None else max(0.0, timeout_s)):
                self.awaited_ns = 0
                raise WaitTimeoutError(
                    f"{self.name}: not finished after {timeout_s:g} s: "
                    "some rank has not submitted it yet; wait again or look at the stall report")
            self._gate.release()
        if self.use is not None:
            self._see()
        if self._error is not None:
            # A fresh traceback each time: waiting twice must not grow the first one.
            raise self._error.with_traceback(None)
        if self._arrive is not None:
            self._arrive()
        return self._result

    def add_done_callback(self, function: Callable[[Handle], object]) -> None:
        """Call ``function(self)`` once when the operation has ended, well or not; at once if it has.

        *Threads*: on the background thread, which runs nothing else meanwhile: ``function`` must be short and wait for
        no other operation. What it raises is logged.
        """
        with _callbacks_lock:
            if self._callbacks is None:
                self._callbacks = []
            self._callbacks.append(function)
        # Either this sees that the operation has ended, or the thread that ends it sees the callback; where both do,
        # each callback is popped by one of them.
        if self._done:
            self._call_back()

    def complete(self, result: Any, arrive: Callable[[], None] | None = None) -> None:
        """Hand the result over; ``arrive`` is called in each thread that waits. Background thread only, once."""
        self._result, self._arrive = result, arrive
        self._end_use()
        self._done = True
        self._gate.release()
        if self._callbacks is not None:
            self._call_back()

    def fail(self, error: BaseException) -> None:
        """Hand an error over. Background thread only, once."""
        self._error = error
        self._end_use()
        self._done = True
        self._gate.release()
        if self._callbacks is not None:
            self._call_back()

    def _end_use(self) -> None:
        use = self.use
        if use is not None:
            use.ended_ns = time.monotonic_ns()

    def _call_back(self) -> None:
        callbacks = self._callbacks or []
        while callbacks:
            try:
                function = callbacks.pop(0)
            except IndexError:
                return  # the other thread took it
            try:
                function(self)
            except Exception:
                _log.exception("%s: a callback of its handle failed", self.name)
