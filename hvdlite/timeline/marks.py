"""Marks: what user threads record about themselves: steps, forward, backward, input. Each thread has a ring of its own.

*Threads*: any. The number of the current step also opens and closes the window of steps that is recorded.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from types import TracebackType

from hvdlite.timeline.phase import Phase
from hvdlite.timeline.recorder import RingTimeline

#: Marks whose names are phases of their own.
_NAMED = {"forward": Phase.FORWARD, "backward": Phase.BACKWARD, "input": Phase.INPUT}


class Marks:
    """The marks of one rank; without rings it counts steps and records nothing."""

    def __init__(self, window: tuple[int, int] | None = None) -> None:
        """``window``: the first step to record and the first one not to; None for all."""
        self.num_steps = 0
        self._window = window
        self._make: Callable[[str], RingTimeline] | None = None
        self._others: tuple[RingTimeline, ...] = ()
        self._owner: object = None
        self._is_manual = False
        self._last_ns = time.monotonic_ns()
        self._used = (0, 0)
        # Guards _rings.
        self._lock = threading.Lock()
        self._rings: dict[int, RingTimeline] = {}
        self._schedstat: dict[int, int] = {}

    @property
    def is_recording(self) -> bool:
        """Whether marks go into a ring now."""
        return self._make is not None and self._is_open

    @property
    def _is_open(self) -> bool:
        return self._window is None or self._window[0] <= self.num_steps < self._window[1]

    def record_into(self, make: Callable[[str], RingTimeline] | None, others: tuple[RingTimeline, ...]) -> None:
        """Make rings by ``make(thread)`` from now on, or none; ``others`` are switched by the window too."""
        with self._lock:
            old, self._rings = list(self._rings.values()), {}
            self._make, self._others = make, others
        for ring in old:
            ring.close()
        for ring in others:
            ring.is_recording = self._is_open
        self._last_ns = time.monotonic_ns()
        self._used = self._usage()

    def step(self, owner: object = None) -> None:
        """A step has ended. ``owner``: the optimizer that says so; the first one is heard, none once the user says it."""
        if owner is None:
            self._is_manual = True
        elif self._is_manual or (self._owner is not None and self._owner != owner):
            return
        else:
            self._owner = owner
        now_ns = time.monotonic_ns()
        if self._make is not None:
            used = self._usage()
            if self._is_open:
                # What this thread got of a processor in the step, and how long it waited for one.
                self._record(Phase.STEP, f"step {self.num_steps % 1000}", self._last_ns, now_ns, used[0] - self._used[0],
                             self.num_steps, float(used[1] - self._used[1]))
            self._used = used
        self._last_ns = now_ns
        self.num_steps += 1
        if self._window is not None:
            for ring in self._others:
                ring.is_recording = self._is_open

    def span(self, name: str, start_ns: int, end_ns: int) -> None:
        """Record that this thread did ``name`` meanwhile."""
        if self.is_recording:
            self._record(_NAMED.get(name, Phase.MARK), name, start_ns, end_ns, 0, self.num_steps, 0.0)

    def close(self) -> None:
        """Nothing is recorded afterwards."""
        self.record_into(None, ())
        for file in self._schedstat.values():
            os.close(file)
        self._schedstat.clear()

    def _record(self, phase: Phase, name: str, start_ns: int, end_ns: int, used_ns: int, step: int, delay_ns: float) -> None:
        thread = threading.get_ident()
        ring = self._rings.get(thread)
        if ring is None:
            with self._lock:
                if self._make is None:
                    return
                label = "main" if threading.current_thread() is threading.main_thread() else f"user{len(self._rings)}"
                ring = self._rings[thread] = self._make(label)
        ring.span(phase, name, start_ns, end_ns, max(0, used_ns), 0, step, delay_ns)

    def _usage(self) -> tuple[int, int]:
        """Nanoseconds this thread has run, and has waited for a processor; 0 where the system does not tell."""
        thread = threading.get_ident()
        try:
            if thread not in self._schedstat:
                self._schedstat[thread] = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY)
            ran, waited, _ = os.pread(self._schedstat[thread], 100, 0).split()
            return int(ran), int(waited)
        except (OSError, ValueError):
            return time.thread_time_ns(), 0


class Marked:
    """Records what is done inside under a name."""

    def __init__(self, marks: Marks, name: str) -> None:
        self._marks, self._name = marks, name

    def __enter__(self) -> None:
        self._start_ns = time.monotonic_ns()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._marks.span(self._name, self._start_ns, time.monotonic_ns())
