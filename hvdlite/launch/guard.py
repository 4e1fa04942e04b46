"""Guard: the starter's child and the rank's parent; starts the rank as hvdrun says, carries its output, reports its end.

Run by path, as ``python -I -S guard.py DIRECTORY`` (or ``-`` where hvdrun is on another host and its address is in the
environment): no site, no user setting can change or slow it.

*Guarantees*: the rank gets the starter's descriptors (MPICH's ``PMI_FD`` among them). The guard keeps its own
copies and stays until hvdrun lets it go, because Hydra kills the whole job at once when it sees a rank's
descriptor close, before anyone could tell the cause. The rank is ended when hvdrun closes the connection (also by
``kill -9``) or, over TCP, is silent for ``SILENCE_S``, and killed by the kernel when the guard is killed. The guard
itself is told by the kernel when its starter ends. Output waits in the rank's pipe while hvdrun takes none.
*Threads*: one; signals arrive as bytes on a pipe.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

if not __package__:  # run by path: the standard library stays first, so nothing beside hvdlite can shadow it
    sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from hvdlite import notes
from hvdlite.launch.binding import find_gpus, format_cpus, gpu_of
from hvdlite.launch.channel import Channel, connect, connect_tcp, is_proof, pack, proof, remove, unpack
from hvdlite.launch.environment import CONTACT, rank_environment
from hvdlite.launch.oom import num_oom_kills
from hvdlite.launch.process import (
    SessionWatch,
    adopt_orphans,
    die_with_parent,
    kill_descendants,
    reap_adopted,
    signal_group,
    signal_session,
)
from hvdlite.launch.rank_notes import RankNotes
from hvdlite.launch.sweep import claim_path, mapped_segments, release_claim, update_claim

#: Where starters write a child's rank, the most specific first.
RANK_NAMES = ("PMIX_RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK")
#: Signals that a starter or a person may send to the guard and that are meant for the rank.
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
#: Forwarded signals after which a rank's end is not its own failure.
_ENDING = frozenset((signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGKILL))
#: From SIGTERM to SIGKILL when hvdrun is gone. Chosen: short, nobody is left to wait for the rank.
_ORPHAN_GRACE_S = 1.0
#: Over TCP: how often each end says that it lives, and how long a silent one is believed in. Sourced: the issue's 10 s.
BEAT_S = 2.0
SILENCE_S = 10.0
#: Output under way that hvdrun has not taken yet. Chosen: several screens, and little memory for many ranks.
WINDOW_BYTES = 1 << 18
_NEVER_S = float("inf")
#: When the shared memory that the rank maps is looked at: first, and then at distances that grow. Chosen: what a program maps
#: is known within a quarter of the time it took to come to it; a look at a large process takes milliseconds. A rank that calls
#: ``init()`` is looked at then, and all are before they are ended.
_FIRST_CLAIM_S, _CLAIM_GROWTH, _LAST_CLAIM_S = 0.3, 1.25, 60.0


class Guard:
    """One rank's guard. The states are: waiting for the job, rank running, rank ended."""

    def __init__(self, directory: str, channel: Channel, wakeup_fd: int, hello: Callable[[str], dict[str, Any]],
                 is_trusted: Callable[[dict[str, Any]], bool]) -> None:
        self._directory = directory
        self._channel = channel
        self._wakeup_fd = wakeup_fd
        self._hello, self._is_trusted = hello, is_trusted
        self._process: subprocess.Popen[bytes] | None = None
        self._pid = 0  # of the rank, also after it ended
        self._sent: set[int] = set()  # ending signals the rank got from or through this guard
        self._hvdrun_gone = False
        self._leaving = False
        self._kill_at_s = _NEVER_S
        self._beats = directory == "-"
        self._heard_s = time.monotonic()
        self._next_beat_s = _NEVER_S
        self._outputs: dict[int, int] = {}  # descriptor -> stream
        self._stdin_fd, self._stdin, self._stdin_ended = -1, bytearray(), False
        self._under_way = 0
        self._notes: RankNotes | None = None
        self._session_watch: SessionWatch | None = None
        self._oom_kills = 0
        self._claim, self._segments = "", set[str]()
        self._claims_at_s, self._claim_pause_s = _NEVER_S, _FIRST_CLAIM_S
        self._poller = select.poll()

    def run(self) -> None:
        """Serve until hvdrun says leave, or until hvdrun is gone and the rank has ended."""
        self._poller.register(self._wakeup_fd, select.POLLIN)
        while not self._leaving:
            self._watch()
            for descriptor, _ in self._poller.poll(self._timeout_ms()):
                self._serve(descriptor)
            self._act_on_time()
            if self._hvdrun_gone and self._process is None:
                return
        self._channel.drain(1.0)

    def _watch(self) -> None:
        """Say what to wait for now."""
        if not self._hvdrun_gone:
            events = select.POLLIN | (select.POLLOUT if self._channel.unsent else 0)
            self._poller.register(self._channel.fileno(), events)
        for descriptor in self._outputs:
            # A pipe that is full is not read, so the rank waits in its write.
            if self._under_way < WINDOW_BYTES or self._hvdrun_gone:
                self._poller.register(descriptor, select.POLLIN)
            else:
                self._forget(descriptor)
        if self._stdin_fd >= 0:
            if self._stdin:
                self._poller.register(self._stdin_fd, select.POLLOUT)
            else:
                self._forget(self._stdin_fd)
        if self._notes is not None:
            for descriptor in self._notes.descriptors():
                self._poller.register(descriptor, select.POLLIN)

    def _serve(self, descriptor: int) -> None:
        if descriptor == self._wakeup_fd:
            self._take_signals(os.read(descriptor, 512))
        elif descriptor in self._outputs:
            self._pass_output(descriptor)
        elif descriptor == self._stdin_fd:
            self._feed()
        elif self._notes is not None and descriptor in self._notes.descriptors():
            listened = self._notes.listens
            self._notes.read(descriptor)
            if self._notes.listens and not listened:
                self._claim_segments()  # it has initialised MPI just now
        elif descriptor == self._channel.fileno() and not self._hvdrun_gone:
            self._converse()
        else:
            self._forget(descriptor)

    def _converse(self) -> None:
        try:
            self._channel.flush()
            messages = self._channel.receive()
        except (OSError, ValueError):
            messages = None
        if messages is None:
            self._end_orphan()
        for message in messages or ():
            self._heard_s = time.monotonic()
            self._obey(message)

    def _obey(self, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind == "challenge":
            self._channel.send(self._hello(message["nonce"]))
        elif kind == "job":
            if not self._is_trusted(message):
                self._end_orphan()
                return
            self._start(message)
        elif kind == "signal":
            self._signal_rank(message["number"])
        elif kind == "ack":
            self._under_way -= message["bytes"]
        elif kind == "data":
            self._stdin += message["data"]
            self._stdin_ended |= not message["data"]
            self._feed()
        elif kind == "leave":
            self._leaving = True
        elif kind in ("failed", "stacks", "progress") and self._notes is not None and self._process is not None:
            self._notes.pass_on(message)

    def _start(self, job: dict[str, Any]) -> None:
        environment = {unpack(name): unpack(value) for name, value in job["environment"]}
        guard_pid, cpus = os.getpid(), job["cpus"]
        if gpu := gpu_of(job["gpus"] or (find_gpus(os.environb | environment) if job["finds_gpus"] else []), job["local_rank"]):
            environment[b"CUDA_VISIBLE_DEVICES"] = gpu.encode()
        if self._beats:
            self._next_beat_s = 0.0
        rank_ends: list[int] = []
        input_fd = os.open(os.devnull, os.O_RDONLY)
        rank_ends.append(input_fd)
        if job["stdin"]:
            os.close(rank_ends.pop())
            input_fd, self._stdin_fd = os.pipe()
            rank_ends.append(input_fd)
            os.set_blocking(self._stdin_fd, False)
        written = []
        for stream in (1, 2):
            read_fd, write_fd = os.pipe()
            os.set_blocking(read_fd, False)
            self._outputs[read_fd] = stream
            written.append(write_fd)
        self._notes = RankNotes(self._report)
        handed_on = self._notes.rank_ends()
        environment[notes.VARIABLE.encode()] = ",".join(map(str, handed_on)).encode()
        rank_ends += [*written, *handed_on]
        self._oom_kills = num_oom_kills()

        def prepare() -> None:
            if cpus:
                try:
                    os.sched_setaffinity(0, cpus)
                except OSError:
                    pass  # the allowed set shrank meanwhile: unbound is better than not at all
            die_with_parent(signal.SIGKILL, guard_pid)

        try:
            self._process = subprocess.Popen(
                [unpack(word) for word in job["argv"]],
                env=rank_environment(environment, os.environb),
                cwd=unpack(job["directory"]),
                stdin=input_fd, stdout=written[0], stderr=written[1],
                close_fds=False,  # hand the starter's descriptors on; Python's own are never inherited
                start_new_session=True,  # a group of its own, so that what the rank starts ends with it
                preexec_fn=prepare)
        except OSError as reason:
            wanted = os.fsencode(reason.filename) if reason.filename is not None else b""
            self._report(kind="not_started", errno=reason.errno, text=reason.strerror, what=pack(wanted))
            return
        except ValueError as reason:  # a null byte, which no operating system takes
            self._report(kind="not_started", errno=errno.EINVAL, text=str(reason), what="")
            return
        finally:
            for descriptor in rank_ends:
                os.close(descriptor)
        self._pid = self._process.pid
        try:
            self._session_watch = SessionWatch(self._pid)
        except OSError:
            pass  # a host without a shell: should this guard be killed, its rank ends, but not what that has started
        self._notes.rank_pid = self._pid
        self._claim = claim_path(environment.get(b"HVDLITE_JOB", b"").decode("ascii", "replace"), job["rank"])
        self._claims_at_s = time.monotonic() + _FIRST_CLAIM_S
        self._report(kind="started", pid=self._pid)

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
        watch_pid = self._session_watch.pid if self._session_watch is not None else 0
        end = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if end is None:
            reap_adopted((process.pid, watch_pid))
            return
        ended_ns = time.monotonic_ns()
        if end.si_status != 0 or self._sent:
            # Before reaping: until then no other process can have this group's number.
            signal_group(process.pid, signal.SIGKILL)
            kill_descendants((watch_pid,))  # also what has made itself a group or session of its own
        self._process = None
        if self._session_watch is not None:
            self._session_watch.end()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        self._drain_outputs()
        is_victim = False
        if self._notes is not None:
            self._notes.drain()
            is_victim = self._notes.is_victim
        self._report(
            kind="ended", returncode=process.returncode, ended_ns=ended_ns, sent=sorted(self._sent), is_victim=is_victim,
            max_rss_bytes=usage.ru_maxrss * 1024, oom_killed=num_oom_kills() > self._oom_kills)

    def _pass_output(self, descriptor: int) -> bool:
        """Carry on what a rank wrote; tell whether there was something."""
        try:
            data = os.read(descriptor, 1 << 16)
        except BlockingIOError:
            return False
        if not data:
            self._forget(descriptor)
            del self._outputs[descriptor]
            os.close(descriptor)
            return False
        if not self._hvdrun_gone:
            self._under_way += len(data)
            try:
                self._channel.send_data(1 if self._is_first(descriptor) else 2, data)
            except OSError:
                pass  # hvdrun is gone: the poll says so next
        return True

    def _is_first(self, descriptor: int) -> bool:
        return self._outputs[descriptor] == 1

    def _drain_outputs(self) -> None:
        """Carry on all that an ended rank has written; what it left behind may go on writing, which is not waited for."""
        for descriptor in list(self._outputs):
            while descriptor in self._outputs and self._pass_output(descriptor):
                pass

    def _feed(self) -> None:
        """Write to the rank's standard input what it takes, and tell hvdrun, which sends little more than that."""
        waiting = len(self._stdin)
        try:
            while self._stdin_fd >= 0 and self._stdin:
                del self._stdin[:os.write(self._stdin_fd, memoryview(self._stdin)[:1 << 16])]
        except BlockingIOError:
            self._report(kind="took", bytes=waiting - len(self._stdin))
            return
        except OSError:
            self._stdin_ended = True  # the rank reads no more
        self._stdin.clear()
        if waiting:
            self._report(kind="took", bytes=waiting)
        if self._stdin_fd < 0:
            return
        if self._stdin_ended:
            self._forget(self._stdin_fd)
            os.close(self._stdin_fd)
            self._stdin_fd = -1

    def _claim_segments(self) -> None:
        """Note the MPI's shared memory, the rank's or that of its Python, so that it is removed should the job die."""
        seen = mapped_segments(self._pid)
        if self._notes is not None and self._notes.python_pid not in (0, self._pid):
            seen |= mapped_segments(self._notes.python_pid)
        if not seen <= self._segments:
            self._segments |= seen
            update_claim(self._claim, self._segments)

    def release(self) -> None:
        """Remove what the rank's MPI has not removed itself."""
        if self._segments:
            release_claim(self._claim)

    def _forget(self, descriptor: int) -> None:
        try:
            self._poller.unregister(descriptor)
        except KeyError:
            pass

    def _signal_rank(self, number: int) -> None:
        if number in _ENDING:
            self._sent.add(number)
            if self._process is not None:
                self._claim_segments()  # nobody can tell afterwards
        if self._process is not None:
            (signal_session if number in _ENDING else signal_group)(self._process.pid, number)

    def _end_orphan(self) -> None:
        if self._hvdrun_gone:
            return
        self._hvdrun_gone = True
        self._forget(self._channel.fileno())
        self._kill_at_s = time.monotonic() + _ORPHAN_GRACE_S
        self._signal_rank(signal.SIGTERM)
        if not self._beats:
            remove(self._directory)

    def _report(self, **message: Any) -> None:
        if self._hvdrun_gone:
            return
        try:
            self._channel.send(message)
        except OSError:
            pass  # hvdrun is gone: the poll says so next

    def _act_on_time(self) -> None:
        now_s = time.monotonic()
        if now_s >= self._claims_at_s and self._process is not None:
            self._claim_segments()
            self._claims_at_s = now_s + self._claim_pause_s
            self._claim_pause_s = min(_LAST_CLAIM_S, _CLAIM_GROWTH * self._claim_pause_s)
        if now_s >= self._kill_at_s:
            self._signal_rank(signal.SIGKILL)
        if self._notes is not None:
            self._notes.act_on_time(now_s)
        if self._hvdrun_gone or not self._beats:
            return
        if now_s >= self._next_beat_s:
            self._next_beat_s = now_s + BEAT_S
            self._report(kind="beat")
        if now_s - self._heard_s > SILENCE_S:
            self._end_orphan()

    def _timeout_ms(self) -> float | None:
        deadlines = [self._notes.deadline_s() if self._notes is not None else _NEVER_S]
        if self._process is not None:
            deadlines += [self._kill_at_s, self._claims_at_s]
        if self._beats and not self._hvdrun_gone:
            deadlines += [self._next_beat_s, self._heard_s + SILENCE_S + 0.1]
        first_s = min(deadlines)
        return None if first_s == _NEVER_S else max(0.0, first_s - time.monotonic()) * 1000 + 1


def main() -> int:
    """Connect to hvdrun and serve one rank; the exit code says nothing about the rank."""
    wakeup_fd = _catch_signals()
    die_with_parent(signal.SIGTERM, os.getppid())
    adopt_orphans()
    directory = sys.argv[1]
    try:
        if directory == "-":
            token, _, addresses = os.environ.pop(CONTACT).partition("@")
            channel = connect_tcp(addresses.split(","))
        else:
            channel, token = connect(directory)
    except FileNotFoundError:
        return 1  # hvdrun ended meanwhile
    except KeyError:
        print(f"hvdrun: guard on {socket.gethostname()}: the starter did not hand {CONTACT} over: start it by hvdrun",
              file=sys.stderr)
        return 1
    except OSError as reason:
        print(f"hvdrun: guard on {socket.gethostname()} cannot reach hvdrun: {reason}: is a firewall between them?",
              file=sys.stderr)
        return 1
    own_nonce = os.urandom(16).hex()
    rank = next((os.environ[name] for name in RANK_NAMES if name in os.environ), "")
    channel.trusted = True  # of its frames' size only: what it says counts after is_trusted

    def hello(nonce: str) -> dict[str, Any]:
        return {"kind": "hello", "rank": rank, "pid": os.getpid(), "host": socket.gethostname(), "nonce": own_nonce,
                "cpus": format_cpus(sorted(os.sched_getaffinity(0))), "now_ns": time.monotonic_ns(),
                "proof": proof(token, "guard", nonce, rank)}

    def is_trusted(job: dict[str, Any]) -> bool:
        return is_proof(job.get("proof"), token, "hvdrun", own_nonce)

    guard = Guard(directory, channel, wakeup_fd, hello, is_trusted)
    guard.run()
    guard.release()
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
