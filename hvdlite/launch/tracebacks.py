"""StderrTail: the last traceback on a rank's standard error, held back until it is known whose fault it is.

A traceback of a rank that ends is told in the closing box, once and last; one that the program survived appears a little
later than it was written, and is forgotten once the program has gone on. Pure but for the times that it is given.
"""

from __future__ import annotations

import re
from collections import deque

#: How long a traceback is held back. Chosen: longer than a failing rank takes to tell its peers, which is 2 s.
HOLD_S = 3.0
#: Lines held back, and kept of either end of a traceback: of an endless recursion the middle says nothing. Chosen.
_MAX_HELD = 2000
_KEPT = 200
_STARTS = (b"Traceback (most recent call last)", b"  + Exception Group Traceback", b"Fatal Python error:")
#: What Python writes of a script that it cannot read; within a traceback such a line is a frame.
_UNREADABLE = re.compile(rb'  File ".*", line \d+\r?\n?$')
_LINKS = (b"During handling of the above exception", b"The above exception was the direct cause")
_GROUP_ERROR = re.compile(r"  \| ([A-Za-z_][\w.]*(?::.*)?)$")
_NEVER_S = float("inf")


class StderrTail:
    """One rank's."""

    def __init__(self) -> None:
        self._head: list[bytes] = []
        self._end: deque[bytes] = deque(maxlen=_KEPT)
        self._num_left_out = 0
        self._started_s = -_NEVER_S
        self._linked = False  # whether the last lines say that the next traceback belongs to this one
        self._held: list[bytes] = []
        self._held_from = 0  # where the traceback begins in what is held
        self.release_at_s = _NEVER_S

    def take(self, line: bytes, now_s: float) -> list[bytes]:
        """Take a line; return those to show now."""
        is_start = line.startswith(_STARTS) or (not self._head and _UNREADABLE.match(line) is not None)
        if is_start:
            self._begin(now_s)
        elif self._head and now_s - self._started_s > HOLD_S:
            self._head.clear()  # the program has gone on
        if self._head or is_start:
            self._keep(line)
        if not self._held and not is_start:
            return [line]
        if not self._held:
            self.release_at_s = now_s + HOLD_S
        self._held.append(line)
        return self.release() if len(self._held) >= _MAX_HELD else []

    def _begin(self, now_s: float) -> None:
        if not (self._head and self._linked):
            self._head.clear()
            self._end.clear()
            self._num_left_out = 0
            self._held_from = len(self._held)
        self._started_s, self._linked = now_s, False

    def _keep(self, line: bytes) -> None:
        self._linked = self._linked or line.startswith(_LINKS)
        if len(self._head) < _KEPT:
            self._head.append(line)
            return
        self._num_left_out += len(self._end) == _KEPT
        self._end.append(line)

    def release(self) -> list[bytes]:
        """All that is held."""
        held, self._held, self.release_at_s = self._held, [], _NEVER_S
        return held

    def release_before_traceback(self) -> list[bytes]:
        """What is held and is no part of the last traceback; that one is dropped here, and :meth:`traceback` has it."""
        held = self.release()
        return held[: self._held_from] if self._head else held

    def traceback(self) -> list[str]:
        """The last traceback, with the exceptions that led to it; empty where there is none."""
        if not self._head:
            return []
        left_out = [b"  ... %d lines ...\n" % self._num_left_out] if self._num_left_out else []
        return [line.decode("utf-8", "backslashreplace").rstrip("\r\n") for line in (*self._head, *left_out, *self._end)]

    def error(self) -> str:
        """The exception in one line, such as ``ValueError: boom``; empty where there is no traceback."""
        return error_line(self.traceback())


def error_line(trace: list[str]) -> str:
    """The first line after the last frame; of a group of exceptions the group's own."""
    if trace and trace[0].startswith("Fatal Python error:"):
        return trace[0]
    starts = [index for index, line in enumerate(trace) if line.startswith(("Traceback", "  + Exception Group Traceback"))]
    if starts and trace[starts[-1]].startswith("  + "):
        return next((match[1] for line in trace[starts[-1]:] if (match := _GROUP_ERROR.match(line))), "")
    for index in range(len(trace) - 1, -1, -1):
        if trace[index].startswith(("  ", "Traceback")):
            rest = [line for line in trace[index + 1:] if line.strip()]
            return rest[0] if rest else ""
    return ""
