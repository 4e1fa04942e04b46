"""StderrTail: the last lines of a rank's standard error, with a traceback held back until it is known whose fault it is.

A traceback of a rank that ends is told in the closing box, once and last; one that the program survived appears a little
later than it was written. Pure but for the times that it is given.
"""

from __future__ import annotations

from collections import deque

#: How long a traceback is held back. Chosen: longer than a failing rank takes to tell its peers, which is 2 s.
HOLD_S = 3.0
_MAX_HELD = 2000
_STARTS = (b"Traceback (most recent call last)", b"  + Exception Group Traceback", b"Fatal Python error:")
_LINKS = (b"During handling of the above exception", b"The above exception was the direct cause")
_NEVER_S = float("inf")


class StderrTail:
    """One rank's."""

    def __init__(self) -> None:
        self._lines: deque[bytes] = deque(maxlen=_MAX_HELD)
        self._held: list[bytes] = []
        self.release_at_s = _NEVER_S

    def take(self, line: bytes, now_s: float) -> list[bytes]:
        """Take a line; return those to show now."""
        self._lines.append(line)
        if not self._held and not line.startswith(_STARTS):
            return [line]
        if not self._held:
            self.release_at_s = now_s + HOLD_S
        self._held.append(line)
        return self.release() if len(self._held) >= _MAX_HELD else []

    def release(self) -> list[bytes]:
        """All that is held."""
        held, self._held, self.release_at_s = self._held, [], _NEVER_S
        return held

    def release_before_traceback(self) -> list[bytes]:
        """What is held and is no part of the last traceback; that one is dropped here, and :meth:`traceback` has it."""
        held = self.release()
        start = _start(held)
        return held if start is None else held[:start]

    def traceback(self) -> list[str]:
        """The last traceback, with the exceptions that led to it; empty where there is none."""
        lines = list(self._lines)
        start = _start(lines)
        if start is None:
            return []
        return [line.decode("utf-8", "backslashreplace").rstrip("\r\n") for line in lines[start:]]

    def error(self) -> str:
        """The exception in one line, such as ``ValueError: boom``; empty where there is no traceback."""
        return error_line(self.traceback())

    def last_lines(self, count: int) -> list[str]:
        """The last lines, for ranks that wrote no traceback."""
        return [line.decode("utf-8", "backslashreplace").rstrip("\r\n") for line in list(self._lines)[-count:]]


def error_line(trace: list[str]) -> str:
    """The first line after the last frame."""
    if trace and trace[0].startswith("Fatal Python error:"):
        return trace[0]
    for index in range(len(trace) - 1, -1, -1):
        if trace[index].startswith(("  ", "Traceback")):
            rest = [line for line in trace[index + 1:] if line.strip()]
            return rest[0] if rest else ""
    return ""


def _start(lines: list[bytes]) -> int | None:
    """Where the last traceback begins; those it names as its cause belong to it."""
    starts = [index for index, line in enumerate(lines) if line.startswith(_STARTS)]
    if not starts:
        return None
    start = starts[-1]
    for earlier in reversed(starts[:-1]):
        if any(line.startswith(_LINKS) for line in lines[earlier:start]):
            start = earlier
        else:
            break
    return start
