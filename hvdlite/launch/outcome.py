"""Outcome: how each rank ended, which one is the cause, hvdrun's exit code, and the paragraph that says so. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from hvdlite.errors import format_ranks
from hvdlite.launch.process import signal_name


@dataclass(frozen=True)
class RankEnd:
    """How one rank ended.

    ``returncode``: as ``subprocess`` has it, negative for a signal; None when its guard was lost before it could
    say. ``sent``: the ending signals that reached it through its guard before its end. ``is_victim``: it said
    itself that a peer's end was the reason of its own.
    """

    rank: int
    pid: int
    returncode: int | None
    ended_ns: int
    sent: tuple[int, ...] = ()
    is_victim: bool = False

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
    a person sent to hvdrun before anything failed. ``starter_returncode``: None while the starter lives.
    """

    started_ns: int
    ends: dict[int, RankEnd] = field(default_factory=dict)
    error: str = ""
    error_code: int = 0
    interrupted_by: int = 0
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
        if self.interrupted_by:
            return f"hvdrun: ended by {signal_name(self.interrupted_by)}"
        if self.exit_code == 0:
            return ""
        if self.cause is None:
            return self._describe_starter()
        after_s = (self.cause.ended_ns - self.started_ns) / 1e9
        text = (
            f"hvdrun: rank {self.cause.rank} (pid {self.cause.pid}) failed first, {after_s:.2f} s after the start: "
            f"{describe_end(self.cause)}.")
        return " ".join((text, *self._describe_others(self.cause)))

    def _describe_others(self, cause: RankEnd) -> list[str]:
        others = [end for end in self.ends.values() if end is not cause]
        ended = [end.rank for end in others if end.sent or end.returncode is None]
        texts = []
        fell = [end.rank for end in others if end.is_victim and not end.sent]
        if fell:
            texts.append(f"{_ranks(fell)} ended because of it.")
        if ended:
            texts.append(f"{_ranks(ended)} {'was' if len(ended) == 1 else 'were'} then ended by hvdrun.")
        texts += [
            f"Rank {end.rank} also failed by itself: {describe_end(end)}."
            for end in sorted(others, key=lambda end: end.ended_ns) if end.failed_by_itself]
        return texts

    def _describe_starter(self) -> str:
        lost = [end.rank for end in self.ends.values() if end.returncode is None]
        if self.starter_returncode is not None:
            how = describe_code(self.starter_returncode)
            return (
                f"hvdrun: the MPI's starter ended the job ({how}): a rank called MPI_Abort, or what the "
                "starter wrote above tells why.")
        return f"hvdrun: {format_ranks(lost)}: the guard was killed, and the job was ended"


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
