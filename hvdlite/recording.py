"""What the background thread records about itself: calls, plans, buckets, its late wake-ups, and the clocks of the ranks.

*Threads*: the background thread. Callers ask ``is_recording`` first: where nothing is written, nothing is computed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sized
from typing import NamedTuple

from hvdlite.collectives.workspace import Passage, note_phases
from hvdlite.control.base import ControlPlane, Note
from hvdlite.control.clock import compare_clocks, probe_link
from hvdlite.fusion import Bucket, Plan
from hvdlite.message import Collective, Request
from hvdlite.tensor_queue import TensorEntry
from hvdlite.timeline.composite import AWAITED, EXCHANGE_SHIFT, LIMIT, NEGOTIATING, PACKED
from hvdlite.timeline.marks import Marks
from hvdlite.timeline.phase import REASONS, Phase
from hvdlite.timeline.recorder import NullTimeline, Record, Timeline, time_of_day

#: How often ranks that record compare their clocks. Chosen: crystals drift by up to 50 us a second, steadily.
_CLOCKS_EVERY_NS = 30_000_000_000
#: A wake-up later than this is recorded, if the process did not use its processor meanwhile. Chosen: more than timers and
#: Python's switches between threads take.
_LATE_NS = 8_000_000
#: What is executed within this time may be written together. Chosen.
_COMPANY_NS = 2_000_000
#: The processor time before a sleep is known to within this. Chosen: reading it costs as much as a record.
_USED_EVERY_NS = 4_000_000
#: Sleeps of so much in all are timed together. Measured: a late rank makes 20 to 130 in a step.
_TOGETHER_S = 1e-3
#: Requests whose names are kept. Chosen: more than a model has; programs that name every call anew must not fill the memory.
_MAX_REQUESTS = 1 << 14
#: The longest text of an error that is recorded.
_MAX_TEXT = 2000

#: What is recorded in every step, looked up once: each time that is Python code, run from cold caches.
_SUBMIT, _WHOLE_OPERATION, _WHOLE_BUCKET = int(Phase.SUBMIT), int(Phase.WHOLE_OPERATION), int(Phase.WHOLE_BUCKET)

_REASON_CODES = {reason: code for code, reason in enumerate(REASONS)}


class _Words(NamedTuple):
    """How the records of one request are called; ``is_whole``: one record may hold them all. ``request`` keeps its id from being
    used again."""

    request: Request
    label: str
    negotiating: int
    whole: int
    is_whole: bool


class _Agreed(NamedTuple):
    """The plan that is being executed."""

    plan: Plan
    start_ns: int
    at_ns: int
    number: int
    first: int


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
        #: When the first of the sleeps that are timed together began; 0 where there is none.
        self.asleep_ns = 0
        self._slept_s = 0.0
        self._words: dict[int, _Words] = {}
        # Calls that have come and are not written yet, and what is being executed.
        self._fresh: list[TensorEntry] = []
        self._agreed: _Agreed | None = None
        #: What is complete and not written yet: slot, entry, operation, when, and since when a thread was blocked in its handle.
        self.done: list[tuple[int, TensorEntry, int, int, int]] = []
        self._records: list[Record] = []
        self._marks: Marks | None = None
        self._marked: Sized = ()

    @property
    def is_recording(self) -> bool:
        """Whether anything is written at this moment."""
        return self.timeline.is_recording

    def record_into(self, timeline: Timeline, clocks: Timeline) -> None:
        """Write into these from now on."""
        self.settle()
        self._agreed = None
        self.timeline = timeline
        if clocks is not self.clocks:
            self.clocks, self._next_clocks_ns, self._has_probed = clocks, 0, False

    def take_marks(self, marks: Marks) -> None:
        """Write what user threads mark together with what this thread records."""
        self._marks, self._marked = marks, marks.queue
        marks.is_deferred = True

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
        self._fresh.append(entry)

    def settle(self) -> None:
        """Write which calls have come, and what is complete: before anything waits for other ranks, so that it is known whatever
        becomes of that."""
        records = self._records
        if self._fresh:
            known = self._words
            for entry in self._fresh:
                request, inputs, at_ns = entry.request, entry.inputs, entry.submitted_ns
                label = (known.get(id(request)) or self._words_of(request)).label
                self.timeline.describe(label, request)
                # Of a group the reader adds up the shapes: it need not be done in every step.
                num_bytes = inputs[0].array.nbytes if len(inputs) == 1 else 0
                records.append((_SUBMIT, label, at_ns, at_ns, num_bytes, 0, len(inputs), 0.0, 0, 0, request.key.process_set_id))
            self._fresh.clear()
        if self.done:
            self._add_done()
        self.timeline.write(records)
        records.clear()
        if self._marks is not None and self._marked:
            self._marks.settle()

    def negotiation(self, plan: Plan, start_ns: int, plan_number: int, first: int) -> None:
        """A plan was agreed in the cycle that began at ``start_ns``; ``first`` is the number of its first operation."""
        if self._fresh or self._records or self.done:
            self.settle()
        self.timeline.plan = plan_number
        self._agreed = _Agreed(plan, start_ns, time.monotonic_ns(), plan_number, first)
        if self.marks_cycles:
            self.timeline.note(Phase.CYCLE_START, "cycle", start_ns, start_ns)

    def own_call(self, note: Note, plan: Plan, plan_number: int, number: int) -> None:
        """A call that its caller made in its own thread, as operation ``number``."""
        entry, bucket = note.entry, plan.buckets[0]
        assert entry is not None
        self.settle()
        timeline = self.timeline
        timeline.plan, timeline.operation, timeline.process_set = plan_number, number, 0
        self._fresh.append(entry)
        self._agreed = _Agreed(plan, note.began_ns, note.agreed_ns, plan_number, number)
        self.done.append((note.slot, entry, number, note.ended_ns, note.made_ns))
        if self.marks_cycles:
            timeline.note(Phase.CYCLE_START, "cycle", note.began_ns, note.began_ns)
        passage = Phase.MPI_ALLREDUCE, note.agreed_ns, 0, 0, note.ended_ns
        self.bucket(bucket, {note.slot: entry}, passage, note.agreed_ns, note.ended_ns)
        self.settle()

    def bucket(
        self, bucket: Bucket, entries: Mapping[int, TensorEntry], passage: Passage | None, began_ns: int, ended_ns: int,
    ) -> None:
        """A bucket has been executed, and what it completed is in ``done`` and was handed over: the threads that it wakes get
        going meanwhile. It is written when something may wait, at the latest."""
        agreed = self._agreed
        if agreed is None:
            return
        num_bytes, detail, operation = bucket.num_bytes, _REASON_CODES[bucket.reason], self.timeline.operation
        count, process_set = len(bucket.segments), bucket.request.key.process_set_id
        if passage is not None and ended_ns - began_ns < LIMIT and num_bytes < LIMIT:
            exchange, first_ns, packed_ns, combined_ns, _ = passage
            packed = combined = 0
            detail |= exchange << EXCHANGE_SHIFT
            if packed_ns:
                detail, packed, combined = detail | PACKED, packed_ns - began_ns, combined_ns - began_ns
            self._records.append((
                _WHOLE_BUCKET, bucket.label, began_ns, ended_ns, num_bytes | first_ns - began_ns << 32, detail, count,
                packed | combined << 32, operation, agreed.number, process_set))
        else:
            if passage is not None:
                note_phases(self.timeline, bucket, passage)
            self._records.append((
                Phase.BUCKET, bucket.label, began_ns, ended_ns, num_bytes or _bytes_of(bucket, entries), detail, count, 0.0,
                operation, agreed.number, process_set))
        if ended_ns - agreed.at_ns > _COMPANY_NS and bucket is not agreed.plan.buckets[-1]:
            self.settle()

    def _add_done(self) -> None:
        """Make records of what is complete."""
        agreed, records, known = self._agreed, self._records, self._words
        assert agreed is not None
        plan, start_ns, agreed_ns, number, first = agreed
        for slot, entry, operation, now_ns, awaited_ns in self.done:
            request, queued_ns = entry.request, entry.submitted_ns
            words = known.get(id(request)) or self._words_of(request)
            label, own, process_set = words.label, first + plan.places[slot], request.key.process_set_id
            seen_ns = start_ns if start_ns > queued_ns else queued_ns
            if words.is_whole and now_ns - queued_ns < LIMIT and queued_ns <= (awaited_ns or now_ns) <= now_ns:
                detail, waited = (words.whole | AWAITED, now_ns - awaited_ns) if awaited_ns else (words.whole, 0)
                records.append((
                    _WHOLE_OPERATION, label, queued_ns, now_ns, seen_ns - queued_ns | agreed_ns - queued_ns << 32, detail,
                    len(entry.inputs), waited | operation - own << 32, operation, number, process_set))
                continue
            records += (
                (Phase.QUEUE, label, queued_ns, seen_ns, 0, 0, 0, 0.0, own, number, process_set),
                (words.negotiating, label, seen_ns, agreed_ns, 0, 0, 0, 0.0, own, number, process_set),
                (words.whole, label, queued_ns, now_ns, 0, 0, len(entry.inputs), 0.0, operation, number, process_set))
            if awaited_ns:  # how long a thread was blocked in the entry's handle
                records.append((Phase.WAIT, label, awaited_ns, now_ns, 0, 0, 0, 0.0, operation, number, process_set))
        self.done.clear()

    def failure(self, entry: TensorEntry, error: str) -> None:
        """An entry has failed."""
        self.settle()
        timeline, now_ns = self.timeline, time.monotonic_ns()
        timeline.operation, timeline.process_set = 0, entry.request.key.process_set_id
        timeline.span(Phase.ERROR, f"{entry.request.key}: {error}"[:_MAX_TEXT], now_ns, now_ns)
        if entry.handle.awaited_ns:
            timeline.span(Phase.WAIT, self._words_of(entry.request).label, entry.handle.awaited_ns, now_ns)

    def sleep(self, wait: Callable[[float], bool], seconds: float) -> bool:
        """Wait; some sleeps in a row are timed together, see ``awake``."""
        if self._fresh or self._records or self._marked:
            self.settle()
        if self.asleep_ns:  # in most cases: whoever waits for a late rank sleeps often, and shortly
            slept_s = self._slept_s + seconds
            if slept_s <= _TOGETHER_S:
                self._slept_s = slept_s
                return wait(seconds)
            self.awake()
        if not self.timeline.is_recording:
            return wait(seconds)
        self.asleep_ns = now_ns = time.monotonic_ns()
        if now_ns - self._used_at_ns > _USED_EVERY_NS:
            self._used_ns, self._used_at_ns = time.process_time_ns(), now_ns
        self._slept_s = seconds
        result = wait(seconds)
        if seconds > _TOGETHER_S:
            self.awake()
        return result

    def awake(self) -> None:
        """The last sleep is over: record where it, or those before it, took much longer, because this process did not run."""
        now_ns, due_ns = time.monotonic_ns(), self.asleep_ns + int(self._slept_s * 1e9)
        self.asleep_ns, self._slept_s = 0, 0.0
        # A process that computes without letting Python go on is late too, but uses its processor.
        if now_ns - due_ns > _LATE_NS and 2 * (time.process_time_ns() - self._used_ns) < now_ns - due_ns:
            self.timeline.span(Phase.NOT_RUNNING, "not running", due_ns, now_ns)

    def close(self, kind: str, reason: str) -> None:
        """The loop ends because of this; nothing is recorded afterwards."""
        self.settle()
        if self._marks is not None:
            self._marks.is_deferred = False  # nobody else writes any more
            self._marks.settle()
        if self.timeline.is_recording:
            now_ns = time.monotonic_ns()
            self.timeline.span(Phase.END, f"{kind}: {reason}"[:_MAX_TEXT], now_ns, now_ns)
        self.timeline.close()
        self.clocks.close()

    def _words_of(self, request: Request) -> _Words:
        found = self._words.get(id(request))
        if found is None:
            if len(self._words) >= _MAX_REQUESTS:
                self._words.clear()
            name = request.key.collective.upper()
            # Calls that are about the job and not about tensors have no phases of their own.
            negotiating = int(Phase.__members__.get(f"NEGOTIATE_{name}", Phase.QUEUE))
            whole = int(Phase.__members__.get(name, Phase.QUEUE))
            found = self._words[id(request)] = _Words(
                request, request.label, negotiating, whole, negotiating == whole + NEGOTIATING)
        return found


def _bytes_of(bucket: Bucket, entries: Mapping[int, TensorEntry]) -> int:
    """What a bucket holds; an allgather's is its result."""
    if bucket.num_bytes:
        return bucket.num_bytes
    entry = entries[bucket.segments[0].slot]
    gathers = bucket.request.key.collective == Collective.ALLGATHER
    return sum(buffer.array.nbytes for buffer in (entry.outputs if gathers else entry.inputs))
