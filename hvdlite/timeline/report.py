"""Report: all that is to be said of a recorded job, as plain values; ``report_text`` and ``report_html`` word it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from hvdlite.timeline import bandwidth, blame, fusion_use
from hvdlite.timeline.bandwidth import Fit, SizeRow
from hvdlite.timeline.blame import Blame, TensorWait
from hvdlite.timeline.fusion_use import FusionUse, WhatIf
from hvdlite.timeline.job import Job
from hvdlite.timeline.path import CriticalPath, find_path
from hvdlite.timeline.phase import Phase
from hvdlite.timeline.ring import TimelineError
from hvdlite.timeline.steps import PARTS, Steps, find_steps

#: A gain below this is not worth a word. Chosen.
_LEAST_GAIN = 0.01


@dataclass(frozen=True)
class Compressed:
    """What compression did to one bucket. ``saved``: share of its bytes that did not travel; ``norm``: of the residual, last."""

    bucket: str
    operations: int
    bytes: int
    wire_bytes: int
    norm: float

    @property
    def saved(self) -> float:
        return 1 - self.wire_bytes / self.bytes if self.bytes else 0.0


@dataclass(frozen=True)
class Advice:
    """``gain``: the share of a step that it is expected to save; 0 where it cannot be told."""

    what: str
    gain: float


@dataclass(frozen=True)
class Report:
    """Everything; times in ns unless a name says otherwise."""

    job: Job
    steps: Steps
    blame: Blame
    tensors: list[TensorWait]
    fusion: FusionUse
    what_if: list[WhatIf]
    sizes: list[SizeRow]
    fits: list[Fit]
    compressed: list[Compressed]
    decisions: list[str]
    path: CriticalPath
    advice: list[Advice]
    violations: int
    errors: list[str]


def make_report(job: Job) -> Report:
    """Analyse a job. Raises: TimelineError where it holds no collective operation."""
    if not any(len(rank.of(Phase.BUCKET)) for rank in job.ranks):
        raise TimelineError(
            "0 collectives found: the job ended before its first one, or recorded other steps only: nothing to report")
    steps = find_steps(job)
    arrivals = blame.find_arrivals(job)
    found = blame.find_blame(job, steps, arrivals)
    transfers = bandwidth.find_transfers(job)
    link = min((rate for _, _, rate in found.links), default=0.0)
    fits = [fit for one in transfers if (fit := bandwidth.fit(one, link)) is not None]
    what_if = fusion_use.what_if(job, fits)
    path = find_path(job, steps, arrivals)
    errors = sorted({job.names[name] for rank in job.ranks for name in rank.of(Phase.ERROR)["name"].tolist()})
    decisions = [job.names[name] for rank in job.ranks for name in rank.of(Phase.DECISION)["name"].tolist()]
    return Report(
        job, steps, found, blame.tensor_waits(job, arrivals), fusion_use.fusion_use(job), what_if,
        [row for one in transfers for row in bandwidth.by_size(one)], fits, _compressed(job), list(dict.fromkeys(decisions)),
        path, _advice(job, steps, found, what_if), _violations(job, arrivals), errors)


def mean_parts(report: Report) -> dict[int, dict[str, float]]:
    """By rank, the mean ns of each part of a step, and "step" their sum."""
    steps, made = report.steps, {}
    for row, rank in enumerate(report.job.ranks):
        parts = {name: float(steps.parts[name][row, steps.counted].mean()) for name in PARTS}
        made[rank.rank] = {**parts, "step": float(steps.length[row, steps.counted].mean())}
    return made


def peak_busbw(report: Report) -> float:
    """Bytes per second of the slowest measured link; 0 where none was measured, as within one host."""
    return min((rate for _, _, rate in report.blame.links), default=0.0)


def _violations(job: Job, arrivals: blame.Arrivals) -> int:
    """Operations that ended before their last rank came, by more than the clocks may be off: clocks or records are wrong."""
    last: dict[int, int] = {}
    for operation, came in zip(arrivals.operation.tolist(), arrivals.last.tolist(), strict=True):
        last[operation] = max(came, last.get(operation, 0))
    error = 2 * max(rank.error_ns for rank in job.ranks)
    count = 0
    for rank in job.ranks:
        for operation, end_ns in rank.of(Phase.BUCKET)[["operation", "end_ns"]].tolist():
            count += end_ns + error < last.get(operation, -1)
    return count


def _compressed(job: Job) -> list[Compressed]:
    rank = job.ranks[0]
    counts: dict[int, list[int]] = {}
    for name, size in rank.of(Phase.QUANTIZED_ALLREDUCE)[["name", "num_bytes"]].tolist():
        one = counts.setdefault(name, [0, 0])
        one[0] += 1
        one[1] += size
    known = {name: (wire, norm) for name, wire, norm in rank.of(Phase.RESIDUAL)[["name", "num_bytes", "value"]].tolist()}
    return [Compressed(job.names[name], count, size, known[name][0] * count if name in known else size,
                       known[name][1] if name in known else 0.0)
            for name, (count, size) in counts.items()]


def _advice(job: Job, steps: Steps, found: Blame, what_if: list[WhatIf]) -> list[Advice]:
    """What to change, the largest gain first."""
    counted = steps.counted
    length = float(steps.length[:, counted].mean())
    advice = []
    for one in found.stragglers:
        gain = one.cost_ns / length
        host = next(rank.host for rank in job.ranks if rank.rank == one.rank)
        look = {
            "compute": "its computing takes longer than the others': look at its processor and its share of the work",
            "input": "its input takes longer than the others': look at its storage, or give its loader more workers",
            "not running": "its process does not run although it could: others take its processor, or something stops it",
            "slow link": f"the link of {host} is slower than the others: look at its cable, port and driver, or give "
                         "DistributedOptimizer compression=hvd.Compression.auto"}[one.kind]
        advice.append(Advice(f"rank {one.rank} on {host}: {look}", gain))
    exposed = float(steps.parts["exposed"][:, counted].mean())
    busy = exposed + float(steps.parts["overlapped"][:, counted].mean())
    now = next((one for one in what_if if one.setting == "fusion_threshold_bytes"
                and one.value == job.settings.get("fusion_threshold_bytes")), None)
    if now is not None and now.seconds > 0:
        best = min(what_if, key=lambda one: (one.seconds, one.setting != "fusion_threshold_bytes", one.value))
        gain = exposed / length * (1 - best.seconds / now.seconds)
        if gain > _LEAST_GAIN:
            setting = (f"HVDLITE_FUSION_THRESHOLD={int(best.value)} ({best.value / 2**20:g} MiB)"
                       if best.setting == "fusion_threshold_bytes" else f"HVDLITE_CYCLE_TIME={best.value:g} (ms)")
            advice.append(Advice(f"{setting}: {best.operations} operations in place of {now.operations}", gain))
    if exposed > 0.2 * length and not any(len(rank.of(Phase.QUANTIZED_ALLREDUCE, Phase.DECISION)) for rank in job.ranks):
        advice.append(Advice(
            f"{100 * exposed / length:.0f} % of a step is spent waiting for data to move: try compression=hvd.Compression.auto, "
            "which measures whether fewer bits pay here, or a larger batch per step", 0.0))
    if busy and exposed > 0.8 * busy and exposed > 0.1 * length:
        # Gradients of a wrapped optimizer travel under their own names.
        is_wrapped = any(about["names"] for of_ranks in job.about.values() for about in of_ranks.values())
        look = ("its buckets are complete only when backward ends: a smaller HVDLITE_FUSION_THRESHOLD lets the first go earlier"
                if is_wrapped else
                "wrap the optimizer with DistributedOptimizer, or submit with *_async as soon as each gradient is known")
        gain = min(exposed, float(steps.parts["compute"][:, counted].mean())) / length
        advice.append(Advice(f"hardly any of the exchange overlaps with computing: {look}", gain))
    reading = float(np.median(steps.parts["input"][:, counted].mean(axis=1)))
    if reading > 0.1 * length:
        advice.append(Advice(
            f"input takes {100 * reading / length:.0f} % of every rank's step: load batches ahead, with more workers",
            reading / length))
    return sorted(advice, key=lambda one: -one.gain)


def as_values(report: Report) -> dict[str, Any]:
    """The report as what JSON can hold. *Units*: as its names say."""
    job, steps = report.job, report.steps
    columns = {rank.rank: column for column, rank in enumerate(job.ranks)}
    counted = steps.counted
    return {
        "format": "hvdlite report 1", "size": job.size, "ranks": list(columns), "missing_ranks": list(job.missing),
        "hosts": {rank.rank: rank.host for rank in job.ranks}, "notes": list(job.notes), "epoch_unix_ns": job.epoch_ns,
        "clock_error_us": {rank.rank: rank.error_ns / 1e3 for rank in job.ranks},
        "clock_drift_ppm": {rank.rank: rank.clock.drift * 1e6 for rank in job.ranks},
        "lost_records": sum(rank.lost for rank in job.ranks), "torn_records": sum(rank.torn for rank in job.ranks),
        "causality_violations": report.violations, "steps": {"count": steps.num, "found_by": steps.source},
        "mean_step_ms": {rank: {name: ns / 1e6 for name, ns in parts.items()} for rank, parts in mean_parts(report).items()},
        "per_step": [
            {"step": int(number), "rank": rank, "step_ms": int(steps.length[row, k]) / 1e6,
             **{f"{name}_ms": int(steps.parts[name][row, k]) / 1e6 for name in PARTS}}
            for k, number in enumerate(steps.numbers) for rank, row in columns.items()],
        "blame_ms_per_step": {"rows": "suffers", "columns": "causes", "values": (
            report.blame.matrix[counted].mean(axis=0) / 1e6).tolist()},
        "verdict": report.blame.verdict, "stragglers": [asdict(one) for one in report.blame.stragglers],
        "links": [{"from": one, "to": two, "bytes_per_s": rate} for one, two, rate in report.blame.links],
        "tensor_waits": [asdict(one) for one in report.tensors], "fusion": asdict(report.fusion),
        "what_if": [asdict(one) for one in report.what_if], "bandwidth": [asdict(one) for one in report.sizes],
        "fits": [asdict(one) for one in report.fits],
        "compression": [{**asdict(one), "saved": one.saved} for one in report.compressed],
        "decisions": report.decisions,
        "critical_path": {"ms_by_kind": {kind: ns / 1e6 for kind, ns in report.path.by_kind.items()},
                          "ms_by_rank": {rank: ns / 1e6 for rank, ns in report.path.by_rank.items()},
                          "passes": report.path.passes},
        "advice": [asdict(one) for one in report.advice], "errors": report.errors}


def as_rows(report: Report) -> list[list[Any]]:
    """A table of every step of every rank, for a spreadsheet; its first row names the columns."""
    steps = report.steps
    rows: list[list[Any]] = [["step", "rank", "step_ms", *(f"{name}_ms" for name in PARTS), "caused_ms"]]
    for k, number in enumerate(steps.numbers.tolist()):
        for row, rank in enumerate(report.job.ranks):
            rows.append([number, rank.rank, steps.length[row, k] / 1e6, *(steps.parts[name][row, k] / 1e6 for name in PARTS),
                         float(report.blame.cost[k, row]) / 1e6])
    return rows
