"""Handle: the way back up, from the background thread to whoever waits for an operation."""

from __future__ import annotations

import threading
from typing import Any

from hvdlite.errors import WaitTimeoutError
from hvdlite.message import Key


class Handle:
    """An operation in flight.

    *Threads*: completed once by the background thread; any number of threads may wait or ask.
    Nothing is lost at shutdown: the background thread fails every handle it still holds before it ends.
    """

    __slots__ = ("_done", "_error", "_gate", "_key", "_result")

    def __init__(self, key: Key) -> None:
        self._key = key
        # A lock taken here and released once at completion: half the cost of an Event.
        self._gate = threading.Lock()
        self._gate.acquire()
        self._done = False
        self._result: Any = None
        self._error: BaseException | None = None

    @property
    def name(self) -> str:
        """The operation and the tensor's name, for people."""
        return str(self._key)

    def done(self) -> bool:
        """Tell whether the operation has ended, well or not; never blocks."""
        return self._done

    def wait(self, timeout_s: float | None = None) -> Any:
        """Block until the operation ends and return its result.

        Raises: the operation's error (a HorovodInternalError); WaitTimeoutError after ``timeout_s`` seconds,
        with the operation still in flight.
        """
        if not self._done:
            if not self._gate.acquire(timeout=-1 if timeout_s is None else max(0.0, timeout_s)):
                raise WaitTimeoutError(
                    f"{self.name}: not finished after {timeout_s:g} s: "
                    "some rank has not submitted it yet; wait again or look at the stall report")
            self._gate.release()
        if self._error is not None:
            # A fresh traceback each time: waiting twice must not grow the first one.
            raise self._error.with_traceback(None)
        return self._result

    def complete(self, result: Any) -> None:
        """Hand the result over. Background thread only, once."""
        self._result = result
        self._done = True
        self._gate.release()

    def fail(self, error: BaseException) -> None:
        """Hand an error over. Background thread only, once."""
        self._error = error
        self._done = True
        self._gate.release()
