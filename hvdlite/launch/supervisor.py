"""Supervisor: runs one job: starts the starter, serves the guards, and ends all ranks when one fails.

*Guarantees*: :func:`run_job` returns, whatever the ranks do: a rank that ignores every request is killed, a
starter that ignores them too. When it returns no rank lives. Every wait has a deadline or ends with a process.
*Threads*: one. Signals arrive as bytes on a pipe, so a signal never interrupts half an action.
"""

from __future__ import annotations

import hmac
import os
import selectors
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from hvdlite.launch.channel import Channel, listen, pack, remove, unpack
from hvdlite.launch.command import StartCommand
from hvdlite.launch.outcome import Outcome, RankEnd
from hvdlite.launch.process import die_with_parent, signal_group

#: How long the starter may take until every guard has called. Chosen: seconds are usual on a busy machine.
START_TIMEOUT_S = 120.0
#: How long the starter may take to end once its children have. Chosen; measured 0.01 s.
STARTER_END_TIMEOUT_S = 5.0
#: How long to wait for reports after SIGKILL, which only a rank stuck inside the kernel outlives. Chosen.
ABANDON_AFTER_S = 5.0

#: Signals to hvdrun that end the job, and those that only pass.
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_PASSING = (signal.SIGUSR1, signal.SIGUSR2)
_FOREVER_S = float("inf")


@dataclass(frozen=True)
class Job:
    """What the ranks run, as bytes, and how patiently they are ended.

    *Units*: ``unwind_s`` from the first failure to SIGTERM; ``grace_s`` from there to SIGKILL.
    """

    num_ranks: int
    argv: tuple[bytes, ...]
    environment: dict[bytes, bytes]
    directory: bytes
    unwind_s: float = 1.0
    grace_s: float = 5.0


@dataclass
class _Rank:
    """A rank whose guard has called; ``pid`` is 0 before it runs and after it ended."""

    channel: Channel
    pid: int = 0


@contextmanager
def private_directory() -> Iterator[str]:
    """A directory open to this user only, for the socket; removed at the end, by the guards if need be."""
    directory = tempfile.mkdtemp(prefix="hvdrun-")  # mode 0700
    try:
        yield directory
    finally:
        remove(directory)


def run_job(job: Job, command: StartCommand, directory: str) -> Outcome:
    """Run the job to its end. ``directory`` is the one that ``command`` names to the guards."""
    token = os.urandom(16).hex()
    with listen(directory, token, backlog=job.num_ranks) as listener, _signals_on_pipe() as wakeup_fd:
        return Supervisor(job, token, listener, wakeup_fd).run(command)


class Supervisor:
    """The state of one running job."""

    def __init__(self, job: Job, token: str, listener: socket.socket, wakeup_fd: int) -> None:
        self._job = job
        self._token = token
        self._listener = listener
        self._wakeup_fd = wakeup_fd
        self._outcome = Outcome(started_ns=time.monotonic_ns())
        self._ranks: dict[int, _Rank] = {}
        self._start_deadline_s = time.monotonic() + START_TIMEOUT_S
        self._term_at_s = self._kill_at_s = self._abandon_at_s = _FOREVER_S
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._selector.register(wakeup_fd, selectors.EVENT_READ, self._take_signals)

    def run(self, command: StartCommand) -> Outcome:
        """Start, watch until every rank has ended, and let the starter end."""
        try:
            self._starter = _start(command, self._job)
        except OSError as reason:
            self._fail(f"starter: {command.argv[0]} cannot be run: {reason.strerror}", 2)
            return self._outcome
        while not self._is_over():
            for key, _ in self._selector.select(self._timeout_s()):
                key.data(key.fileobj)
            self._act_on_time()
        self._let_go()
        return self._outcome

    def _is_over(self) -> bool:
        if time.monotonic() >= self._abandon_at_s:
            return True
        if len(self._outcome.ends) == self._job.num_ranks:
            return True
        # Without a starter no further guard will call; those that did still report.
        return self._outcome.starter_returncode is not None and self._ranks.keys() <= self._outcome.ends.keys()

    # -- events ------------------------------------------------------------------------------------------------

    def _accept(self, listener: socket.socket) -> None:
        connection, _ = listener.accept()
        channel = Channel(connection)
        self._selector.register(connection, selectors.EVENT_READ, lambda _: self._greet(channel))

    def _greet(self, channel: Channel) -> None:
        """Take a new guard's first message; whoever cannot show the token, or is no rank of ours, is hung up on."""
        hellos = _receive(channel)
        if hellos == []:
            return  # not complete yet
        hello = hellos[0] if hellos else {}
        rank = _checked_rank(hello, self._token, self._job.num_ranks)
        if rank is None or rank in self._ranks:
            self._hang_up(channel)
            if hello.get("kind") == "hello":
                self._fail(
                    f"starter: it started a guard as rank {hello.get('rank')!r} of {self._job.num_ranks}: "
                    "it does not belong to mpi4py's MPI, or tells ranks in a way hvdrun does not know", 2)
            return
        self._ranks[rank] = _Rank(channel)
        self._selector.modify(channel.fileno(), selectors.EVENT_READ, lambda _: self._hear(rank))
        self._send(rank, {
            "kind": "job",
            "argv": [pack(word) for word in self._job.argv],
            "environment": [(pack(name), pack(value)) for name, value in self._job.environment.items()],
            "directory": pack(self._job.directory)})

    def _hear(self, rank: int) -> None:
        messages = _receive(self._ranks[rank].channel)
        if messages is None:
            self._lose(rank)
        for message in messages or ():
            if message["kind"] == "started":
                self._ranks[rank].pid = message["pid"]
            elif message["kind"] == "not_started":
                self._end(RankEnd(rank, 0, None, time.monotonic_ns()))
                self._fail(*_not_started(message, self._job))
            elif message["kind"] == "ended":
                pid = self._ranks[rank].pid
                self._ranks[rank].pid = 0
                self._end(RankEnd(rank, pid, message["returncode"], message["ended_ns"], tuple(message["sent"]),
                                  message["is_victim"]))

    def _lose(self, rank: int) -> None:
        """A guard is gone: the kernel has killed its rank; what that rank had started is killed here."""
        self._hang_up(self._ranks[rank].channel)
        pid = self._ranks[rank].pid
        if pid:
            signal_group(pid, signal.SIGKILL)
        if rank not in self._outcome.ends:
            self._end(RankEnd(rank, pid, None, time.monotonic_ns()))

    def _end(self, end: RankEnd) -> None:
        self._outcome.ends[end.rank] = end
        if end.failed and self._term_at_s == self._kill_at_s == _FOREVER_S:
            self._term_at_s = time.monotonic() + self._job.unwind_s

    def _take_signals(self, wakeup_fd: int) -> None:
        for number in os.read(wakeup_fd, 512):
            if number == signal.SIGCHLD:
                self._reap_starter()
            elif number in _PASSING:
                self._signal_ranks(number)
            else:
                self._interrupt(number)

    def _interrupt(self, number: int) -> None:
        """A person wants the job to end: the first time as the signal says, the second time at once."""
        if self._outcome.interrupted_by:
            self._kill_at_s = time.monotonic()
            return
        if self._outcome.cause is None:
            self._outcome.interrupted_by = number
        self._begin_ending(number)

    def _reap_starter(self) -> None:
        if self._starter.poll() is None or self._outcome.starter_returncode is not None:
            return
        self._outcome.starter_returncode = self._starter.returncode
        if len(self._ranks) < self._job.num_ranks:
            self._fail(
                f"starter: {self._starter.args[0]!r} ended with code {self._starter.returncode} before it had "  # type: ignore[index]
                f"started every rank ({len(self._ranks)} of {self._job.num_ranks}): see what it wrote above",
                self._starter.returncode or 1)
        elif self._kill_at_s == _FOREVER_S:
            self._begin_ending(signal.SIGTERM)

    # -- actions -----------------------------------------------------------------------------------------------

    def _fail(self, error: str, code: int) -> None:
        """Something that is no rank's failure ends the job; the first such error is told."""
        if not self._outcome.error:
            self._outcome.error, self._outcome.error_code = error, code if code > 0 else 128 - code
        if self._kill_at_s == _FOREVER_S:
            self._begin_ending(signal.SIGTERM)

    def _begin_ending(self, number: int) -> None:
        self._term_at_s = _FOREVER_S
        self._kill_at_s = min(self._kill_at_s, time.monotonic() + self._job.grace_s)
        self._signal_ranks(number)

    def _act_on_time(self) -> None:
        now_s = time.monotonic()
        if now_s >= self._start_deadline_s and len(self._ranks) < self._job.num_ranks and not self._outcome.error:
            self._fail(
                f"starter: it started {len(self._ranks)} of {self._job.num_ranks} ranks in {START_TIMEOUT_S:g} s: "
                "run hvdrun --verbose and try the command it prints", 1)
            self._kill_at_s = now_s
        if now_s >= self._term_at_s:
            self._begin_ending(signal.SIGTERM)
        if now_s >= self._kill_at_s and self._abandon_at_s == _FOREVER_S:
            self._abandon_at_s = now_s + ABANDON_AFTER_S
            self._signal_ranks(signal.SIGKILL)
            if len(self._ranks) < self._job.num_ranks:
                signal_group(self._starter.pid, signal.SIGKILL)  # it would go on to start the missing ones

    def _timeout_s(self) -> float | None:
        deadlines = [self._term_at_s, self._abandon_at_s]
        if self._abandon_at_s == _FOREVER_S:
            deadlines.append(self._kill_at_s)
        if len(self._ranks) < self._job.num_ranks and not self._outcome.error:
            deadlines.append(self._start_deadline_s)
        first_s = min(deadlines)
        return None if first_s == _FOREVER_S else max(0.0, first_s - time.monotonic())

    def _signal_ranks(self, number: int) -> None:
        for rank in self._ranks.keys() - self._outcome.ends.keys():
            self._send(rank, {"kind": "signal", "number": int(number)})

    def _send(self, rank: int, message: dict[str, Any]) -> None:
        try:
            self._ranks[rank].channel.send(message)
        except OSError:
            pass  # the guard is gone: its end of the socket says so next

    def _hang_up(self, channel: Channel) -> None:
        self._selector.unregister(channel.fileno())
        channel.close()

    def _let_go(self) -> None:
        """Let the guards leave, and wait for the starter, which ends when its children have."""
        for rank in self._ranks:
            self._send(rank, {"kind": "leave"})
        for number in (0, signal.SIGTERM, signal.SIGKILL):
            if number:
                signal_group(self._starter.pid, number)
            try:
                self._outcome.starter_returncode = self._starter.wait(STARTER_END_TIMEOUT_S)
                return
            except subprocess.TimeoutExpired:
                continue


def _start(command: StartCommand, job: Job) -> subprocess.Popen[bytes]:
    environment = {os.fsencode(name): os.fsencode(value) for name, value in command.environment.items()}
    hvdrun_pid = os.getpid()
    return subprocess.Popen(
        command.argv,
        env=environment | job.environment,
        stdin=subprocess.DEVNULL,  # a starter reads it for rank 0, and so eats the input of a surrounding shell loop
        start_new_session=True,  # a terminal's Ctrl-C reaches hvdrun only, which passes it on in order
        preexec_fn=lambda: die_with_parent(signal.SIGTERM, hvdrun_pid))


def _receive(channel: Channel) -> list[dict[str, Any]] | None:
    try:
        return channel.receive()
    except ValueError:
        return None  # whoever talks nonsense is treated like one who hung up


def _checked_rank(hello: dict[str, Any], token: str, num_ranks: int) -> int | None:
    if not hmac.compare_digest(str(hello.get("token", "")).encode(), token.encode()):
        hello.clear()  # a stranger: not worth an error
        return None
    text = str(hello.get("rank", ""))
    return int(text) if text.isdecimal() and int(text) < num_ranks else None


def _not_started(message: dict[str, Any], job: Job) -> tuple[str, int]:
    """Word the error, and choose the code, that a shell gives when it cannot run a command."""
    program, what = os.fsdecode(job.argv[0]), unpack(message["what"])
    if what == job.directory and what != job.argv[0]:
        return f"directory {os.fsdecode(what)!r} cannot be entered: {message['text']}: start hvdrun elsewhere", 126
    if isinstance(message["errno"], int) and message["errno"] in _NOT_FOUND:
        return f"command {program!r} not found: no such program on the PATH: check its spelling or give its path", 127
    return f"command {program!r} cannot be run: {message['text']}: is it an executable file, with a #! line?", 126


_NOT_FOUND = frozenset((2, 20))  # ENOENT, ENOTDIR


@contextmanager
def _signals_on_pipe() -> Iterator[int]:
    """Signals of this process as bytes on a pipe; a signal that was ignored (nohup) stays so."""
    read_fd, write_fd = os.pipe()
    os.set_blocking(write_fd, False)
    old_fd = signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
    numbers = [n for n in (signal.SIGCHLD, *_ENDING, *_PASSING) if n == signal.SIGCHLD or signal.getsignal(n) != signal.SIG_IGN]
    old = {number: signal.signal(number, _note) for number in numbers}
    try:
        yield read_fd
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(old_fd)
        os.close(read_fd)
        os.close(write_fd)


def _note(number: int, frame: FrameType | None) -> None:
    """Do nothing: that a handler exists makes Python write the number to the pipe."""
