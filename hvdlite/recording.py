"""What the background thread records about itself: calls, plans, buckets, its late wake-ups, and the clocks of the ranks.

*Threads*: the background thread. Callers ask ``is_recording`` first: where nothing is written, nothing is computed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from hvdlite.control.base import ControlPlane
from hvdlite.control.clock import compare_clocks, probe_link
from hvdlite.fusion import Bucket, Plan
from hvdlite.message import SINGULAR, Collective, Request
from hvdlite.tensor_queue import TensorEntry
from hvdlite.timeline.phase import REASONS, Phase
from hvdlite.timeline.recorder import NullTimeline, Timeline, time_of_day

#: How often ranks that record compare their clocks. Chosen: crystals drift by up to 50 us a second, steadily.
_CLOCKS_EVERY_NS = 30_000_000_000
#: A wake-up later than this is recorded, if the process did not use its processor meanwhile. Chosen: more than timers and
#: Python's switches between threads take.
_LATE_NS = 8_000_000
#: The processor time before a sleep is known to within this. Chosen: reading it costs as much as a record.
_USED_EVERY_NS = 1_000_000
#: Requests whose names are kept. Chosen: more than a model has; programs that name every call anew must not fill the memory.
_MAX_REQUESTS = 1 << 14
#: The longest text of an error that is recorded.
_MAX_TEXT = 2000

_REASON_CODES = {reason: code for code, reason in enumerate(REASONS)}


class _Words(NamedTuple):
    """How the records of one request are called. ``request`` keeps its id from being used again."""

    request: Request
    label: str
    negotiating: Phase
    whole: Phase


class Recording:
    """Writes what happens into a timeline."""

    def __init__(self, timeline: Timeline, clocks: Timeline | None, marks_cycles: bool) -> None:
        """``clocks``: what readings of clocks go into, which must outlive whatever fills the ring."""
        self.timeline = timeline
        self.clocks: Timeline = clocks or NullTimeline()
        self.marks_cycles = marks_cycles
        self._next_clocks_ns = 0
        self._has_probed = False
        self._used_ns = self._used_at_ns = 0
        self._words: dict[int, _Words] = {}

    @property
    def is_recording(self) -> bool:
        """Whether anything is written at this moment."""
        return self.timeline.is_recording

    def record_into(self, timeline: Timeline, clocks: Timeline) -> None:
        """Write into these from now on."""
        self.timeline = timeline
        if clocks is not self.clocks:
            self.clocks, self._next_clocks_ns, self._has_probed = clocks, 0, False

    def is_comparison_due(self, is_leaving: bool) -> bool:
        """Whether all ranks should compare their clocks now."""
        return self.clocks.is_recording and (is_leaving or time.monotonic_ns() >= self._next_clocks_ns)

    def compare_clocks(self, control: ControlPlane) -> None:
        """All ranks together: those that record note what they have heard."""
        self._next_clocks_ns = time.monotonic_ns() + _CLOCKS_EVERY_NS
        reading = compare_clocks(control)
        self.clocks.span(Phase.CLOCK, "clock", reading.own_ns, reading.zero_ns, value=reading.error_ns)
        now = time_of_day()
        self.clocks.span(Phase.TIME_OF_DAY, "time of day", now.monotonic_ns, now.realtime_ns, value=now.realtime_error_ns)
        if not self._has_probed:
            self._has_probed = True
            if (link := probe_link(control)) is not None:
                self.clocks.operation = link[0]
                self.clocks.span(Phase.LINK, "link", link[2], link[3], link[1])
                self.clocks.operation = 0

    def submission(self, entry: TensorEntry) -> None:
        """A call has come from a user's thread."""
        request, timeline = entry.request, self.timeline
        label = self._words_of(request).label
        timeline.operation = timeline.plan = 0
        timeline.process_set = request.key.process_set_id
        timeline.describe(label, request)
        # Of a group the reader adds up the shapes: it need not be done in every step.
        inputs, at_ns = entry.inputs, entry.submitted_ns
        timeline.span(Phase.SUBMIT, label, at_ns, at_ns, inputs[0].array.nbytes if len(inputs) == 1 else 0, 0, len(inputs))

    def negotiation(self, plan: Plan, entries: Mapping[int, TensorEntry], start_ns: int, plan_number: int, first: int) -> None:
        """A plan was agreed in the cycle that began at ``start_ns``; ``first`` is the number of its first operation."""
        timeline, now_ns = self.timeline, time.monotonic_ns()
        timeline.plan = plan_number
        for slot, entry in entries.items():
            key = entry.request.key
            if entry.is_stand_in or key.collective in SINGULAR:
                continue
            words, queued_ns = self._words_of(entry.request), entry.submitted_ns
            seen_ns = max(start_ns, queued_ns)
            timeline.operation, timeline.process_set = first + plan.places[slot], key.process_set_id
            timeline.span(Phase.QUEUE, words.label, queued_ns, seen_ns)
            timeline.span(words.negotiating, words.label, seen_ns, now_ns)
        if self.marks_cycles:
            timeline.span(Phase.CYCLE_START, "cycle", start_ns, start_ns)

    def bucket(self, bucket: Bucket, entries: Mapping[int, TensorEntry], began_ns: int) -> None:
        """A bucket has been executed."""
        self.timeline.process_set = bucket.request.key.process_set_id
        self.timeline.span(Phase.BUCKET, bucket.label, began_ns, time.monotonic_ns(), _bytes_of(bucket, entries),
                           _REASON_CODES[bucket.reason], len(bucket.segments))

    def completion(self, entry: TensorEntry) -> None:
        """An entry is complete."""
        words, now_ns = self._words_of(entry.request), time.monotonic_ns()
        self.timeline.span(words.whole, words.label, entry.submitted_ns, now_ns, 0, 0, len(entry.inputs))
        self._wait(entry, words.label, now_ns)

    def failure(self, entry: TensorEntry, error: str) -> None:
        """An entry has failed."""
        timeline, now_ns = self.timeline, time.monotonic_ns()
        timeline.operation, timeline.process_set = 0, entry.request.key.process_set_id
        timeline.span(Phase.ERROR, f"{entry.request.key}: {error}"[:_MAX_TEXT], now_ns, now_ns)
        self._wait(entry, self._words_of(entry.request).label, now_ns)

    def sleep(self, wait: Callable[[float], bool], seconds: float) -> bool:
        """Wait; record where it took much longer, because this process did not run."""
        if not self.timeline.is_recording:
            return wait(seconds)
        began_ns = time.monotonic_ns()
        if began_ns - self._used_at_ns > _USED_EVERY_NS:
            self._used_ns, self._used_at_ns = time.process_time_ns(), began_ns
        result = wait(seconds)
        now_ns, due_ns = time.monotonic_ns(), began_ns + int(seconds * 1e9)
        # A process that computes without letting Python go on is late too, but uses its processor.
        if now_ns - due_ns > _LATE_NS and 2 * (time.process_time_ns() - self._used_ns) < now_ns - due_ns:
            self.timeline.span(Phase.NOT_RUNNING, "not running", due_ns, now_ns)
        return result

    def close(self, kind: str, reason: str) -> None:
        """The loop ends because of this; nothing is recorded afterwards."""
        if self.timeline.is_recording:
            now_ns = time.monotonic_ns()
            self.timeline.span(Phase.END, f"{kind}: {reason}"[:_MAX_TEXT], now_ns, now_ns)
        self.timeline.close()
        self.clocks.close()

    def _wait(self, entry: TensorEntry, label: str, now_ns: int) -> None:
        """How long a thread was blocked in the entry's handle."""
        if entry.handle.awaited_ns:
            self.timeline.span(Phase.WAIT, label, entry.handle.awaited_ns, now_ns)

    def _words_of(self, request: Request) -> _Words:
        found = self._words.get(id(request))
        if found is None:
            if len(self._words) >= _MAX_REQUESTS:
                self._words.clear()
            name = request.key.collective.upper()
            # Calls that are about the job and not about tensors have no phases of their own.
            found = self._words[id(request)] = _Words(
                request, request.label, Phase.__members__.get(f"NEGOTIATE_{name}", Phase.QUEUE),
                Phase.__members__.get(name, Phase.QUEUE))
        return found


def _bytes_of(bucket: Bucket, entries: Mapping[int, TensorEntry]) -> int:
    """What a bucket holds; an allgather's is its result."""
    if bucket.num_bytes:
        return bucket.num_bytes
    entry = entries[bucket.segments[0].slot]
    gathers = bucket.request.key.collective == Collective.ALLGATHER
    return sum(buffer.array.nbytes for buffer in (entry.outputs if gathers else entry.inputs))
