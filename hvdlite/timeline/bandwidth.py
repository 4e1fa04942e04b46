"""Bandwidths that collectives reached, and what they take to start. Pure functions of a Job.

*Units*: bytes and seconds. ``algbw`` is the size over the time, ``busbw`` what each link carried for it, as nccl-tests defines
them. An operation's time goes from its last rank's start to its last rank's end.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hvdlite.timeline.job import Job
from hvdlite.timeline.phase import Phase

#: Phases in which data moves, and how many of its bytes each link carries, for n ranks.
_FACTORS = {
    Phase.MPI_ALLREDUCE: lambda n: 2 * (n - 1) / n, Phase.MPI_ALLGATHER: lambda n: (n - 1) / n, Phase.MPI_BCAST: lambda n: 1.0,
    Phase.MPI_ALLTOALL: lambda n: (n - 1) / n, Phase.MPI_REDUCESCATTER: lambda n: (n - 1) / n,
    Phase.QUANTIZED_ALLREDUCE: lambda n: 2 * (n - 1) / n}


@dataclass(frozen=True)
class Transfers:
    """The operations of one phase on one process set. *Shapes*: (operations,)."""

    phase: Phase
    num_ranks: int
    bytes: np.ndarray
    seconds: np.ndarray
    starts_ns: np.ndarray

    @property
    def factor(self) -> float:
        """Of busbw; 0 where there is one rank."""
        return _FACTORS[self.phase](self.num_ranks) if self.num_ranks > 1 else 0.0


@dataclass(frozen=True)
class SizeRow:
    """Operations of about one size. ``busbw`` is 0 where it means nothing."""

    phase: str
    num_ranks: int
    bytes: float
    operations: int
    seconds: float
    algbw: float
    busbw: float


@dataclass(frozen=True)
class Fit:
    """Seconds of an operation = ``alpha_s`` + bytes / ``beta``, fitted to the medians of sizes. ``busbw`` for large ones.
    Where ``num_sizes`` is 1, ``beta`` is that of the measured link."""

    phase: str
    alpha_s: float
    beta: float
    busbw: float
    num_sizes: int

    def seconds(self, num_bytes: float) -> float:
        return self.alpha_s + num_bytes / self.beta


def find_transfers(job: Job) -> list[Transfers]:
    """Every operation that moved data, from all its ranks."""
    spans: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    for rank in job.ranks:
        records = rank.of(*_FACTORS)
        for operation, phase, start_ns, end_ns, num_bytes in records[
                ["operation", "phase", "start_ns", "end_ns", "num_bytes"]].tolist():
            spans.setdefault((operation, phase), []).append((start_ns, end_ns, num_bytes))
    found: dict[tuple[int, int], list[tuple[int, float, int]]] = {}
    for (_, phase), own in spans.items():
        start = max(one[0] for one in own)
        length = max(1, max(one[1] for one in own) - start)
        found.setdefault((phase, len(own)), []).append((own[0][2], length / 1e9, start))
    made = []
    for (phase, num_ranks), table in sorted(found.items()):
        columns = np.array(sorted(table, key=lambda one: one[2])).T
        made.append(Transfers(Phase(phase), num_ranks, columns[0], columns[1], columns[2].astype(np.int64)))
    return made


def by_size(transfers: Transfers) -> list[SizeRow]:
    """Rows for sizes between powers of two; medians."""
    rows = []
    classes = np.floor(np.log2(np.maximum(1, transfers.bytes))).astype(int)
    for one in np.unique(classes):
        own = classes == one
        size, seconds = float(np.median(transfers.bytes[own])), float(np.median(transfers.seconds[own]))
        rows.append(SizeRow(transfers.phase.name, transfers.num_ranks, size, int(own.sum()), seconds, size / seconds,
                            size / seconds * transfers.factor))
    return rows


def fit(transfers: Transfers, link: float = 0.0) -> Fit | None:
    """Fit a straight line through the medians of sizes; None where larger ones are not slower. Through a single size it goes with
    the slope of a ``link`` measured in bytes per second, if one was."""
    rows = by_size(transfers)
    if len(rows) == 1 and link and transfers.factor:
        slope = transfers.factor / link
        return Fit(transfers.phase.name, max(0.0, rows[0].seconds - rows[0].bytes * slope), 1 / slope, link, 1)
    sizes, seconds = np.array([row.bytes for row in rows]), np.array([row.seconds for row in rows])
    if len(rows) < 2:
        return None
    # Relative errors count alike, or the largest size would decide alone.
    weights = 1 / seconds
    design = np.stack([np.ones(len(rows)), sizes], axis=1) * weights[:, None]
    (alpha, slope), *_ = np.linalg.lstsq(design, seconds * weights, rcond=None)
    if alpha < 0:
        alpha, slope = 0.0, float((sizes * weights**2 * seconds).sum() / (sizes * weights) .dot(sizes * weights))
    if slope <= 0:
        return None
    return Fit(transfers.phase.name, float(alpha), float(1 / slope), float(transfers.factor / slope), len(rows))
