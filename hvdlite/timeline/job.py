"""Job: all rings of a job on one clock, that of rank 0, as arrays and spans to compute with."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hvdlite.errors import format_ranks
from hvdlite.fusion import num_bytes
from hvdlite.timeline.clock import ClockMap, Reading
from hvdlite.timeline.phase import Phase
from hvdlite.timeline.ring import Ring, TimelineError, check_complete, read_directory

#: Phases that end an entry.
FINISHED = (Phase.ALLREDUCE, Phase.ALLGATHER, Phase.BROADCAST, Phase.ALLTOALL, Phase.REDUCESCATTER, Phase.BARRIER)
NEGOTIATED = tuple(range(Phase.NEGOTIATE_ALLREDUCE, Phase.NEGOTIATE_BARRIER + 1))


@dataclass(frozen=True)
class Rank:
    """One rank's records, of all its threads, in order of start; times in ns of rank 0's clock, from ``Job.zero_ns``.

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
) -> Job:
    """Read the rings in ``directory`` and bring them onto one clock.

    Raises: TimelineError without rings or records; for missing ranks, and for clocks that were never compared, unless allowed.
    """
    rings = read_directory(directory, newest=newest)
    missing = check_complete(directory, rings, allow_missing)
    return merge(rings, missing, allow_unsynced=allow_unsynced, directory=str(directory))


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
            records = ring.records[ring.records["phase"] != Phase.CLOCK].copy()
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
            sum(ring.lost for ring in own), sum(ring.torn for ring in own), sum(ring.cut for ring in own), own[0].header))
    for one in ranks:
        if one.lost:
            notes.append(f"rank {one.rank}: {one.lost} oldest records were overwritten: give --timeline-ring-mb more, or "
                         "record fewer steps with --timeline-steps")
        if one.torn:
            notes.append(f"rank {one.rank}: {one.torn} record(s) torn by the end of the process, left out")
    if missing:
        notes.append(f"no ring of {format_ranks(missing)}: what those ranks did is not in here")
    first = by_rank[min(by_rank)][0].header
    to_epoch = first["realtime_ns"] - int(clocks[min(by_rank)].to_zero(np.array([first["monotonic_ns"]]))[0])
    return Job(max(ring.header["size"] for ring in rings), tuple(ranks), tuple(names), tuple(missing), zero_ns,
               zero_ns + to_epoch, about, tuple(notes))


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
    from hvdlite.timeline.ring import read_header

    for path in sorted(Path(directory).glob("ring-00000-*.hvdring")):
        header = read_header(path)
        return int(header["realtime_ns"] - header["monotonic_ns"])
    return 0
