"""Job: all rings of a job on one clock, that of rank 0, as arrays and spans to compute with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hvdlite.errors import format_ranks
from hvdlite.fusion import num_bytes
from hvdlite.timeline.clock import ClockMap, Reading
from hvdlite.timeline.phase import Phase
from hvdlite.timeline.ring import Ring, TimelineError, Wanted, check_complete, read_directory, read_header, read_ring

#: Phases that end an entry.
FINISHED = (Phase.ALLREDUCE, Phase.ALLGATHER, Phase.BROADCAST, Phase.ALLTOALL, Phase.REDUCESCATTER, Phase.BARRIER)
#: By how much a time may be off that was brought to another clock and back.
_ROUNDED_NS = 1000
NEGOTIATED = tuple(range(Phase.NEGOTIATE_ALLREDUCE, Phase.NEGOTIATE_BARRIER + 1))


@dataclass(frozen=True)
class Rank:
    """One rank's records, of all its threads, in order of start; times in ns of rank 0's clock, from ``Job.zero_ns``.

    From ``since_ns`` on the recording is whole: nothing is lost or left out for being old.
    ``records["name"]`` is an index into ``Job.names``; ``thread`` tells which ring of the rank each record is from.
    """

    rank: int
    host: str
    records: np.ndarray
    thread: np.ndarray
    threads: tuple[str, ...]
    clock: ClockMap
    error_ns: float
    lost: int
    torn: int
    cut: int
    header: dict[str, Any]
    since_ns: int = 0

    def of(self, *phases: int) -> np.ndarray:
        """The records of some phases."""
        return self.records[np.isin(self.records["phase"], phases)]


@dataclass(frozen=True)
class Job:
    """What a job recorded. ``about``: by name, what was said of it on each rank."""

    size: int
    ranks: tuple[Rank, ...]
    names: tuple[str, ...]
    missing: tuple[int, ...]
    zero_ns: int
    epoch_ns: int
    about: dict[str, dict[int, dict[str, Any]]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    of_day: ClockMap = field(default_factory=ClockMap)

    def from_time_of_day(self, epoch_ns: np.ndarray) -> np.ndarray:
        """Times of this job, in ns from its first record, of times of day. *Shapes*: any; int64."""
        return self.of_day.to_zero(epoch_ns) - self.zero_ns

    @property
    def time_of_day_error_ns(self) -> float:
        """How well times of day can be placed: as both clocks were read, and by how much the time of day was set meanwhile."""
        return self.of_day.worst_error_ns + self.of_day.spread_ns

    @property
    def since_ns(self) -> int:
        """From when on the recordings of all ranks are whole."""
        return max(rank.since_ns for rank in self.ranks)

    @property
    def settings(self) -> dict[str, Any]:
        """What the job was run with, as its rings tell."""
        return self.ranks[0].header

    def bytes_of(self, name: str, recorded: int = 0) -> int:
        """Size of a call's tensors: as recorded, or added up from their shapes."""
        if recorded:
            return int(recorded)
        for about in self.about.get(name, {}).values():
            return sum(num_bytes(dtype, [max(0, one) for one in shape])
                       for dtype, shape in zip(about["dtypes"], about["shapes"], strict=True))
        return 0


def load_job(
    directory: Path | str, *, allow_missing: bool = False, allow_unsynced: bool = False, newest: int | None = None,
    steps: tuple[int, int] | None = None,
) -> Job:
    """Read the rings in ``directory`` and bring them onto one clock.

    ``newest``: so many records of each ring; ``steps``: the first and the first not to read. Memory holds what is read.
    Raises: TimelineError without rings, records or those steps; for missing ranks, and for clocks that were never compared,
    unless allowed.
    """
    wanted = None if steps is None else _within(directory, steps, allow_unsynced)
    rings = read_directory(directory, newest=newest, wanted=wanted)
    missing = check_complete(directory, rings, allow_missing)
    return merge(rings, missing, allow_unsynced=allow_unsynced, directory=str(directory))


def _within(directory: Path | str, steps: tuple[int, int], allow_unsynced: bool) -> Callable[[int], Wanted]:
    """What happened from the first rank's begin of the first step to the last one's end of the last step, on any rank."""
    by_rank: dict[int, list[Ring]] = {}
    for path in sorted(Path(directory).glob("ring-*.hvdring")):
        header = read_header(path)
        if header["thread"] != "background":  # the large one, which has no marks
            by_rank.setdefault(header["rank"], []).append(read_ring(path, wanted=lambda found: np.isin(
                found["phase"], (Phase.STEP, Phase.CLOCK))))
    zero_clock = by_rank[0][0].header["clock"] if 0 in by_rank else None
    clocks = {rank: _clock_of(rank, own, zero_clock, allow_unsynced, [], str(directory)) for rank, own in by_rank.items()}
    begin, end = 1 << 62, -1 << 62
    for rank, own in by_rank.items():
        for ring in own:
            marked = ring.records[(ring.records["phase"] == Phase.STEP) & _are_of(ring.records, steps)]
            if len(marked):
                begin = min(begin, int(clocks[rank].to_zero(marked["start_ns"]).min()))
                end = max(end, int(clocks[rank].to_zero(marked["end_ns"]).max()))
    if begin > end:
        raise TimelineError(f"--steps {steps[0]}:{steps[1]}: no such step was marked, or it is lost: see hvdtrace report")

    def of(rank: int) -> Wanted:
        first, last = clocks.get(rank, ClockMap()).from_zero(np.array([begin, end])) + (-_ROUNDED_NS, _ROUNDED_NS)
        return lambda found: (found["end_ns"] >= first) & (found["start_ns"] <= last) & (
            (found["phase"] != Phase.STEP) | _are_of(found, steps))

    return of


def _are_of(records: np.ndarray, steps: tuple[int, int]) -> np.ndarray:
    return (records["count"] >= steps[0]) & (records["count"] < steps[1])


def merge(rings: list[Ring], missing: list[int], *, allow_unsynced: bool = False, directory: str = "") -> Job:
    """Make a Job of rings."""
    by_rank: dict[int, list[Ring]] = {}
    for ring in rings:
        by_rank.setdefault(ring.header["rank"], []).append(ring)
    notes: list[str] = []
    # Where rank 0 is missing, its clock is known by the readings of the others all the same, unless they need none.
    identities = {ring.header["clock"] for ring in rings}
    zero_clock = by_rank[0][0].header["clock"] if 0 in by_rank else identities.pop() if len(identities) == 1 else None
    clocks = {rank: _clock_of(rank, own, zero_clock, allow_unsynced, notes, directory) for rank, own in by_rank.items()}
    names: dict[str, int] = {}
    about: dict[str, dict[int, dict[str, Any]]] = {}
    moved: dict[int, tuple[np.ndarray, np.ndarray, float]] = {}
    for rank, own in by_rank.items():
        parts, threads = [], []
        for number, ring in enumerate(own):
            records = ring.records[~np.isin(ring.records["phase"], (Phase.CLOCK, Phase.TIME_OF_DAY))].copy()
            ids = np.array([names.setdefault(name, len(names)) for name in ring.names] or [0], np.uint32)
            records["name"] = ids[records["name"]]
            for field_name in ("start_ns", "end_ns"):
                records[field_name] = clocks[rank].to_zero(records[field_name])
            for name_id, facts in ring.about.items():
                about.setdefault(ring.names[name_id], {})[rank] = facts
            parts.append(records)
            threads.append(np.full(len(records), number, np.int64))
        together = np.concatenate(parts)
        order = np.argsort(together["start_ns"], kind="stable")
        raw = np.concatenate([ring.records["start_ns"] for ring in own])
        error = float(clocks[rank].error_ns(raw).max(initial=0.0)) if len(raw) else 0.0
        moved[rank] = together[order], np.concatenate(threads)[order], error
    zero_ns = min(int(records["start_ns"].min()) for records, _, _ in moved.values() if len(records))
    ranks = []
    for rank, own in sorted(by_rank.items()):
        records, thread, error = moved[rank]
        records["start_ns"] -= zero_ns
        records["end_ns"] -= zero_ns
        ranks.append(Rank(
            rank, own[0].header["host"], records, thread, tuple(ring.header["thread"] for ring in own), clocks[rank], error,
            sum(ring.lost for ring in own), sum(ring.torn for ring in own), sum(ring.cut for ring in own), own[0].header,
            max(0, *(int(clocks[rank].to_zero(np.array([ring.since_ns]))[0]) - zero_ns for ring in own if ring.since_ns > 0), 0)))
    for one in ranks:
        if one.lost:
            notes.append(f"rank {one.rank}: {one.lost} oldest records were overwritten: give --timeline-ring-mb more, or "
                         "record fewer steps with --timeline-steps")
        if one.torn:
            notes.append(f"rank {one.rank}: {one.torn} record(s) torn by the end of the process, left out")
    if missing:
        notes.append(f"no ring of {format_ranks(missing)}: what those ranks did is not in here")
    first = min(by_rank)
    of_day = _time_of_day(by_rank[first], clocks[first])
    epoch_ns = int(of_day.from_zero(np.array([zero_ns]))[0])
    return Job(max(ring.header["size"] for ring in rings), tuple(ranks), tuple(names), tuple(missing), zero_ns, epoch_ns, about,
               tuple(notes), of_day)


def _time_of_day(rings: list[Ring], clock: ClockMap) -> ClockMap:
    """From the time of day to rank 0's clock, by what one rank's rings tell."""
    found = [(ring.header["monotonic_ns"], ring.header["realtime_ns"], float(ring.header["realtime_error_ns"])) for ring in rings]
    for ring in rings:
        readings = ring.records[ring.records["phase"] == Phase.TIME_OF_DAY]
        found += readings[["start_ns", "end_ns", "value"]].tolist()
    zero = clock.to_zero(np.array([one[0] for one in found], np.int64)).tolist()
    return ClockMap([Reading(of_day, at, error) for (_, of_day, error), at in zip(found, zero, strict=True)])


def _clock_of(
    rank: int, rings: list[Ring], zero_clock: str | None, allow_unsynced: bool, notes: list[str], directory: str,
) -> ClockMap:
    """How a rank's clock becomes rank 0's."""
    header = rings[0].header
    if rank == 0 or header["clock"] == zero_clock:
        return ClockMap()
    readings = [Reading(int(record["start_ns"]), int(record["end_ns"]), float(record["value"]))
                for ring in rings for record in ring.records[ring.records["phase"] == Phase.CLOCK]]
    if readings:
        return ClockMap(readings)
    if not allow_unsynced:
        raise TimelineError(
            f"{directory}: rank {rank} on {header['host']} has another clock than rank 0, and the two were never compared (the "
            "job ended before that, or the clock ring was not copied): pass --allow-unsynced to place it by the time of day")
    notes.append(f"rank {rank}: its clock was never compared with rank 0's: placed by the time of day, "
                 "off by milliseconds or more")
    # Both by their own times of day; rank 0's is added by the caller's epoch of rank 0.
    zero = header["realtime_ns"] - header["monotonic_ns"]
    return ClockMap([Reading(0, zero - _zero_epoch(directory), 5e6)])


def _zero_epoch(directory: str) -> int:
    """Rank 0's time of day less its clock, from its ring's header."""
    for path in sorted(Path(directory).glob("ring-00000-*.hvdring")):
        header = read_header(path)
        return int(header["realtime_ns"] - header["monotonic_ns"])
    return 0
