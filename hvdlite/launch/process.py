"""Promises of the kernel about processes: ends with its parent, signals for a whole group."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Collection
from typing import NamedTuple

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # Source: linux/prctl.h
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(number: int, parent_pid: int) -> None:
    """Let the kernel send signal ``number`` to this process when its parent ends, however that happens.

    The kernel means the *thread* that forked, so parents fork from their main thread. The setting survives
    ``exec`` (of programs that are not setuid). If ``parent_pid`` is no longer the parent, the signal is raised now.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), number)


def signal_group(group: int, number: int) -> None:
    """Send a signal to every process of a group; one that has ended is no error."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):  # the latter: what remains changed its user; not ours to end
        pass


def adopt_orphans() -> None:
    """Become the parent of all descendants whose own parents end, so that they can be found; they are to be reaped."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


class Process(NamedTuple):
    """A process as the kernel lists it."""

    pid: int
    state: str
    parent: int
    group: int
    session: int


def processes() -> list[Process]:
    """All processes that can be seen; some may have ended meanwhile."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                state, parent, group, session = file.read().rsplit(b")", 1)[1].split()[:4]
        except (OSError, IndexError, ValueError):
            continue
        found.append(Process(int(name), state.decode(), int(parent), int(group), int(session)))
    return found


def signal_session(session: int, number: int) -> None:
    """Send a signal to every group of a session: shells, and programs as ``timeout``, give what they start groups of its own."""
    for group in {session, *(one.group for one in processes() if one.session == session)}:
        signal_group(group, number)


def kill_descendants(spare: Collection[int] = ()) -> None:
    """Kill what this process has started or adopted, and what that has, but ``spare``, until none is left."""
    for _ in range(20):
        children: dict[int, list[int]] = {}
        for one in processes():
            if one.state != "Z":
                children.setdefault(one.parent, []).append(one.pid)
        waiting = [pid for pid in children.get(os.getpid(), ()) if pid not in spare]
        if not waiting:
            return
        while waiting:
            pid = waiting.pop()
            waiting += children.get(pid, ())
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass  # the latter: it changed its user; not ours to end
        time.sleep(0.005)


def reap_adopted(spare: Collection[int] = ()) -> None:
    """Take the ends of children that nobody else waits for."""
    own = os.getpid()
    for one in processes():
        if one.parent == own and one.state == "Z" and one.pid not in spare:
            try:
                os.waitpid(one.pid, os.WNOHANG)
            except ChildProcessError:
                pass


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal; without one it may end by it."""
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
            caught = next(line for line in file if line.startswith("SigCgt:"))
    except (OSError, StopIteration):
        return False
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


def signal_name(number: int) -> str:
    """``SIGKILL`` for 9; ``signal 99`` where there is no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


#: Kill the group of a session's leader, then whatever else is in that session: the fourth word after the name in parentheses.
_WATCH = """read -r said && exit
kill -s KILL -- "-$1"
for file in /proc/[0-9]*/stat; do
    read -r line 2>/dev/null <"$file" || continue
    set -- "$1" ${line##*) }
    [ "$5" = "$1" ] && pid=${file#/proc/} && kill -s KILL "${pid%/stat}"
done"""


class SessionWatch:
    """Kills a session should this process die without saying otherwise, as it may by SIGKILL.

    The kernel kills a child with its parent, but not what the child has started. So a shell, the smallest program at hand,
    waits at a pipe whose other end only this process holds. It has nothing of ours open besides, and a session of its own,
    so that no starter takes it for one of its processes. Raises: OSError where there is no /bin/sh.
    """

    def __init__(self, session: int) -> None:
        read_fd, self._write_fd = os.pipe()
        try:
            self._shell = subprocess.Popen(
                ["/bin/sh", "-c", _WATCH, "hvdrun-watch", str(session)], env={}, cwd="/",
                stdin=read_fd, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
        except OSError:
            os.close(self._write_fd)
            raise
        finally:
            os.close(read_fd)

    @property
    def pid(self) -> int:
        """Of the shell."""
        return self._shell.pid

    def end(self) -> None:
        """Let the session be."""
        try:
            os.write(self._write_fd, b"\n")
        except OSError:
            pass  # somebody killed the shell
        os.close(self._write_fd)
        self._shell.wait()
