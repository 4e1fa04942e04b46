"""The background thread: the only one that touches MPI and NCCL, but for callers whom it lets in while it rests (``FastPath``).

Why one thread: collectives must be issued in the same order on every rank, user threads submit in any order,
and MPI implementations differ in how well they bear several threads. So user threads only queue entries; this
thread agrees with the other ranks on what is ready everywhere and executes that in one total order.

A cycle (``run_cycle``):
a) take what was queued since the last one;
b) exchange one bit per slot and the status bits with all ranks, in one small collective;
c) if any rank has something new, send all pending requests to rank 0 and take its Agreement;
d) compile (or recall) the plan for what is ready everywhere, and execute it;
e) complete the handles.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from hvdlite import stall
from hvdlite.backoff import sleep_s
from hvdlite.collectives import EXECUTE, allreduce
from hvdlite.collectives import device as on_device
from hvdlite.collectives.join import neutral_entry
from hvdlite.collectives.workspace import Workspace
from hvdlite.compression.policy import Decision
from hvdlite.compression.residual import ResidualStore
from hvdlite.config import Config
from hvdlite.control.base import Begun, ControlPlane, FastPath, Outcome
from hvdlite.dataplane import order
from hvdlite.dataplane.base import DataPlane
from hvdlite.dataplane.gpus import Gpus
from hvdlite.errors import (
    HorovodInternalError,
    InternalError,
    InvalidRequestError,
    MismatchError,
    NotInitializedError,
    PeerFailedError,
    ProcessSetRemovedError,
    StalledError,
    format_ranks,
)
from hvdlite.fusion import Bucket, Plan, compile_plan, num_bytes
from hvdlite.message import SINGULAR, Agreement, Collective, Farewell, Key, Report, Request
from hvdlite.negotiation import negotiate
from hvdlite.recording import Recording
from hvdlite.response_cache import SlotTable
from hvdlite.tensor_queue import TensorEntry, TensorQueue, taken
from hvdlite.timeline.phase import Phase
from hvdlite.timeline.recorder import Timeline

_log = logging.getLogger("hvdlite")

#: Status bits; every rank sends them inverted, so that AND tells "some rank".
_LEAVE, _EXCHANGE, _JOINED, _CLOCKS, _STATUS = 1, 2, 4, 8, 15

#: Seconds after which a pending entry is reported to rank 0 once more, so that calls which can never match
#: are found; then every ``stall_warning_s``.
_FIRST_REPORT_S = 0.4
#: Sleeps shorter than this cannot be part of a long silence.
_NOTICED_S = 1e-3
#: After seconds without work heartbeats come more rarely: after this share of the time since, at most so many times the setting.
#: Chosen: what waits for a heartbeat alone are errors and ends of other ranks, which may come 0.2 s later.
_IDLE_SHARE, _RAREST_HEARTBEAT = 0.1, 4
_CHECK_INTERVAL_NS = 100_000_000


class Background:
    """The loop and its state.

    *Threads*: ``leave`` from any thread; everything else from the thread that runs the loop. The hand-over
    of entries and handles is argued in ``tensor_queue`` and ``handle``.
    """

    def __init__(
        self, config: Config, control: ControlPlane, plane: DataPlane, timeline: Timeline, clocks: Timeline | None = None,
        gpus: Gpus | None = None, fast_path: FastPath | None = None,
    ) -> None:
        """``plane`` is that of all ranks; those of other process sets are made from it. ``clocks``: what readings of clocks are
        recorded into. ``gpus``: how tensors of this rank's GPU travel. ``fast_path``: how callers do without this thread."""
        self.queue = TensorQueue()
        self.slots = SlotTable(config.cache_capacity)
        self.num_cycles = 0
        self.num_completed = 0
        self.is_clean = True
        #: Whether the loop ended because some rank's process did, or may have: MPI's Finalize would wait for that.
        self.lost_ranks = False
        self._config = config
        self._cycle_time_s = config.cycle_time_ms / 1e3
        self._control = control
        self._planes = {0: plane}
        # A cycle time asks for calls to be gathered.
        self._fast_path = None if self._cycle_time_s else fast_path
        self._gpus = gpus or Gpus(config.gpu_plane, hierarchical=config.hierarchical_allreduce)
        self._process_sets: dict[int, tuple[int, ...]] = {0: tuple(range(control.topology.size))}
        self._next_process_set_id = 1
        self.recording = Recording(timeline, clocks, config.timeline_mark_cycles)
        self._num_operations = self._num_plans = 0
        self._workspace = Workspace(timeline, config.hierarchical_quantized)
        self._calls: deque[Callable[[], None]] = deque()
        self._rank, self._num_ranks = control.topology.rank, control.topology.size
        self._pending: dict[Key, TensorEntry] = {}
        self._mask = 0  # bit s: slot s is pending here, with the request the slot holds
        self._granted = 0  # bit s: slot s need not be pending here: not a member, or joined
        self._has_joined = self._someone_joined = False
        self._anywhere = 0
        self._must_exchange = False
        self._last_joined = -1
        self._farewell: Farewell | None = None
        self._ended = False
        self._abandoned: HorovodInternalError | None = None
        self._next_check_ns = 0
        self._awaited_since = 0.0
        self._progress_s = time.monotonic()
        self._last_warning_s = -float("inf")
        self._thread = threading.Thread(target=self.run, name="hvdlite-background", daemon=True)

    @property
    def residuals(self) -> ResidualStore:
        """What quantised exchanges have not sent yet."""
        return self._workspace.residuals

    @property
    def decisions(self) -> list[Decision]:
        """What Compression.auto has decided so far."""
        return [one for auto in list(self._workspace.autos.values()) for one in list(auto.decisions.values())]

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for the loop to end; tell whether it has."""
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def set_timeline(self, timeline: Timeline, clocks: Timeline, finish: Callable[[], None]) -> None:
        """Record into ``timeline`` from the next cycle on, then call ``finish`` on the background thread. Any thread."""

        def change() -> None:
            self._workspace.timeline = timeline
            self.recording.record_into(timeline, clocks)
            finish()

        self._calls.append(change)
        self.queue.wake()

    def cpu_s(self) -> float:
        """Processor time that this thread has used so far; only while it runs."""
        assert self._thread.ident is not None
        return time.clock_gettime(time.pthread_getcpuclockid(self._thread.ident))

    def leave(self, reason: str, *, failed: bool, is_final: bool = False) -> None:
        """Ask all ranks to leave the loop; the first call's reason counts."""
        if self._farewell is None:
            self._farewell = Farewell(True, failed, reason, 0, is_final)
        self.queue.wake()

    def in_flight(self) -> list[TensorEntry]:
        """What has been submitted here and has not ended. Any thread: copies are single steps."""
        return [*list(self._pending.values()), *self.queue.waiting()]

    def run_here(self, entry: TensorEntry) -> bool:
        """Do ``entry`` in the calling thread if that is possible; tell whether it is done, or begun, and not to be queued."""
        fast_path = self._fast_path
        if fast_path is None:
            return False
        outcome = fast_path.run(entry, self.slots, self.queue)
        if outcome == Outcome.DONE:
            allreduce.finish(entry.inputs[0].array, entry.request, self._num_ranks)
            entry.handle.complete(entry.result(entry))
        return outcome != Outcome.NOTHING

    def abandon(self, error: HorovodInternalError, takeover_s: float) -> None:
        """End with ``error``, whatever is in flight; a loop that does not come back from MPI in time is left to itself.

        *Threads*: any but the loop's. A loop that does come back later finds nothing pending and ends.
        """
        if self._ended:
            return
        error.is_final = True
        self._abandoned = error
        self.queue.wake()
        if not self.join(takeover_s) and not self._ended:
            self._end(error)

    def run(self) -> None:
        """Cycle until all ranks leave; whatever happens, every handle ends."""
        _shorten_timer_slack()
        try:
            with np.errstate(all="ignore"):
                while not self._ended:
                    self._look_for_abandonment()
                    while self._calls:
                        self._calls.popleft()()
                    if not self._pending and not len(self.queue) and self._farewell is None:
                        if self._rest():
                            continue
                        self.recording.timeline.flush()
                    if self._cycle_time_s:
                        self._wait_for_more()
                    if self.run_cycle():
                        self._progress_s = time.monotonic()
                    elif self._pending and not len(self.queue):
                        self.recording.sleep(self.queue.wait_for_wake, sleep_s(time.monotonic() - self._progress_s))
        except HorovodInternalError as error:
            self._end(self._abandoned or error)  # what fails after that fails because of it
        except BaseException as error:
            _log.exception("the background thread failed")
            failure = InternalError(f"background thread: {type(error).__name__}: {error}: please report this")
            self._end(failure)
        if self._abandoned is not None:  # another thread has ended this rank: what was handed over since is not lost
            self._fail_all(self._abandoned)

    def _rest(self) -> bool:
        """Sleep until there is something to do. Tell whether there is nothing: callers have run cycles without this thread."""
        fast_path = self._fast_path
        if fast_path is None or self._must_exchange or self._has_joined or self._someone_joined:
            self.recording.sleep(self.queue.wait, self._heartbeat_s())
            return False
        num_words, width, full = self.slots.layout
        bits = _STATUS | self._granted << 64 | full << (64 + width)
        fast_path.is_recording = self.recording.is_recording
        fast_path.open(bits, 1 + 2 * num_words)
        try:
            self.recording.sleep(self.queue.wait, self._heartbeat_s())
        finally:
            fast_path.close()
        has_worked = self._note_finished(fast_path)
        return has_worked and not (len(self.queue) or self._calls or self._farewell or fast_path.begun
                                   or self.recording.is_comparison_due(False))

    def _note_finished(self, fast_path: FastPath) -> bool:
        """Count what callers have done themselves, as if it had been done here; tell whether there was anything."""
        num_before = self.num_cycles
        for note in fast_path.finished():
            self.num_cycles += 1
            self.num_completed += 1
            self._num_operations += 1
            self._num_plans += 1
            self.slots.touch((note.slot,))
            if note.entry is not None:
                plan = self.slots.plan(1 << note.slot, self._compile)
                self.recording.own_call(note, plan, self._num_plans, self._num_operations)
        num_calls = self.num_cycles - num_before
        if num_calls:
            self._control.num_collectives += num_calls
            self._control.num_bytes += num_calls * 8 * (1 + 2 * self.slots.layout[0])
            self._progress_s = time.monotonic()
        return num_calls > 0

    def run_cycle(self) -> bool:
        """Run one cycle; tell whether anything was agreed or anything changed on any rank."""
        self.num_cycles += 1
        fast_path = self._fast_path
        begun = self._take_over(fast_path) if fast_path is not None and fast_path.begun else Begun.NOTHING
        start_ns = time.monotonic_ns() if self.recording.is_recording else 0
        if begun == Begun.EXCHANGING:
            self._execute(self.slots.plan(self._mask, self._compile), start_ns, self._finish_exchange)
            return True
        entries = self.queue.drain()
        if entries:
            self._admit(entries)
        status, everywhere, anywhere = self._agree(begun)
        if status & _CLOCKS:
            self.recording.compare_clocks(self._control)
        if status & _LEAVE:
            self._take_leave()
            return True
        if status & _EXCHANGE:
            everywhere = self._exchange()
        else:
            everywhere &= anywhere  # what nobody has pending is not ready because all could do without
        changed = anywhere != self._anywhere or bool(status & _EXCHANGE)
        self._anywhere = anywhere & ~everywhere
        self._someone_joined = bool(status & _JOINED)
        if everywhere and not self._ended:
            self._execute(self.slots.plan(everywhere, self._compile), start_ns)
        elif self._pending:
            self._look_for_stalls()
        return changed or bool(everywhere)

    def _take_over(self, fast_path: FastPath) -> Begun:
        """Go on with the call that a caller has begun."""
        begun = fast_path.begun
        entry = fast_path.take_over(self.queue)
        assert entry is not None
        self._admit([entry])
        if begun == Begun.FAILED:
            fast_path.complete_exchange(self._pause)  # raises
        return begun

    def _finish_exchange(
        self, bucket: Bucket, entries: Mapping[int, TensorEntry], plane: DataPlane, workspace: Workspace
    ) -> None:
        """What is left of an allreduce that a caller has begun."""
        assert self._fast_path is not None
        array, began_ns = entries[bucket.segments[0].slot].inputs[0].array, time.monotonic_ns()
        self._fast_path.complete_exchange(self._pause)
        allreduce.finish(array, bucket.request, plane.size)
        workspace.passage = Phase.MPI_ALLREDUCE, began_ns, 0, 0, time.monotonic_ns()

    def _admit(self, entries: list[TensorEntry]) -> None:
        self._progress_s = time.monotonic()
        is_recording = self.recording.is_recording
        for entry in entries:
            key = entry.request.key
            if key in self._pending:  # after an interrupt: see TensorQueue.adopt
                entry.handle.fail(taken(key))
                continue
            self._pending[key] = entry
            if is_recording:
                self.recording.submission(entry)
            if key.process_set_id not in self._process_sets:
                self._fail(key, ProcessSetRemovedError(f"{key}: its process set was removed before it came to it"))
                continue
            slot = self._matches(entry.request)
            if slot is None:
                self._must_exchange = True
                self._has_joined |= key.collective == Collective.JOIN
            else:
                self._mask |= 1 << slot
                # Cached or not: rank 0 has to see that this cannot go on without those who joined.
                self._must_exchange |= self._someone_joined and key.collective != Collective.ALLREDUCE

    def _matches(self, request: Request) -> int | None:
        """The slot that holds exactly ``request``, unless rank 0 has to look at it each time."""
        return None if request.key.collective in SINGULAR else self.slots.matches(request)

    def _heartbeat_s(self) -> float:
        """How long a rank with nothing to do sleeps; the longer, the longer nothing has happened. It looks soon again while
        process sets without it are at work, because nothing of theirs is agreed without it."""
        heartbeat_s, idle_s = self._config.heartbeat_ms / 1e3, time.monotonic() - self._progress_s
        if len(self._process_sets) == 1:
            return min(max(heartbeat_s, _IDLE_SHARE * idle_s), _RAREST_HEARTBEAT * heartbeat_s)
        return sleep_s(idle_s, heartbeat_s)

    def _agree(self, begun: Begun) -> tuple[int, int, int]:
        """Exchange bits, unless that was begun by a caller; return (status, ready everywhere, pending anywhere).

        *Format*: 64 status bits, one bit per slot that is pending here (or can do without this rank), one per slot that
        is not pending here; AND tells "all" of the second and, inverted, "some" of the first and the third.
        """
        num_words, width, full = self.slots.layout
        asked = (_LEAVE if self._farewell else 0) | (_EXCHANGE if self._must_exchange else 0) | (
            _JOINED if self._has_joined else 0)
        if self.recording.is_comparison_due(self._farewell is not None):
            asked |= _CLOCKS
        bits = (asked ^ _STATUS) | (self._mask | self._granted) << 64 | (self._mask ^ full) << (64 + width)
        self._awaited_since = 0.0
        waited_s = 0.0 if self._must_exchange else time.monotonic() - self._progress_s
        if begun and self._fast_path is not None:
            agreed = self._fast_path.agree(self._pause, waited_s)
        else:
            agreed = self._control.agree(bits, 1 + 2 * num_words, self._pause, waited_s)
        if self.recording.asleep_ns:
            self.recording.awake()
        return agreed & _STATUS ^ _STATUS, agreed >> 64 & full, agreed >> (64 + width) ^ full

    def _exchange(self) -> int:
        """Send all pending requests to rank 0, apply its Agreement, return what is ready."""
        self.recording.settle()
        self._must_exchange = False
        now_ns = time.monotonic_ns()
        entries = list(self._pending.values())
        report = Report(tuple(entry.request for entry in entries),
                        tuple((now_ns - entry.submitted_ns) / 1e9 for entry in entries))
        reports = self._control.gather(report)
        agreement = None if reports is None else self._decide(reports)
        agreed: Agreement = self._control.broadcast(agreement)
        self.slots.apply(agreed)
        for key, message in agreed.errors:
            self._fail(key, MismatchError(message))
        self._mask = sum(1 << slot for entry in self._pending.values()
                         if (slot := self._matches(entry.request)) is not None)
        self._granted = self._grant()
        self._last_joined = agreed.last_joined
        if agreed.fatal:
            self.is_clean = False
            self._end(StalledError(f"{agreed.fatal}: the job ends on every rank; look at the ranks named"))
        return sum(1 << slot for slot in agreed.ready)

    def _decide(self, reports: list[Report]) -> Agreement:
        """Rank 0's part. Whatever goes wrong in it is told to the other ranks, who wait for an answer."""
        try:
            self._warn_of_stalls(reports)
            return negotiate(self.slots, reports, self._process_sets, stall_shutdown_s=self._config.stall_shutdown_s)
        except Exception as error:
            _log.exception("negotiation failed")
            return Agreement((), (), (), (), f"negotiation on rank 0 failed: {type(error).__name__}: {error}")

    def _grant(self) -> int:
        """The slots that this rank holds nobody up in."""
        if not self._has_joined and len(self._planes) == len(self._process_sets):
            return 0
        return sum(
            1 << slot for slot, key in self.slots.assigned()
            if key.process_set_id not in self._planes
            or (self._has_joined and key.collective == Collective.ALLREDUCE and key.process_set_id == 0))

    def _compile(self, requests: list[tuple[int, Request]]) -> Plan:
        return compile_plan(requests, self._config.fusion_threshold_bytes)

    def _execute(self, plan: Plan, start_ns: int, instead: Callable[..., None] | None = None) -> None:
        """Run the plan's buckets in order, by ``instead`` if that is given; complete each entry after its last bucket."""
        pending, planes, workspace = self._pending, self._planes, self._workspace
        entries = {slot: entry for slot, key in plan.keys if (entry := pending.get(key)) is not None}
        if len(entries) < len(plan.slots):
            self._stand_in(plan, entries)
        # Counted in every case, so that a number means the same on all ranks.
        first, self._num_operations = self._num_operations + 1, self._num_operations + len(plan.buckets)
        self._num_plans += 1
        recording = self.recording
        is_recording = recording.is_recording
        if is_recording:
            recording.negotiation(plan, start_ns, self._num_plans, first)
        self.slots.touch(plan.slots)  # before the handles: what follows them delays the threads they wake
        for number, bucket in enumerate(plan.buckets, first):
            key, began_ns = bucket.request.key, 0
            if is_recording:
                began_ns = time.monotonic_ns()
                recording.timeline.operation, recording.timeline.process_set = number, key.process_set_id
            if key.collective in SINGULAR:
                self._change_job(pending[key])
            elif key.process_set_id in planes:
                run, plane = instead or EXECUTE[key.collective], planes[key.process_set_id]
                workspace.passage = None
                if bucket.request.device == "cpu":
                    run(bucket, entries, plane, workspace)
                else:
                    on_device.execute(bucket, entries, plane, self._gpus, workspace, run)
                    workspace.note_passage(bucket)  # copies came before and after
                passage = workspace.passage
                ended_ns = passage[-1] if passage else time.monotonic_ns() if is_recording else 0
                for slot in bucket.finishes:
                    self._complete(slot, entries[slot], is_recording)
                if is_recording:
                    recording.bucket(bucket, entries, passage, began_ns, ended_ns)

    def _stand_in(self, plan: Plan, entries: dict[int, TensorEntry]) -> None:
        """After join(), take part in what others submit, with values that change nothing."""
        for slot in plan.slots:
            request = self.slots.requests[slot]
            if slot not in entries and request is not None and request.key.process_set_id in self._planes:
                entries[slot] = neutral_entry(request)

    def _change_job(self, entry: TensorEntry) -> None:
        """Execute what is about all ranks and not about tensors."""
        key = entry.request.key
        del self._pending[key]
        try:
            if key.collective == Collective.JOIN:
                self._has_joined = False
                self._granted = self._grant()
                entry.handle.complete(self._last_joined)
            elif key.collective == Collective.ADD_PROCESS_SET:
                entry.handle.complete(self._add_process_set(key, entry.request.shapes[0]))
            else:
                entry.handle.complete(self._remove_process_set(key, entry.request.shapes[0][0]))
        except InvalidRequestError as error:
            entry.handle.fail(error)
        except BaseException as error:
            entry.handle.fail(error)
            raise  # something done on all ranks went wrong here: the loop ends

    def _add_process_set(self, key: Key, ranks: tuple[int, ...]) -> int:
        for process_set_id, known in self._process_sets.items():
            if known == ranks:
                raise InvalidRequestError(
                    f"{key}: a process set of {format_ranks(ranks)} exists already (id {process_set_id}): use that one")
        process_set_id = self._next_process_set_id
        self._next_process_set_id += 1
        plane = self._planes[0].subset(ranks)
        if plane is not None:
            self._planes[process_set_id] = plane
        self._process_sets[process_set_id] = ranks
        return process_set_id

    def _remove_process_set(self, key: Key, process_set_id: int) -> bool:
        if process_set_id not in self._process_sets:
            raise InvalidRequestError(f"{key}: there is no process set {process_set_id} (any more)")
        for other in [other for other in self._pending if other.process_set_id == process_set_id]:
            self._fail(other, ProcessSetRemovedError(f"{other}: its process set was removed while it was in flight: "
                                                     "wait for all its operations before remove_process_set()"))
        self.slots.remove_process_set(process_set_id)
        del self._process_sets[process_set_id]
        self.residuals.drop(process_set_id)
        self._workspace.autos.pop(process_set_id, None)
        plane = self._planes.pop(process_set_id, None)
        if plane is not None:
            self._gpus.close(process_set_id)
            plane.close()
        self._mask = sum(1 << slot for entry in self._pending.values()
                         if (slot := self._matches(entry.request)) is not None)
        self._granted = self._grant()
        return True

    def _complete(self, slot: int, entry: TensorEntry, is_recording: bool) -> None:
        key = entry.request.key
        if self._pending.pop(key, None) is None:
            return  # this rank only stood in
        self._mask &= ~(1 << slot)
        try:
            for buffer in entry.outputs:
                if buffer.write_back:
                    buffer.write_back(*(() if buffer.on is None else (buffer.on.stream,)))
            result = entry.result(entry)
            arrive = None if entry.ready is None else order.finish(entry)
        except Exception as error:  # this rank's own business: the exchange itself is over
            entry.handle.fail(InternalError(f"{key}: its result cannot be handed over: {type(error).__name__}: {error}"))
            self.queue.notice_end()
            return
        if is_recording:
            recording, awaited_ns = self.recording, entry.handle.awaited_ns
            recording.done.append((slot, entry, recording.timeline.operation, time.monotonic_ns(), awaited_ns))
        self.num_completed += 1
        entry.handle.complete(result, arrive)
        self.queue.notice_end()

    def _fail(self, key: Key, error: BaseException) -> None:
        entry = self._pending.pop(key, None)
        if entry is not None:
            if self.recording.is_recording:
                self.recording.failure(entry, str(error))
            entry.handle.fail(error)
            self.queue.notice_end()

    def _wait_for_more(self) -> None:
        """Give free-standing calls up to ``cycle_time_ms`` to gather company; anything else goes at once."""
        wait_s = self._cycle_time_s
        deadline = time.monotonic() + wait_s
        while wait_s > 0 and self._farewell is None and self.queue.holds_only_small(
            self._config.fusion_threshold_bytes, lambda request: len(request.shapes) == 1,
            lambda request: sum(map(num_bytes, request.dtypes, request.shapes)),
        ):
            self.queue.wait(wait_s)
            wait_s = deadline - time.monotonic()

    def _look_for_stalls(self) -> None:
        """Report entries again that have waited long, so that rank 0 sees what they wait for."""
        now_ns = time.monotonic_ns()
        if now_ns < self._next_check_ns:
            return
        self._next_check_ns = now_ns + _CHECK_INTERVAL_NS
        limits = [limit for limit in (self._config.stall_warning_s, self._config.stall_shutdown_s) if limit > 0]
        again_ns = 0 if self._config.stall_check_disable or not limits else int(min(limits) * 1e9)
        for entry in self._pending.values():
            waited_ns = now_ns - entry.submitted_ns
            due_ns = entry.reported_ns + again_ns if entry.reported_ns else int(_FIRST_REPORT_S * 1e9)
            if waited_ns >= due_ns and (again_ns or not entry.reported_ns):
                entry.reported_ns = waited_ns
                self._must_exchange = True

    def _warn_of_stalls(self, reports: Sequence[Report]) -> None:
        limit_s = self._config.stall_warning_s
        if self._config.stall_check_disable or time.monotonic() - self._last_warning_s < max(limit_s, 1.0):
            return
        pending: dict[Key, dict[int, Request]] = {}
        for rank, report in enumerate(reports):
            for request in report.requests:
                pending.setdefault(request.key, {})[rank] = request
        found = stall.stalled(reports, pending, self._process_sets, limit_s)
        if found:
            self._last_warning_s = time.monotonic()
            _log.warning("%s: look at what those ranks are doing", stall.describe(found))

    def _pause(self, seconds: float) -> bool:
        """Sleep, or until woken; say once that the control plane has not answered for long."""
        if seconds > _NOTICED_S:
            self._look_at_silence()
        self._look_for_abandonment()
        return self.recording.sleep(self.queue.wait_for_wake, seconds)

    def _look_for_abandonment(self) -> None:
        if self._abandoned is not None:
            raise self._abandoned
        self._gpus.poll()

    def _look_at_silence(self) -> None:
        limit_s = self._config.stall_warning_s
        if self._config.stall_check_disable or not limit_s:
            return
        now_s = time.monotonic()
        if not self._awaited_since:
            self._awaited_since = now_s
        elif now_s - self._awaited_since > limit_s:
            self._awaited_since = float("inf")
            _log.warning("rank %d: no answer from some rank for %g s: its process died, is stopped or swaps: look for it",
                         self._rank, limit_s)

    def _take_leave(self) -> None:
        """Tell one another why, then end on all ranks in the same cycle."""
        own = self._farewell or Farewell(False, False, "", 0)
        farewells = self._control.broadcast(self._control.gather(own._replace(num_pending=len(self._pending))))
        self.is_clean = not any(one.failed or one.num_pending for one in farewells)
        error = _leaving_error(farewells, self._rank)
        error.is_final = any(one.is_final for one in farewells)
        self.lost_ranks = error.is_final and not self.is_clean
        self._end(error)
        if self.is_clean and self._config.timeline_dir:
            self._control.gather(None)  # every rank's ring is complete now: rank 0 may merge them

    def _end(self, error: BaseException) -> None:
        """Refuse new entries, fail all that are here, stop. Nothing can slip between: ``close`` comes first."""
        self._ended = True
        if not isinstance(error, NotInitializedError):
            self.is_clean, self.lost_ranks = False, True
        reason, is_final = str(error), getattr(error, "is_final", False)

        def refusal() -> BaseException:
            """The cause stands first, as in the calls in flight: a caller can't know whether its own came before the end."""
            refused = NotInitializedError(f"{reason}\nhvdlite is no longer running since then: call init() first")
            refused.is_final = is_final
            return refused

        self.queue.close(refusal)
        self._fail_all(error)
        self._end_gpus(reason)
        try:
            self.recording.close(type(error).__name__, reason)
        except Exception:
            _log.exception("the timeline cannot be finished")  # what follows, the end of the job, matters more

    def _fail_all(self, error: BaseException) -> None:
        """Nothing that is in flight here will come."""
        fast_path = self._fast_path
        if fast_path is not None and fast_path.begun and threading.current_thread() is self._thread:  # so no caller is in
            left = fast_path.take_over(self.queue)
            if left is not None:
                self._pending[left.request.key] = left
        for entry in self.queue.drain():
            self._pending[entry.request.key] = entry
        for key in list(self._pending):
            failure = error
            if isinstance(error, NotInitializedError):
                failure = PeerFailedError(f"{key}: still waited for when the job ended: {error}")
                failure.is_final = getattr(error, "is_final", False)
            self._fail(key, failure)

    def _end_gpus(self, reason: str) -> None:
        """Streams come to their end: in good order, or because what they wait for is given up."""
        try:
            if self.is_clean:
                self._gpus.close()
            else:
                self._gpus.abort(reason)
        except Exception:
            _log.exception("the GPU's planes cannot be given up")


def _leaving_error(farewells: Sequence[Farewell], rank: int) -> HorovodInternalError:
    """What pending handles, and later calls, are told."""
    failed = [(peer, one.reason) for peer, one in enumerate(farewells) if one.failed]
    if failed:
        return PeerFailedError("; ".join(f"rank {peer} failed: {reason}" for peer, reason in failed))
    left = [peer for peer, one in enumerate(farewells) if one.leaving]
    reasons = sorted({farewells[peer].reason for peer in left})
    return NotInitializedError(f"{format_ranks(left)} left ({', '.join(reasons)})")


def _shorten_timer_slack() -> None:
    """Let this thread's short sleeps end on time: Linux adds 50 us by default."""
    try:
        ctypes.CDLL(None).prctl(29, 1000, 0, 0, 0)  # PR_SET_TIMERSLACK, nanoseconds
    except (OSError, AttributeError):
        pass  # not Linux: sleeps are a little longer
