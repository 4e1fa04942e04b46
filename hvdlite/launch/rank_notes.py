"""RankNotes: the guard's end of the notes of its rank; see :mod:`hvdlite.notes` for the rank's."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from typing import Any

from hvdlite import notes
from hvdlite.launch.channel import pack
from hvdlite.launch.process import catches

#: How long a rank may take to tell its stacks, and how long silence means that they are complete. Chosen.
_STACKS_S = 1.0
_QUIET_S = 0.1
#: How long a rank that listens may take to begin, before a signal asks: native code may hold the interpreter's lock. Chosen.
_LISTENER_S = 0.5
_MAX_STACKS_BYTES = 1 << 20
_NEVER_S = float("inf")


class RankNotes:
    """What the rank says besides its output, and what is said to it. *Threads*: the guard's only."""

    def __init__(self, report: Callable[..., None]) -> None:
        self._report = report
        self._socket, self._rank_socket = socket.socketpair()
        self._socket.setblocking(False)
        self._stacks_fd, self._rank_stacks_fd = os.pipe()
        os.set_blocking(self._stacks_fd, False)
        self._open = {self._socket.fileno(), self._stacks_fd}
        self._unread = b""
        self._stacks, self._waits_for = b"", {}  # type: bytes, dict[str, Any]
        self.listens = self._has_answered = False
        self._asked_until_s = self._quiet_at_s = self._signal_at_s = _NEVER_S
        self.python_pid = 0
        self.rank_pid = 0
        self.is_victim = False

    def rank_ends(self) -> list[int]:
        """The rank's descriptors, inheritable; the caller closes them once the rank has them."""
        ends = [self._rank_socket.detach(), self._rank_stacks_fd]
        for descriptor in ends:
            os.set_inheritable(descriptor, True)
        return ends

    def descriptors(self) -> set[int]:
        """What to wait for."""
        return self._open

    def read(self, descriptor: int) -> bool:
        """Take what the rank wrote; tell whether there was something."""
        try:
            data = os.read(descriptor, 1 << 16)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            # The last process of the rank that could write has ended; a poll would report that for ever.
            self._open = self._open - {descriptor}
            return False
        if descriptor == self._stacks_fd:
            self._stacks = (self._stacks + data)[:_MAX_STACKS_BYTES]
            self._quiet_at_s, self._signal_at_s = time.monotonic() + _QUIET_S, _NEVER_S
            return True
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            self._hear(line)
        return True

    def drain(self) -> None:
        """Take all that an ended rank has said."""
        while self._socket.fileno() in self._open and self.read(self._socket.fileno()):
            pass

    def _hear(self, line: bytes) -> None:
        try:
            note = json.loads(line)
            kind = note["kind"]
        except (ValueError, KeyError, TypeError):
            return  # whatever a rank writes, it harms only itself
        if kind == "python":
            self.python_pid = note["pid"]
        elif kind == notes.LISTENS:
            self.listens = True
        elif kind == notes.VICTIM:
            self.is_victim = True
        elif kind == "waits":
            self._waits_for, self._has_answered = note, True
            self._report(kind="waits", completed=note.get("completed"), pending=note.get("pending"))

    def pass_on(self, message: dict[str, Any]) -> None:
        """Say something to the rank; of ``stacks`` the answer goes to hvdrun."""
        if message["kind"] == "stacks":
            self._ask()
        try:
            self._socket.send(json.dumps(message).encode("ascii") + b"\n")
        except OSError:
            pass  # nobody there listens, or not fast enough

    def _ask(self) -> None:
        self._stacks, self._waits_for, self._has_answered = b"", {}, False
        now_s = time.monotonic()
        # No Python, or none that started: there is nothing to wait for.
        self._asked_until_s = now_s + _STACKS_S if self.python_pid else now_s
        if self.listens:
            self._signal_at_s, self._asked_until_s = now_s + _LISTENER_S, now_s + _LISTENER_S + _STACKS_S
        else:
            self._signal()

    def _signal(self) -> None:
        """Have faulthandler write the stacks. Frames that run meanwhile may change under it, so only a rank that has no
        thread to answer, or whose interpreter is held, is asked in this way."""
        self._signal_at_s = _NEVER_S
        if not self.python_pid:
            return
        if not catches(self.python_pid, notes.STACKS_SIGNAL):
            self._asked_until_s = time.monotonic()  # it has become another program, which would end by it
            return
        try:
            os.kill(self.python_pid, notes.STACKS_SIGNAL)
        except OSError:
            self._asked_until_s = time.monotonic()

    def deadline_s(self) -> float:
        """When :meth:`act_on_time` has something to do."""
        return min(self._asked_until_s, self._quiet_at_s, self._signal_at_s)

    def act_on_time(self, now_s: float) -> None:
        """Report the stacks once they are complete, or late."""
        if now_s >= self._signal_at_s:
            self._signal()
        if self._asked_until_s == _NEVER_S:
            self._quiet_at_s = _NEVER_S  # what came late
        elif now_s >= self._asked_until_s or (now_s >= self._quiet_at_s and (self._has_answered or not self.listens)):
            self._asked_until_s = self._quiet_at_s = self._signal_at_s = _NEVER_S
            self._report(kind="stacks", text=pack(self._stacks), waits=self._waits_for, state=process_state(self.rank_pid))
        elif now_s >= self._quiet_at_s:
            self._quiet_at_s = _NEVER_S
            self._asked_until_s = min(self._asked_until_s, now_s + 3 * _QUIET_S)


def process_state(pid: int) -> str:
    """What the kernel says a process does, in words."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            letter = file.read().rsplit(b")", 1)[1].split()[0].decode()
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
            name = file.read().strip()
    except (OSError, IndexError):
        return "ended"
    words = {"R": "running", "S": "sleeping", "D": "waiting for a device or file system", "T": "stopped", "Z": "ended"}
    return f"{name} ({words.get(letter, letter)})"
