"""Guard: the starter's child and the rank's parent; starts the rank as hvdrun says, and reports how it ended.

Run by path, as ``python -I -S guard.py DIRECTORY``: no site, no user setting can change or slow it.

*Guarantees*: the rank gets the starter's descriptors (MPICH's ``PMI_FD`` among them). The guard keeps its own
copies and stays until hvdrun lets it go, because Hydra kills the whole job at once when it sees a rank's
descriptor close, before anyone could tell the cause. The rank is ended when hvdrun closes the socket (also by
``kill -9``), and killed by the kernel when the guard is killed. The guard itself is told by the kernel when its
starter ends.
*Threads*: one; signals arrive as bytes on a pipe.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from typing import Any

if not __package__:  # run by path: the standard library stays first, so nothing beside hvdlite can shadow it
    sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from hvdlite import notes
from hvdlite.launch.channel import Channel, connect, pack, remove, unpack
from hvdlite.launch.environment import rank_environment
from hvdlite.launch.process import die_with_parent, signal_group

#: Where starters write a child's rank, the most specific first.
RANK_NAMES = ("PMIX_RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK")
#: Signals that a starter or a person may send to the guard and that are meant for the rank.
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
#: Forwarded signals after which a rank's end is not its own failure.
_ENDING = frozenset((signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGKILL))
#: From SIGTERM to SIGKILL when hvdrun is gone. Chosen: short, nobody is left to wait for the rank.
_ORPHAN_GRACE_S = 1.0


class Guard:
    """One rank's guard. The states are: waiting for the job, rank running, rank ended."""

    def __init__(self, directory: str, channel: Channel, wakeup_fd: int) -> None:
        self._directory = directory
        self._channel = channel
        self._wakeup_fd = wakeup_fd
        self._process: subprocess.Popen[bytes] | None = None
        self._sent: set[int] = set()  # ending signals the rank got from or through this guard
        self._hvdrun_gone = False
        self._kill_at_s = float("inf")
        self._notes_fd = -1  # where the rank may say whose fault its end is

    def run(self) -> None:
        """Serve until hvdrun says leave, or until hvdrun is gone and the rank has ended."""
        poller = select.poll()
        poller.register(self._channel.fileno(), select.POLLIN)
        poller.register(self._wakeup_fd, select.POLLIN)
        while True:
            for descriptor, _ in poller.poll(self._timeout_ms()):
                if descriptor == self._wakeup_fd:
                    self._take_signals(os.read(descriptor, 512))
                    continue
                messages = self._channel.receive()
                if messages is None:
                    poller.unregister(descriptor)
                    self._end_orphan()
                for message in messages or ():
                    if message["kind"] == "leave":
                        return
                    self._obey(message)
            if time.monotonic() >= self._kill_at_s:
                self._signal_rank(signal.SIGKILL)
            if self._hvdrun_gone and self._process is None:
                return

    def _obey(self, message: dict[str, Any]) -> None:
        if message["kind"] == "job":
            self._start(message)
        elif message["kind"] == "signal":
            self._signal_rank(message["number"])

    def _start(self, job: dict[str, Any]) -> None:
        environment = {unpack(name): unpack(value) for name, value in job["environment"]}
        guard_pid = os.getpid()
        self._notes_fd, write_fd = os.pipe()
        os.set_blocking(self._notes_fd, False)
        os.set_inheritable(write_fd, True)
        environment[notes.VARIABLE.encode()] = str(write_fd).encode()
        try:
            self._process = subprocess.Popen(
                [unpack(word) for word in job["argv"]],
                env=rank_environment(environment, os.environb),
                cwd=unpack(job["directory"]),
                stdin=subprocess.DEVNULL,
                close_fds=False,  # hand the starter's descriptors on; Python's own are never inherited
                start_new_session=True,  # a group of its own, so that what the rank starts ends with it
                preexec_fn=lambda: die_with_parent(signal.SIGKILL, guard_pid))
        except OSError as reason:
            wanted = os.fsencode(reason.filename) if reason.filename is not None else b""
            self._report(kind="not_started", errno=reason.errno, text=reason.strerror, what=pack(wanted))
            return
        finally:
            os.close(write_fd)
        self._report(kind="started", pid=self._process.pid)

    def _take_signals(self, numbers: bytes) -> None:
        for number in set(numbers):
            if number == signal.SIGCHLD:
                self._reap()
            else:
                self._signal_rank(number)

    def _reap(self) -> None:
        process = self._process
        if process is None:
            return
        end = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if end is None:
            return
        ended_ns = time.monotonic_ns()
        if end.si_status != 0 or self._sent:
            # Before reaping: until then no other process can have this group's number.
            signal_group(process.pid, signal.SIGKILL)
        self._process = None
        is_victim = notes.VICTIM in self._notes()
        self._report(kind="ended", returncode=process.wait(), ended_ns=ended_ns, sent=sorted(self._sent), is_victim=is_victim)

    def _notes(self) -> bytes:
        try:
            return os.read(self._notes_fd, 4096)
        except BlockingIOError:
            return b""  # the rank left a process behind that holds the pipe

    def _signal_rank(self, number: int) -> None:
        if number in _ENDING:
            self._sent.add(number)
        if self._process is not None:
            signal_group(self._process.pid, number)

    def _end_orphan(self) -> None:
        self._hvdrun_gone = True
        self._kill_at_s = time.monotonic() + _ORPHAN_GRACE_S
        self._signal_rank(signal.SIGTERM)
        remove(self._directory)

    def _report(self, **message: Any) -> None:
        if self._hvdrun_gone:
            return
        try:
            self._channel.send(message)
        except OSError:
            pass  # hvdrun is gone: the poll says so next

    def _timeout_ms(self) -> float | None:
        if self._process is None or self._kill_at_s == float("inf"):
            return None
        return max(0.0, self._kill_at_s - time.monotonic()) * 1000 + 1


def main() -> int:
    """Connect to hvdrun and serve one rank; the exit code says nothing about the rank."""
    wakeup_fd = _catch_signals()
    die_with_parent(signal.SIGTERM, os.getppid())
    directory = sys.argv[1]
    try:
        channel, token = connect(directory)
    except OSError:
        return 1  # hvdrun ended meanwhile
    rank = next((os.environ[name] for name in RANK_NAMES if name in os.environ), "")
    channel.send({"kind": "hello", "token": token, "rank": rank, "pid": os.getpid()})
    Guard(directory, channel, wakeup_fd).run()
    return 0


def _catch_signals() -> int:
    read_fd, write_fd = os.pipe()
    os.set_blocking(write_fd, False)
    signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, *_FORWARDED):
        signal.signal(number, lambda *_: None)
    return read_fd


if __name__ == "__main__":
    sys.exit(main())
