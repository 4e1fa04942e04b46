"""Where the ranks are: stacks in faulthandler's words, grouped, with the tensors that are waited for; and when a job hangs.

Pure: texts, states and times in, text out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hvdlite.errors import format_ranks

_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)$')
_NEVER_S = float("inf")
#: How many tensors the table spells out. Chosen.
_TENSORS_SHOWN = 20
#: Frames shown below the line that is told. Chosen.
_FRAMES_SHOWN = 8


@dataclass(frozen=True)
class RankState:
    """What one rank told: its stacks as faulthandler writes them, what its runtime waits for, and the kernel's word."""

    rank: int
    stacks: str
    waits: Mapping[str, Any] = field(default_factory=dict)
    process: str = ""


@dataclass(frozen=True)
class Frame:
    """One frame of a stack."""

    file: str
    line: int
    name: str

    @property
    def is_foreign(self) -> bool:
        """Whether it is no code of the user: a library's, Python's own or hvdlite's."""
        return re.search(r"/(site-packages|dist-packages|hvdlite|lib/python3\.\d+)/|^<frozen", self.file) is not None

    def __str__(self) -> str:
        return f"{self.file.rsplit('/', 1)[-1]}:{self.line}"


def main_stack(text: str) -> list[Frame]:
    """The main thread's frames, innermost first: faulthandler lists threads youngest first, so it is the last."""
    threads: list[list[Frame]] = []
    for line in text.splitlines():
        if line.startswith(("Thread 0x", "Current thread 0x")):
            threads.append([])
        elif threads and (match := _FRAME.match(line)):
            threads[-1].append(Frame(match["file"], int(match["line"]), match["name"]))
    return threads[-1] if threads else []


def place(state: RankState) -> str:
    """Where a rank is, in a line: what it does, and the user's line."""
    frames = main_stack(state.stacks)
    operation = str(state.waits.get("operation") or "")
    own = next((frame for frame in frames if not frame.is_foreign), frames[0] if frames else None)
    if own is None:
        return f"is in no Python that answers: {state.process or 'unknown'}"
    if operation and any("/hvdlite/" in frame.file for frame in frames):
        return f"wait in {operation} at {own} ({own.name})"
    inner = frames[0]
    doing = f"is in {inner.name} ({inner}) called" if inner is not own else "is"
    code = source_line(own)
    return f"{doing} at {own} ({own.name}){f': {code}' if code else ''}"


def source_line(frame: Frame) -> str:
    """The line of source, where this host has the file."""
    try:
        with open(frame.file, encoding="utf-8", errors="replace") as file:
            for number, line in enumerate(file, 1):
                if number == frame.line:
                    return line.strip()[:100]
    except OSError:
        pass
    return ""


def describe_hang(states: Mapping[int, RankState], ended: Mapping[int, str], num_ranks: int) -> str:
    """All ranks, grouped by where they are, then what is waited for and for whom."""
    groups: dict[str, list[int]] = {}
    for rank in sorted(states):
        groups.setdefault(place(states[rank]), []).append(rank)
    lines = ["hvdrun: where the ranks are:"]
    for words, ranks in groups.items():
        lines.append(f"  {format_ranks(ranks)}: {words}")
        lines += [f"      {frame} in {frame.name}" for frame in main_stack(states[ranks[0]].stacks)[:_FRAMES_SHOWN]]
    by_end: dict[str, list[int]] = {}
    for rank, how in ended.items():
        by_end.setdefault(how, []).append(rank)
    lines += [f"  {format_ranks(ranks)}: ended, {how}" for how, ranks in by_end.items()]
    silent = [rank for rank in range(num_ranks) if rank not in states and rank not in ended]
    if silent:
        lines.append(f"  {format_ranks(silent)}: did not answer")
    return "\n".join([*lines, *_tensors(states, num_ranks)])


def _tensors(states: Mapping[int, RankState], num_ranks: int) -> list[str]:
    """The table of pending tensors: where they are ready, and whom they wait for."""
    ready: dict[str, dict[int, float]] = {}
    for rank, state in states.items():
        for name, waited_s in state.waits.get("pending") or ():
            ready.setdefault(str(name), {})[rank] = float(waited_s)
    if not ready:
        return []
    lines = ["  pending tensors:"]
    for name, waited in sorted(ready.items(), key=lambda item: -max(item[1].values()))[:_TENSORS_SHOWN]:
        missing = [rank for rank in range(num_ranks) if rank not in waited]
        lines.append(f"    {name}: submitted {max(waited.values()):.0f} s ago by {format_ranks(waited)}; "
                     f"{'waits for ' + format_ranks(missing) if missing else 'by all'}")
    if len(ready) > _TENSORS_SHOWN:
        lines.append(f"    and {len(ready) - _TENSORS_SHOWN} more")
    return lines


class HangWatch:
    """Decides when a job hangs: something has been pending for so long, or for so long nothing at all has happened.

    *Units*: ``timeout_s``; ``startup_s``, which is allowed on top until each of ``num_ranks`` has shown life: written
    something, called ``init()``, or ended: imports from a slow file system are no hang.
    """

    def __init__(self, timeout_s: float, startup_s: float = 0.0, num_ranks: int = 0) -> None:
        self.timeout_s = timeout_s
        self._startup_s = startup_s
        self._lifeless = set(range(num_ranks))
        self._progress_s = _NEVER_S
        self._ask_at_s = 0.0
        self._completed: dict[int, int] = {}
        self._oldest_since_s: dict[int, float] = {}
        self._oldest_name: dict[int, str] = {}

    def note_start(self, now_s: float) -> None:
        """A rank started."""
        self._progress_s = now_s

    def note_progress(self, rank: int, now_s: float) -> None:
        """A rank wrote something."""
        self._progress_s = now_s
        self._lifeless.discard(rank)

    def note_end(self, rank: int, now_s: float) -> None:
        """A rank ended."""
        self.note_progress(rank, now_s)
        self._oldest_since_s.pop(rank, None)

    def note_state(self, rank: int, waits: Mapping[str, Any], now_s: float) -> None:
        """A rank's runtime told how much it has completed and what is pending."""
        if waits["completed"] != self._completed.get(rank):
            self._completed[rank] = waits["completed"]
            self.note_progress(rank, now_s)
        pending = waits["pending"]
        if pending:
            name, waited_s = max(pending, key=lambda one: one[1])
            self._oldest_since_s[rank], self._oldest_name[rank] = now_s - waited_s, name
        else:
            self._oldest_since_s.pop(rank, None)

    def asks(self, now_s: float) -> bool:
        """Whether to ask the ranks now."""
        if now_s < self._ask_at_s:
            return False
        self._ask_at_s = now_s + max(0.1, min(1.0, self.timeout_s / 4))
        return True

    def next_s(self) -> float:
        """When to look again."""
        return self._ask_at_s if self.timeout_s else _NEVER_S

    def shift(self, seconds: float) -> None:
        """For so long nobody has listened: it counts for nothing, and the ranks are asked again first."""
        self._progress_s += seconds
        self._oldest_since_s.clear()
        self._ask_at_s = 0.0

    def verdict(self, now_s: float) -> str:
        """Why the job hangs, or nothing."""
        for rank, since_s in self._oldest_since_s.items():
            if now_s - since_s >= self.timeout_s:
                return (f"the job hangs: {self._oldest_name[rank]} has been pending for {now_s - since_s:.0f} s "
                        f"(--hang-timeout {self.timeout_s:g}); it was ended: look at the ranks above")
        quiet_s = now_s - self._progress_s
        if quiet_s >= self.timeout_s + (self._startup_s if self._lifeless else 0.0):
            also = (f" and --start-timeout {self._startup_s:g}: {format_ranks(self._lifeless)} never wrote anything nor "
                    "called init()" if self._lifeless and self._startup_s else "")
            return (f"the job hangs: no rank wrote, ended or completed anything for {quiet_s:.0f} s "
                    f"(--hang-timeout {self.timeout_s:g}{also}); it was ended: look at the ranks above")
        return ""
