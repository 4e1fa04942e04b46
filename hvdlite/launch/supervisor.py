"""Supervisor: runs one job: starts the starter, serves the guards, and ends all ranks when one fails.

*Guarantees*: :func:`run_job` returns, whatever the ranks do: a rank that ignores every request is killed, a
starter that ignores them too. When it returns no rank lives. Every wait has a deadline or ends with a process.
*Threads*: one. Signals arrive as bytes on a pipe, so a signal never interrupts half an action.
"""

from __future__ import annotations

import dataclasses
import os
import select
import signal
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hvdlite.errors import format_ranks
from hvdlite.launch.binding import num_threads, parse_cpus, share
from hvdlite.launch.channel import Channel, listen, pack, proof, receive, remove, unpack
from hvdlite.launch.command import StartCommand
from hvdlite.launch.guard import BEAT_S, SILENCE_S
from hvdlite.launch.hang import HangWatch, RankState, describe_hang
from hvdlite.launch.job import Job
from hvdlite.launch.outcome import Outcome, RankEnd, describe_code
from hvdlite.launch.output import Output
from hvdlite.launch.process import signal_group
from hvdlite.launch.reception import Reception
from hvdlite.launch.remote import read_note
from hvdlite.launch.starting import ENDING, PASSING, not_started, signals_on_pipe, start
from hvdlite.launch.sweep import own

#: How long the starter may take to end once its children have. Chosen; measured 0.01 s.
STARTER_END_TIMEOUT_S = 5.0
#: How long to wait for reports after SIGKILL, which only a rank stuck inside the kernel outlives. Chosen.
ABANDON_AFTER_S = 5.0
#: Output that nobody has read yet, beyond which ranks wait with theirs. Chosen.
MAX_BACKLOG_BYTES = 1 << 20
#: How long all ranks may take to tell their stacks. Chosen: a second more than a guard waits.
STACKS_TIMEOUT_S = 3.0
#: Waking up so much later than asked means to have been suspended. Chosen.
SUSPENDED_S = 1.0
#: What hvdrun exits with when the ranks cannot be started in time.
EXIT_NOT_STARTED = 3

_FOREVER_S = float("inf")
#: How often to look whether a remote shell has failed, while hosts are awaited. Chosen.
LOOK_INTERVAL_S = 0.2


@dataclasses.dataclass
class _Rank:
    """A rank whose guard has called; ``pid`` is 0 before it runs and after it ended."""

    channel: Channel
    host: str
    clock_offset_ns: int  # what its host's CLOCK_MONOTONIC is behind this one's
    heard_s: float
    pid: int = 0
    owed_bytes: int = 0
    input_bytes: int = 0  # sent to it and not taken yet


@contextmanager
def private_directory() -> Iterator[str]:
    """A directory open to this user only, for the socket; removed at the end, by the guards if need be."""
    directory = tempfile.mkdtemp(prefix="hvdrun-")  # mode 0700
    try:
        own(directory)
        yield directory
    finally:
        remove(directory)


def run_job(job: Job, command: StartCommand, directory: str, *, token: str = "", tcp: socket.socket | None = None,
            environ: dict[str, str] | None = None) -> Outcome:
    """Run the job to its end. ``directory`` is the one that ``command`` names to the guards; ``tcp``: where those of other
    hosts call."""
    token = token or os.urandom(16).hex()
    output = Output(job.output, job.num_ranks, job.host, job.local_rank, environ)
    with listen(directory, token, backlog=min(job.num_ranks + 8, 4096)) as listener, signals_on_pipe() as wakeup_fd:
        listeners = [listener, *([tcp] if tcp else [])]
        supervisor = Supervisor(job, token, listeners, wakeup_fd, output, directory)
        try:
            return supervisor.run(command)
        finally:
            output.close()


class Supervisor:
    """The state of one running job."""

    def __init__(self, job: Job, token: str, listeners: list[socket.socket], wakeup_fd: int, output: Output,
                 directory: str = "") -> None:
        self._job = job
        self._token = token
        self._reception = Reception(listeners, token, output.say)
        self._wakeup_fd = wakeup_fd
        self._output = output
        self._directory = directory
        self._starter_fd = -1
        self._outcome = Outcome(started_ns=time.monotonic_ns())
        self._ranks: dict[int, _Rank] = {}
        self._rank_of: dict[int, int] = {}  # descriptor of a guard's connection -> rank
        self._start_deadline_s = time.monotonic() + job.start_timeout_s
        self._term_at_s = self._kill_at_s = self._abandon_at_s = _FOREVER_S
        self._countdown_at_s = _FOREVER_S
        self._next_look_s = 0.0
        self._next_beat_s = time.monotonic() + BEAT_S if job.is_remote else _FOREVER_S
        self._has_told_peers = False
        self._stdin_open = job.stdin_rank != -1
        self._states: dict[int, RankState] = {}
        self._stacks_by_s = _FOREVER_S
        self._ends_with_stacks = ""
        self._hang = HangWatch(job.hang_timeout_s, job.start_timeout_s, job.num_ranks)
        self._poll = select.poll()
        self._polled: dict[int, int] = {}

    def run(self, command: StartCommand) -> Outcome:
        """Start, watch until every rank has ended, and let the starter end."""
        try:
            self._starter = start(command)
        except OSError as reason:
            self._fail(f"starter: {command.argv[0]} cannot be run: {reason.strerror}", 2)
            return self._outcome
        assert self._starter.stdout is not None
        self._starter_fd = self._starter.stdout.fileno()
        while not self._is_over():
            self._turn(self._timeout_s())
        self._let_go()
        self._close_output()
        return self._outcome

    def _turn(self, timeout_s: float | None) -> None:
        self._set_interests()
        asked_s = time.monotonic()
        arrived = self._poll.poll(None if timeout_s is None else timeout_s * 1000 + 1)
        if timeout_s is not None and (late_s := time.monotonic() - asked_s - timeout_s) > SUSPENDED_S:
            self._hang.shift(late_s)  # hvdrun was stopped, or the whole machine: that is no silence of the ranks
        for descriptor, events in arrived:
            self._serve(descriptor, events)
        self._output.act_on_time()
        self._pay()
        self._act_on_time()

    def _is_over(self) -> bool:
        if time.monotonic() >= self._abandon_at_s:
            return True
        if len(self._outcome.ends) == self._job.num_ranks:
            return True
        # Without a starter no further guard will call; those that did still report.
        return self._outcome.starter_returncode is not None and self._ranks.keys() <= self._outcome.ends.keys()

    # -- what to wait for --------------------------------------------------------------------------------------

    def _set_interests(self) -> None:
        wanted = {self._wakeup_fd: select.POLLIN, **self._reception.descriptors()}
        if self._starter_fd >= 0:
            wanted[self._starter_fd] = select.POLLIN
        for descriptor in self._rank_of:
            wanted[descriptor] = self._ranks[self._rank_of[descriptor]].channel.events()
        if self._stdin_open and self._takes_input():
            wanted[0] = select.POLLIN
        for sink in self._output.sinks.values():
            if sink.pending:
                wanted[sink.descriptor] = select.POLLOUT
        for descriptor in self._polled.keys() - wanted.keys():
            self._poll.unregister(descriptor)
        for descriptor, events in wanted.items():
            if self._polled.get(descriptor) != events:
                self._poll.register(descriptor, events)
        self._polled = wanted

    def _takes_input(self) -> bool:
        targets = self._input_ranks()
        return bool(targets) and all(self._ranks[rank].input_bytes < MAX_BACKLOG_BYTES for rank in targets)

    def _input_ranks(self) -> list[int]:
        """Who reads hvdrun's standard input now; nobody before all that will have started."""
        wanted = range(self._job.num_ranks) if self._job.stdin_rank == -2 else [self._job.stdin_rank]
        if any(rank not in self._ranks for rank in wanted):
            return []
        return [rank for rank in wanted if rank not in self._outcome.ends]

    def _serve(self, descriptor: int, events: int) -> None:
        if descriptor in self._reception.descriptors():
            if guard := self._reception.serve(descriptor):
                self._welcome(*guard)
        elif descriptor == self._starter_fd:
            self._hear_starter()
        elif descriptor == self._wakeup_fd:
            self._take_signals(descriptor)
        elif descriptor in self._rank_of:
            self._hear(self._rank_of[descriptor])
        elif events & select.POLLOUT or descriptor != 0:
            for sink in self._output.sinks.values():
                if sink.descriptor == descriptor:
                    sink.flush()
        else:
            self._feed()

    # -- events ------------------------------------------------------------------------------------------------

    def _welcome(self, channel: Channel, hello: dict[str, Any]) -> None:
        """Give a guard that has shown the token its rank's job."""
        text = str(hello.get("rank", ""))
        rank = int(text) if text.isdecimal() and int(text) < self._job.num_ranks else None
        if rank is None or rank in self._ranks:
            channel.close()
            self._fail(
                f"starter: it started a guard as rank {hello.get('rank')!r} of {self._job.num_ranks}: "
                "it does not belong to mpi4py's MPI, or tells ranks in a way hvdrun does not know", 2)
            return
        channel.trusted = True
        host = self._job.host(rank) or (str(hello.get("host")) if self._job.is_remote else "")
        offset_ns = time.monotonic_ns() - hello["now_ns"] if self._job.is_remote and isinstance(hello.get("now_ns"), int) else 0
        self._ranks[rank] = _Rank(channel, host, offset_ns, time.monotonic())
        self._rank_of[channel.fileno()] = rank
        local_rank, local_size = self._job.local_rank(rank), self._job.local_size(rank)
        cpus = parse_cpus(hello.get("cpus"))
        environment = dict(self._job.environment)
        if self._job.sets_threads and cpus:
            environment[b"OMP_NUM_THREADS"] = str(num_threads(len(cpus), local_size)).encode()
        self._send(rank, {
            "kind": "job", "rank": rank,
            "proof": proof(self._token, "hvdrun", str(hello.get("nonce"))),
            "argv": [pack(word) for word in self._job.argv],
            "environment": [(pack(name), pack(value)) for name, value in environment.items()],
            "directory": pack(self._job.directory),
            "cpus": share(cpus, local_size, local_rank) if self._job.binds else (),
            "gpus": self._job.gpus, "finds_gpus": self._job.finds_gpus, "local_rank": local_rank,
            "stdin": self._job.stdin_rank in (rank, -2)})
        if number := self._ending_signal():
            self._send(rank, {"kind": "signal", "number": int(number)})  # it came late

    def _ending_signal(self) -> int:
        """What the ranks have been told already."""
        if self._abandon_at_s != _FOREVER_S:
            return signal.SIGKILL
        return signal.SIGTERM if self._kill_at_s != _FOREVER_S else 0

    def _hear(self, rank: int) -> None:
        channel = self._ranks[rank].channel
        messages = receive(channel)
        if messages is None:
            self._lose(rank)
        for message in messages or ():
            self._ranks[rank].heard_s = time.monotonic()
            try:
                self._take(rank, message)
            except (KeyError, TypeError, ValueError) as reason:
                self._output.say(f"hvdrun: warning: rank {rank}: its guard sent a message that makes no sense: {reason!r}")

    def _take(self, rank: int, message: dict[str, Any]) -> None:
        one, kind = self._ranks[rank], message["kind"]
        if kind == "data":
            self._output.take(rank, message["stream"], message["data"])
            one.owed_bytes += len(message["data"])
            self._hang.note_progress(rank, time.monotonic())
        elif kind == "started":
            one.pid = int(message["pid"])
            self._hang.note_start(time.monotonic())
        elif kind == "not_started":
            self._end(RankEnd(rank, 0, None, time.monotonic_ns(), host=one.host))
            self._fail(*not_started(message, self._job))
        elif kind == "ended":
            pid, one.pid = one.pid, 0
            self._output.end_rank(rank)
            tail = self._output.tails[rank]
            code = message["returncode"]
            self._end(RankEnd(
                rank, pid, code, int(message["ended_ns"]) + one.clock_offset_ns, tuple(message["sent"]),
                message["is_victim"], one.host, tail.error() if code else "", tuple(tail.traceback()) if code else (),
                message["max_rss_bytes"], message["oom_killed"]))
        elif kind == "stacks":
            self._states[rank] = RankState(
                rank, unpack(message["text"]).decode("utf-8", "replace"), message["waits"], message["state"])
        elif kind == "took":
            one.input_bytes -= int(message["bytes"])
        elif kind == "waits":
            self._hang.note_state(rank, message, time.monotonic())

    def _lose(self, rank: int) -> None:
        """A guard is gone: the kernel has killed its rank; what that rank had started is killed here."""
        one = self._ranks[rank]
        self._rank_of.pop(one.channel.fileno(), None)
        one.channel.close()
        pid, one.pid = one.pid, 0
        if pid and not self._job.is_remote:
            signal_group(pid, signal.SIGKILL)
        if rank not in self._outcome.ends:
            self._output.end_rank(rank)
            self._end(RankEnd(rank, pid, None, time.monotonic_ns(), host=one.host))

    def _end(self, end: RankEnd) -> None:
        self._outcome.ends[end.rank] = end
        self._hang.note_end(end.rank, time.monotonic())
        if not end.failed:
            return
        if self._term_at_s == self._kill_at_s == _FOREVER_S:
            self._term_at_s = time.monotonic() + self._job.unwind_s
        if not self._has_told_peers and not end.is_victim:
            # Handles in flight fail with it now, wherever the rank is; what waits for nothing of the kind is ended soon.
            self._has_told_peers = True
            how = describe_code(end.returncode) if end.returncode is not None else "lost with its guard"
            text = f"rank {end.rank} failed: {end.error or how}"
            for rank in self._ranks.keys() - self._outcome.ends.keys():
                self._send(rank, {"kind": "failed", "text": text})

    def _take_signals(self, wakeup_fd: int) -> None:
        for number in os.read(wakeup_fd, 512):
            if number == signal.SIGCHLD:
                self._reap_starter()
            elif number in PASSING:
                self._signal_ranks(number)
            elif number == signal.SIGQUIT:
                self._ask_for_stacks("")
            else:
                self._interrupt(number)

    def _interrupt(self, number: int) -> None:
        """A person wants the job to end: the first time as the signal says, the second time at once."""
        if self._outcome.is_unwanted:
            self._kill_at_s = time.monotonic()
            return
        self._outcome.is_unwanted = True
        if self._outcome.cause is None:
            self._outcome.interrupted_by = number
        self._begin_ending(number)
        left_s = self._kill_at_s - time.monotonic()
        if number == signal.SIGINT and len(self._outcome.ends) < self._job.num_ranks:
            self._output.say(
                f"hvdrun: SIGINT was passed on; the ranks have {left_s:g} s to end (Ctrl-C again ends them now)".replace(
                    f"{left_s:g}", f"{left_s:.0f}"))
            self._countdown_at_s = time.monotonic() + 1

    def _hear_starter(self, is_told: bool = True) -> None:
        """Pass on what the starter says itself."""
        while self._starter_fd >= 0:
            try:
                data = os.read(self._starter_fd, 1 << 16)
            except BlockingIOError:
                return
            if not data:
                self._starter_fd = -1  # its last process has closed it; the Popen closes this end
            elif is_told:
                self._output.say_bytes(data)

    def _reap_starter(self) -> None:
        if self._starter.poll() is None or self._outcome.starter_returncode is not None:
            return
        self._outcome.starter_returncode = self._starter.returncode
        if len(self._ranks) < self._job.num_ranks:
            self._fail(
                f"starter: {self._starter.args[0]!r} ended with code {self._starter.returncode} before it had "  # type: ignore[index]
                f"started every rank ({len(self._ranks)} of {self._job.num_ranks}){self._not_heard_of()}: "
                "see what it wrote above",
                self._starter.returncode or 1)
        elif self._kill_at_s == _FOREVER_S:
            self._begin_ending(signal.SIGTERM)

    def _not_heard_of(self) -> str:
        """The hosts whose guards have not called."""
        hosts = dict.fromkeys(self._job.host(rank) for rank in range(self._job.num_ranks) if rank not in self._ranks)
        return f"; nothing was heard from {', '.join(hosts)}" if self._job.is_remote else ""

    def _feed(self) -> None:
        try:
            data = os.read(0, 1 << 16)
        except OSError:
            data = b""
        self._stdin_open = bool(data)
        for rank in self._input_ranks():
            try:
                self._ranks[rank].channel.send_data(0, data)
                self._ranks[rank].input_bytes += len(data)
            except OSError:
                pass  # the guard is gone: its end of the socket says so next

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
        self._check_start(now_s)
        if self._job.is_remote:
            self._check_beats(now_s)
        self._reception.act_on_time(now_s)
        self._check_hang(now_s)
        if now_s >= self._countdown_at_s:
            self._count_down(now_s)
        if now_s >= self._term_at_s:
            self._begin_ending(signal.SIGTERM)
        if now_s >= self._kill_at_s and self._abandon_at_s == _FOREVER_S:
            self._abandon_at_s = now_s + ABANDON_AFTER_S
            self._signal_ranks(signal.SIGKILL)
            if len(self._ranks) < self._job.num_ranks:
                signal_group(self._starter.pid, signal.SIGKILL)  # it would go on to start the missing ones

    def _count_down(self, now_s: float) -> None:
        self._countdown_at_s = now_s + 1
        left_s = self._kill_at_s - now_s
        if left_s < 0.5 or self._abandon_at_s != _FOREVER_S:
            self._countdown_at_s = _FOREVER_S
        elif self._output.sinks[2].is_terminal:
            self._output.say(f"hvdrun: {left_s:.0f} s")

    def _check_start(self, now_s: float) -> None:
        if len(self._ranks) == self._job.num_ranks or self._outcome.error:
            return
        hosts = dict.fromkeys(self._job.host(rank) for rank in range(self._job.num_ranks) if rank not in self._ranks)
        if self._job.is_remote and now_s >= self._next_look_s:
            self._next_look_s = now_s + LOOK_INTERVAL_S
            for host in hosts:
                if why := read_note(self._directory, "failed", host):
                    self._fail(f"{host}: {why}: try ssh {host} true, or hvdrun doctor -H {host}", EXIT_NOT_STARTED)
                    self._kill_at_s = now_s
                    return
        if now_s < self._start_deadline_s:
            return
        if self._job.is_remote:
            waits = "; ".join(f"waiting for {host}: {read_note(self._directory, 'stage', host) or 'its turn'}" for host in hosts)
            error = (f"{waits}: gave up after {self._job.start_timeout_s:g} s (--start-timeout): "
                     f"try ssh {next(iter(hosts))} true, or hvdrun doctor -H {','.join(hosts)}")
        else:
            error = (f"starter: it started {len(self._ranks)} of {self._job.num_ranks} ranks in {self._job.start_timeout_s:g} s: "
                     "run hvdrun --verbose and try the command it prints")
        self._fail(error, EXIT_NOT_STARTED if self._job.is_remote else 1)
        self._kill_at_s = now_s

    def _check_beats(self, now_s: float) -> None:
        if now_s >= self._next_beat_s:
            self._next_beat_s = now_s + BEAT_S
            for rank in self._rank_of.values():
                self._send(rank, {"kind": "beat"})
        lost = [rank for rank in self._rank_of.values() if now_s - self._ranks[rank].heard_s > SILENCE_S
                and rank not in self._outcome.ends]
        if lost:
            hosts = dict.fromkeys(self._ranks[rank].host for rank in lost)
            for rank in lost:
                self._lose(rank)
            self._fail(f"lost host {', '.join(hosts)} (no heartbeat for {SILENCE_S:g} s; {format_ranks(lost)}): its ranks end "
                       "themselves; look at the host and its network", 1)

    def _check_hang(self, now_s: float) -> None:
        if self._stacks_by_s != _FOREVER_S:
            alive = self._rank_of.values() - self._outcome.ends.keys()
            if now_s >= self._stacks_by_s or alive <= self._states.keys():
                self._tell_stacks()
            return
        if not self._hang.timeout_s or len(self._ranks) < self._job.num_ranks or self._kill_at_s != _FOREVER_S:
            return
        if self._hang.asks(now_s):
            for rank in self._ranks.keys() - self._outcome.ends.keys():
                self._send(rank, {"kind": "progress"})
        if why := self._hang.verdict(now_s):
            self._ask_for_stacks(why)

    def _ask_for_stacks(self, ends_with: str) -> None:
        """Ask all ranks where they are; the job goes on unless ``ends_with`` says why it hangs."""
        if self._stacks_by_s == _FOREVER_S:
            self._stacks_by_s = time.monotonic() + STACKS_TIMEOUT_S
            self._states.clear()
            for rank in self._ranks.keys() - self._outcome.ends.keys():
                self._send(rank, {"kind": "stacks"})
        self._ends_with_stacks = self._ends_with_stacks or ends_with

    def _tell_stacks(self) -> None:
        self._stacks_by_s = _FOREVER_S
        ended = {rank: "lost" if end.returncode is None else describe_code(end.returncode)
                 for rank, end in self._outcome.ends.items()}
        text = describe_hang(self._states, ended, self._job.num_ranks)
        if self._ends_with_stacks:
            self._outcome.hung, self._outcome.report = self._ends_with_stacks, text
            self._begin_ending(signal.SIGTERM)
        else:
            self._output.say(text)

    def _timeout_s(self) -> float | None:
        deadlines = [self._term_at_s, self._abandon_at_s, self._output.deadline_s(), self._next_beat_s, self._stacks_by_s,
                     self._countdown_at_s]
        if self._kill_at_s == _FOREVER_S and len(self._ranks) == self._job.num_ranks:
            deadlines.append(self._hang.next_s())
        if self._abandon_at_s == _FOREVER_S:
            deadlines.append(self._kill_at_s)
        if len(self._ranks) < self._job.num_ranks and not self._outcome.error:
            deadlines.append(min(self._start_deadline_s, self._next_look_s) if self._job.is_remote else self._start_deadline_s)
        deadlines.append(self._reception.deadline_s())
        first_s = min(deadlines)
        return None if first_s == _FOREVER_S else max(0.0, first_s - time.monotonic())

    def _pay(self) -> None:
        """Let ranks write on, once what they wrote is read."""
        if self._output.backlog_bytes > MAX_BACKLOG_BYTES:
            return
        for rank, one in self._ranks.items():
            if one.owed_bytes:
                owed, one.owed_bytes = one.owed_bytes, 0
                self._send(rank, {"kind": "ack", "bytes": owed})

    def _signal_ranks(self, number: int) -> None:
        for rank in self._ranks.keys() - self._outcome.ends.keys():
            self._send(rank, {"kind": "signal", "number": int(number)})

    def _send(self, rank: int, message: dict[str, Any]) -> None:
        try:
            self._ranks[rank].channel.send(message)
        except OSError:
            pass  # the guard is gone: its end of the socket says so next

    def _let_go(self) -> None:
        """Let the guards leave, and wait for the starter, which ends when its children have."""
        for rank in self._rank_of.values():
            self._send(rank, {"kind": "leave"})
            self._ranks[rank].channel.drain(1.0)
        for number in (0, signal.SIGTERM, signal.SIGKILL):
            if number:
                signal_group(self._starter.pid, number)
            if self._await_starter(time.monotonic() + STARTER_END_TIMEOUT_S):
                break
        assert self._starter.stdout is not None
        self._starter.stdout.close()

    def _await_starter(self, deadline_s: float) -> bool:
        """Wait for its end. What it then says of ranks that ended otherwise than it likes, the box says better."""
        is_told = self._outcome.cause is None
        while (code := self._starter.poll()) is None and time.monotonic() < deadline_s:
            self._hear_starter(is_told)
            time.sleep(0.002)
        self._hear_starter(is_told)
        self._outcome.starter_returncode = code
        return code is not None

    def _close_output(self) -> None:
        self._output.emit_rest(self._outcome.told_otherwise)

        def interrupted(seconds: float) -> bool:
            """Wait; a person who asks a second time for the end need not read the rest."""
            if not select.select([self._wakeup_fd], [], [], seconds)[0]:
                return False
            numbers = [number for number in os.read(self._wakeup_fd, 512) if number in ENDING]
            again = bool(numbers) and self._outcome.is_unwanted
            if numbers and not self._outcome.interrupted_by and not self._outcome.error and self._outcome.cause is None:
                self._outcome.interrupted_by = numbers[0]
            self._outcome.is_unwanted |= bool(numbers)
            return again

        self._output.finish(interrupted)
        if select.select([self._wakeup_fd], [], [], 0)[0]:  # what came while nothing had to be written
            self._outcome.is_unwanted |= any(number in ENDING for number in os.read(self._wakeup_fd, 512))
