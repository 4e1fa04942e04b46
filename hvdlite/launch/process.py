"""Promises of the kernel about processes: ends with its parent, signals for a whole group."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess

_PR_SET_PDEATHSIG = 1  # Source: linux/prctl.h
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


def signal_name(number: int) -> str:
    """``SIGKILL`` for 9; ``signal 99`` where there is no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class GroupWatch:
    """Kills a process group should this process die without saying otherwise, as it may by SIGKILL.

    The kernel kills a child with its parent, but not what the child has started. So a shell, the smallest program at hand,
    waits at a pipe whose other end only this process holds. It has nothing of ours open besides, and a session of its own,
    so that no starter takes it for one of its processes. Raises: OSError where there is no /bin/sh.
    """

    def __init__(self, group: int) -> None:
        read_fd, self._write_fd = os.pipe()
        try:
            self._shell = subprocess.Popen(
                ["/bin/sh", "-c", "read -r said || kill -s KILL -- -$1", "hvdrun-watch", str(group)], env={}, cwd="/",
                stdin=read_fd, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
        except OSError:
            os.close(self._write_fd)
            raise
        finally:
            os.close(read_fd)

    def end(self) -> None:
        """Let the group be."""
        try:
            os.write(self._write_fd, b"\n")
        except OSError:
            pass  # somebody killed the shell
        os.close(self._write_fd)
        self._shell.wait()
