"""Outcome: how each rank ended, which one is the cause, hvdrun's exit code, and the paragraph that says so. Pure."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field

from hvdlite.errors import format_ranks
from hvdlite.launch.process import signal_name

#: As ``timeout`` has it.
EXIT_HUNG = 124

#: What people should think of when a signal ended a rank that nobody of hvdrun sent.
_MEANINGS = {
    signal.SIGSEGV: "native code touched memory that is not its own; the lines above the end, if any, are where Python was",
    signal.SIGABRT: "native code gave up: an assertion or a failed check of the C library; see what it wrote",
    signal.SIGBUS: "memory could not be had: often /dev/shm is full, or a mapped file was cut",
    signal.SIGFPE: "an integer division by zero in native code",
    signal.SIGILL: "an instruction this processor does not have: the program was built for another",
    signal.SIGKILL: "sent by the kernel for want of memory, by a scheduler, or by a person",
    signal.SIGTERM: "sent by a scheduler (time limit, preemption) or a person; not by hvdrun",
    signal.SIGXCPU: "the limit of CPU time (ulimit -t)",
    signal.SIGXFSZ: "the limit of a file's size (ulimit -f)",
    signal.SIGPIPE: "it wrote to a pipe that nobody reads",
    signal.SIGHUP: "its terminal was closed",
}


@dataclass(frozen=True)
class RankEnd:
    """How one rank ended.

    ``returncode``: as ``subprocess`` has it, negative for a signal; None when its guard was lost before it could
    say. ``sent``: the ending signals that reached it through its guard before its end. ``is_victim``: it said
    itself that a peer's end was the reason of its own. ``error``: its exception in one line; ``traceback``: all of it.
    ``oom_killed``: the kernel killed something of its control group for want of memory.
    """

    rank: int
    pid: int
    returncode: int | None
    ended_ns: int
    sent: tuple[int, ...] = ()
    is_victim: bool = False
    host: str = ""
    error: str = ""
    traceback: tuple[str, ...] = ()
    max_rss_bytes: int = 0
    oom_killed: bool = False

    @property
    def failed(self) -> bool:
        """Whether it ended otherwise than with exit code 0."""
        return self.returncode != 0

    @property
    def failed_by_itself(self) -> bool:
        """Whether it failed, nobody had told it to end, and no peer was the reason."""
        return self.failed and self.returncode is not None and not self.sent and not self.is_victim

    @property
    def left_with_a_code(self) -> bool:
        """Whether it exited with a code that no signal explains."""
        if self.returncode is None or self.returncode <= 0:
            return False
        return self.returncode not in {128 + number for number in self.sent}


@dataclass
class Outcome:
    """What became of a job. *Units*: ``started_ns`` and ``ended_ns`` are CLOCK_MONOTONIC.

    ``error``: why it could not start or go on, with the exit code it means. ``interrupted_by``: the signal that
    a person sent to hvdrun before anything failed; ``is_unwanted``: one was sent at any time, so nothing is to be started again.
    ``hung``: why it was ended as hanging, with ``report``, the stacks of all
    ranks. ``starter_returncode``: None while the starter lives.
    """

    started_ns: int
    ends: dict[int, RankEnd] = field(default_factory=dict)
    error: str = ""
    error_code: int = 0
    interrupted_by: int = 0
    is_unwanted: bool = False
    hung: str = ""
    report: str = ""
    starter_returncode: int | None = None

    @property
    def cause(self) -> RankEnd | None:
        """The first rank, by time, that failed by itself. Where all such are victims of another, that one, if it was
        merely slow to end and left with a code of its own; else the first victim."""
        victims = [end for end in self.ends.values() if end.is_victim and not end.sent]
        slow = [end for end in self.ends.values() if end.sent and not end.is_victim and end.left_with_a_code]
        ends = [end for end in self.ends.values() if end.failed_by_itself] or (slow if victims else []) or victims
        return min(ends, key=lambda end: end.ended_ns, default=None)

    @property
    def exit_code(self) -> int:
        """The code hvdrun exits with; 0 only when every rank ended with 0."""
        if self.error:
            return self.error_code
        if self.hung:
            return EXIT_HUNG
        if self.interrupted_by:
            return 128 + self.interrupted_by
        if self.cause is not None:
            return shell_code(self.cause.returncode)
        failed = [end for end in self.ends.values() if end.failed]
        if not failed:
            return 0
        # The starter ended the job, as it does after MPI_Abort: its code is the best there is.
        if self.starter_returncode:
            return shell_code(self.starter_returncode)
        return shell_code(min(failed, key=lambda end: end.ended_ns).returncode)

    def describe(self) -> str:
        """The closing paragraph: empty when all went well, else which rank ended first, and how."""
        if self.error:
            return f"hvdrun: error: {self.error}"
        if self.hung:
            return f"hvdrun: {self.hung}"
        if self.interrupted_by:
            return f"hvdrun: ended by {signal_name(self.interrupted_by)}"
        if self.exit_code == 0:
            return ""
        if self.cause is None:
            return self._describe_starter()
        text = f"hvdrun: {self._first(self.cause)}."
        return " ".join((text, *(f"{one}." for one in self._others(self.cause))))

    def box(self, is_unicode: bool = True) -> str:
        """The closing box, for the last lines of a terminal: the cause first, its traceback last."""
        cause = self.cause
        if self.error or self.hung or self.interrupted_by or self.exit_code == 0 or cause is None:
            return "\n".join(filter(None, (self.report, self.describe())))
        top, side, bottom = ("\u250c\u2500", "\u2502", "\u2514\u2500") if is_unicode else ("+-", "|", "+-")
        lines = [self._first(cause), *meaning(cause), *self._others(cause), f"exit code of hvdrun: {self.exit_code}"]
        text = [f"{top} hvdrun: the job failed", *(f"{side} {line}" for line in lines)]
        last = f" traceback of rank {cause.rank}:" if cause.traceback else ""
        return "\n".join((*text, f"{bottom}{last}", *cause.traceback))

    def _first(self, cause: RankEnd) -> str:
        after_s = (cause.ended_ns - self.started_ns) / 1e9
        where = f", on {cause.host}" if cause.host else ""
        return (
            f"rank {cause.rank} (pid {cause.pid}) failed first, {after_s:.2f} s after the start{where}: {describe_end(cause)}")

    @property
    def told_otherwise(self) -> frozenset[int]:
        """Ranks whose traceback need not be shown in the stream: the cause's comes in the box, those of its victims say less."""
        victims = {end.rank for end in self.ends.values() if end.is_victim or end.sent}
        return frozenset(victims if self.cause is None else victims | {self.cause.rank}) if self.exit_code else frozenset()

    def _others(self, cause: RankEnd) -> list[str]:
        others = sorted((end for end in self.ends.values() if end is not cause), key=lambda end: end.ended_ns)
        ended = [end.rank for end in others if end.sent or end.returncode is None]
        fell = [end for end in others if end.is_victim and not end.sent]
        texts = []
        if fell:
            told = sorted({end.error for end in fell if end.error})
            because = f": {told[0]}" if len(told) == 1 else ""
            texts.append(f"{_ranks([end.rank for end in fell])} ended because of it{because}")
        if ended:
            texts.append(f"{_ranks(ended)} {'was' if len(ended) == 1 else 'were'} then ended by hvdrun")
        texts += [
            f"Rank {end.rank} also failed by itself: {describe_end(end)}{f': {end.error}' if end.error else ''}"
            for end in others if end.failed_by_itself]
        return texts

    def _describe_starter(self) -> str:
        lost = sorted((end for end in self.ends.values() if end.returncode is None), key=lambda end: end.ended_ns)
        if self.starter_returncode is None:
            return f"hvdrun: {format_ranks([end.rank for end in lost])}: the guard was killed, and the job was ended"
        how = describe_code(self.starter_returncode)
        where = f" on {lost[0].host}" if lost and lost[0].host else ""
        first = f" (the first lost: that of rank {lost[0].rank}{where}, pid {lost[0].pid})" if lost else ""
        return (
            f"hvdrun: the MPI's starter ended the job ({how}): a rank called MPI_Abort, or a rank's guard was "
            f"killed{first}; what the starter wrote above may tell why.")


def meaning(end: RankEnd) -> list[str]:
    """What a rank's end may mean, a line each."""
    if end.returncode is None:
        return []
    lines = []
    if end.error:
        lines.append(f"its exception: {end.error}")
    number = -end.returncode if end.returncode < 0 else end.returncode - 128 if end.returncode > 128 else 0
    if number in _MEANINGS:
        lines.append(f"{signal_name(number)}: {_MEANINGS[signal.Signals(number)]}")
    if end.oom_killed:
        lines.append(f"out of memory: the kernel killed a process of this control group meanwhile; the rank held up to "
                     f"{_gigabytes(end.max_rss_bytes)}: use smaller batches or ask for more memory")
    elif number == signal.SIGKILL:
        lines.append(f"the rank held up to {_gigabytes(end.max_rss_bytes)}; whether memory ran out: dmesg | grep -i oom")
    return lines


def _gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.0f} MB"


def shell_code(returncode: int | None) -> int:
    """A shell's exit code: 128 + n for signal n; of a lost rank, 137, because that is what became of it."""
    if returncode is None:
        return 137
    return returncode if returncode >= 0 else 128 - returncode


def describe_end(end: RankEnd) -> str:
    """How a rank ended, in words."""
    return "lost with its guard" if end.returncode is None else describe_code(end.returncode)


def describe_code(returncode: int) -> str:
    """``exit code 7``, ``killed by SIGKILL (signal 9)``."""
    if returncode >= 0:
        return f"exit code {returncode}"
    return f"killed by {signal_name(-returncode)} (signal {-returncode})"


def _ranks(ranks: list[int]) -> str:
    text = format_ranks(ranks)
    return text[0].upper() + text[1:]
