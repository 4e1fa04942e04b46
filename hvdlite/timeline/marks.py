"""Marks: what user threads record about themselves: steps, forward, backward, input. Each thread has a ring of its own.

*Threads*: any. Where ``is_deferred``, records are put into ``queue`` and the background thread writes them, with its own: a
user's thread comes from computing, and writing from cold caches would cost it ten times as much. The number of the current step
also opens and closes the window of steps that is recorded.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType

from hvdlite.timeline.phase import Phase
from hvdlite.timeline.recorder import Record, RingTimeline

#: Marks whose names are phases of their own.
_NAMED = {"forward": int(Phase.FORWARD), "backward": int(Phase.BACKWARD), "input": int(Phase.INPUT)}
_STEP, _MARK = int(Phase.STEP), int(Phase.MARK)


#: How often the kernel is asked for how long a thread waited for a processor. Chosen: that takes some 15 us.
_READ_EVERY_NS = 25_000_000


class Marks:
    """The marks of one rank; without rings it counts steps and records nothing."""

    def __init__(self, window: tuple[int, int] | None = None) -> None:
        """``window``: the first step to record and the first one not to; None for all."""
        self.num_steps = 0
        #: May be changed at any time; see ``follow_window``.
        self.window = window
        self._make: Callable[[str], RingTimeline] | None = None
        self._others: tuple[RingTimeline, ...] = ()
        self._owner: object = None
        self._is_manual = False
        self._last_ns = time.monotonic_ns()
        self._read_ns = self._unread_steps = 0
        self._delays_ns: dict[int, int] = {}
        self.is_deferred = False
        #: What ``settle`` writes. Steps of a deque are single steps, so that no record is lost.
        self.queue: deque[tuple[RingTimeline, Sequence[Record]]] = deque()
        # Guards _rings, and what is in them: who writes.
        self._lock = threading.Lock()
        self._rings: dict[int, RingTimeline] = {}
        self._schedstat: dict[int, int] = {}

    @property
    def is_recording(self) -> bool:
        """Whether marks go into a ring now."""
        return self._make is not None and self._is_open

    @property
    def _is_open(self) -> bool:
        return self.window is None or self.window[0] <= self.num_steps < self.window[1]

    def record_into(self, make: Callable[[str], RingTimeline] | None, others: tuple[RingTimeline, ...]) -> None:
        """Make rings by ``make(thread)`` from now on, or none; ``others`` are switched by the window too."""
        with self._lock:
            old, self._rings = list(self._rings.values()), {}
            self._make, self._others = make, others
            self._empty_queue()
            for ring in old:
                ring.close()
        for ring in others:
            ring.is_recording = self._is_open
        self._last_ns = time.monotonic_ns()
        self._read_delay(self._last_ns)

    def step(self, owner: object = None, spans: Sequence[tuple[str, int, int]] = ()) -> None:
        """A step has ended. ``owner``: the optimizer that says so; the first one is heard, none once the user says it.
        ``spans``: what this thread did in it, as ``spans`` takes it."""
        if owner is None:
            self._is_manual = True
        elif self._is_manual or (self._owner is not None and self._owner != owner):
            self.spans(spans)
            return
        else:
            self._owner = owner
        now_ns = time.monotonic_ns()
        if self._make is not None:
            if self._is_open:
                records = self._as_records(spans)
                self._unread_steps += 1
                steps, delay_ns = self._unread_steps, 0
                if now_ns - self._read_ns >= _READ_EVERY_NS:
                    delay_ns = self._read_delay(now_ns)
                # How long this thread waited for a processor in the last ``detail`` steps; 0 where that was not asked.
                records.append((_STEP, "step", self._last_ns, now_ns, 0, min(steps, 0xffff) if delay_ns else 0,
                                self.num_steps, float(delay_ns), 0, 0, 0))
                self._write(records)
            elif now_ns - self._read_ns >= _READ_EVERY_NS:
                self._read_delay(now_ns)  # what the window does not hold is no part of its first step
        self._last_ns = now_ns
        self.num_steps += 1
        if self.window is not None:
            self.follow_window()

    def follow_window(self) -> None:
        """Let the background thread's ring record as ``window`` says now."""
        for ring in self._others:
            ring.is_recording = self._is_open

    def span(self, name: str, start_ns: int, end_ns: int) -> None:
        """Record that this thread did ``name`` meanwhile."""
        self.spans([(name, start_ns, end_ns)])

    def spans(self, spans: Sequence[tuple[str, int, int]]) -> None:
        """Record several at once, each a name, its start and its end."""
        if spans and self.is_recording:
            self._write(self._as_records(spans))

    def settle(self) -> None:
        """Write what is in ``queue``."""
        with self._lock:
            self._empty_queue()

    def close(self) -> None:
        """Nothing is recorded afterwards."""
        self.record_into(None, ())
        for file in self._schedstat.values():
            os.close(file)
        self._schedstat.clear()

    def _as_records(self, spans: Sequence[tuple[str, int, int]]) -> list[Record]:
        step = self.num_steps
        return [(_NAMED.get(name, _MARK), name, start_ns, end_ns, 0, 0, step, 0.0, 0, 0, 0)
                for name, start_ns, end_ns in spans]

    def _write(self, records: Sequence[Record]) -> None:
        thread = threading.get_ident()
        ring = self._rings.get(thread)
        if ring is None:
            with self._lock:
                if self._make is None:
                    return
                label = "main" if threading.current_thread() is threading.main_thread() else f"user{len(self._rings)}"
                ring = self._rings[thread] = self._make(label)
        self.queue.append((ring, records))
        if not self.is_deferred:
            self.settle()

    def _empty_queue(self) -> None:
        while self.queue:
            ring, records = self.queue.popleft()
            if ring.is_recording:  # else it has been closed since
                ring.write(records)

    def _read_delay(self, now_ns: int) -> int:
        """Nanoseconds that this thread has waited for a processor since it was read last; 0 where the system does not tell."""
        self._read_ns, self._unread_steps = now_ns, 0
        thread = threading.get_ident()
        try:
            if thread not in self._schedstat:
                self._schedstat[thread] = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY)
            delay_ns = int(os.pread(self._schedstat[thread], 100, 0).split()[1])
        except (OSError, ValueError, IndexError):
            return 0
        before_ns, self._delays_ns[thread] = self._delays_ns.get(thread, delay_ns), delay_ns
        return delay_ns - before_ns


class Marked:
    """Records what is done inside under a name."""

    def __init__(self, marks: Marks, name: str) -> None:
        self._marks, self._name = marks, name

    def __enter__(self) -> None:
        self._start_ns = time.monotonic_ns()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._marks.span(self._name, self._start_ns, time.monotonic_ns())
