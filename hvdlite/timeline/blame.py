"""Who made whom wait: the blame matrix, stragglers and their kind, and the wait for each tensor. Pure functions.

A rank that is blocked in a call waits for the ranks that have not submitted it yet; each moment of it is shared evenly by
these. *Source*: the delay cost of Boehme et al., Identifying the Root Causes of Wait States, ICPP 2010, for collectives.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import comb

import numpy as np

from hvdlite.timeline.job import Job
from hvdlite.timeline.phase import Phase
from hvdlite.timeline.steps import Steps

KINDS = ("compute", "input", "not running", "slow link")

#: What a rank must cost of a step, and its share of all waiting, to be called a straggler; how unlikely its being the worst
#: so often must be where all ranks are alike. Chosen: at most 1 in 100 jobs without one is told otherwise.
LEAST_COST, LEAST_SHARE, CHANCE = 0.02, 0.5, 0.01
#: A link this much slower than the median of the others is a slow one. Chosen.
SLOW_LINK = 0.6


@dataclass(frozen=True)
class Arrivals:
    """When each rank submitted each agreed call. *Shapes*: ``times`` (calls, ranks), ns, -1 where a rank had no part in it;
    ``name``, ``operation`` and ``plan`` (calls,). In order of agreement."""

    times: np.ndarray
    name: np.ndarray
    operation: np.ndarray
    plan: np.ndarray
    rows: dict[tuple[int, int], int]

    @property
    def last(self) -> np.ndarray:
        """When the last rank came. *Shapes*: (calls,)."""
        return self.times.max(axis=1, initial=-1)

    @property
    def last_rank(self) -> np.ndarray:
        """Which rank that was, as an index into ``Job.ranks``."""
        return self.times.argmax(axis=1) if len(self.times) else np.zeros(0, np.int64)


@dataclass(frozen=True)
class Straggler:
    """A rank that the others wait for. *Units*: ``cost_ns`` per step; ``share`` of all the waiting; ``kinds``: shares."""

    rank: int
    cost_ns: float
    share: float
    kind: str
    kinds: dict[str, float]


@dataclass(frozen=True)
class Blame:
    """*Shapes*: ``matrix`` (steps, ranks that suffer, ranks that cause), ns; ``kinds``: each (steps, ranks that cause), ns of
    suffering of that kind; ``cost`` (steps, ranks): what each rank costs a step, the median over those that wait."""

    matrix: np.ndarray
    kinds: dict[str, np.ndarray]
    cost: np.ndarray
    stragglers: tuple[Straggler, ...]
    verdict: str
    links: tuple[tuple[int, int, float], ...]


def find_arrivals(job: Job) -> Arrivals:
    """Match the calls of all ranks by name and plan, which all ranks number alike."""
    rows: dict[tuple[int, int], int] = {}
    found = []
    for column, rank in enumerate(job.ranks):
        for record in rank.of(Phase.QUEUE)[["plan", "name", "start_ns", "operation"]].tolist():
            plan, name, start_ns, operation = record
            rows.setdefault((plan, name), 0)
            found.append((plan, name, column, start_ns, operation))
    for place, key in enumerate(sorted(rows)):
        rows[key] = place
    times = np.full((len(rows), len(job.ranks)), -1, np.int64)
    operations = np.zeros(len(rows), np.int64)
    for plan, name, column, start_ns, operation in found:
        times[rows[plan, name], column] = start_ns
        operations[rows[plan, name]] = operation
    keys = np.array(sorted(rows), np.int64).reshape(-1, 2)
    return Arrivals(times, keys[:, 1], operations, keys[:, 0], rows)


def waits_of(job: Job, column: int, arrivals: Arrivals) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A rank's waits, made disjoint: start, end, and the call waited for as a row of ``arrivals``."""
    records = job.ranks[column].of(Phase.WAIT)
    row = np.array([arrivals.rows.get((plan, name), -1) for plan, name in records[["plan", "name"]].tolist()], np.int64)
    starts, ends = records["start_ns"].astype(np.int64), records["end_ns"].astype(np.int64)
    order = np.argsort(ends, kind="stable")
    starts, ends, row = starts[order], ends[order], row[order]
    if len(starts) > 1:
        starts[1:] = np.maximum(starts[1:], ends[:-1])
    keep = (ends > starts) & (row >= 0)
    return starts[keep], ends[keep], row[keep]


def share_out(starts: np.ndarray, ends: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Of each wait the part that each rank caused by submitting at ``times``. *Shapes*: (w,), (w,), (w, n); (w, n)."""
    num = times.shape[1]
    clipped = np.clip(times, starts[:, None], ends[:, None])
    order = np.argsort(clipped, axis=1, kind="stable")
    ordered = np.take_along_axis(clipped, order, axis=1)
    steps = np.diff(ordered, axis=1, prepend=starts[:, None])
    cumulated = np.cumsum(steps / np.arange(num, 0, -1), axis=1)
    shares = np.empty_like(cumulated)
    np.put_along_axis(shares, order, cumulated, axis=1)
    return shares


def find_blame(job: Job, steps: Steps, arrivals: Arrivals) -> Blame:
    """Fill the matrix, and say who is slow, if anybody."""
    num = len(job.ranks)
    matrix = np.zeros((steps.num, num, num))
    for victim in range(num):
        starts, ends, rows = waits_of(job, victim, arrivals)
        # A wait counts for the step that it ends in.
        step = np.searchsorted(steps.ends[victim], ends, "left")
        inside = (step < steps.num) & (ends > steps.starts[victim][np.minimum(step, steps.num - 1)])
        shares = share_out(starts[inside], ends[inside], arrivals.times[rows[inside]])
        np.add.at(matrix[:, victim, :], step[inside], shares)
        matrix[:, victim, victim] = 0  # its own other thread
    links = measured_links(job)
    slow = {column: share for column, rank in enumerate(job.ranks) if (share := slow_ranks(links).get(rank.rank))}
    of_links = np.zeros_like(matrix)
    kinds = _kinds(matrix, steps, bool(slow))
    _blame_links(steps, slow, matrix, of_links, kinds)
    late, verdict = _find_stragglers(job, steps, matrix, kinds)
    held_up = _find_slow_links(job, steps, slow, of_links)
    stragglers = tuple(sorted((*late, *held_up), key=lambda one: -one.cost_ns))
    if stragglers:
        verdict = "; ".join(_worded(job, one) for one in stragglers)
    matrix = matrix + of_links
    cost = _cost(matrix)
    return Blame(matrix, kinds, cost, stragglers, verdict, links)


def _worded(job: Job, one: Straggler) -> str:
    host = next(rank.host for rank in job.ranks if rank.rank == one.rank)
    why = f"data: slow link of {host}" if one.kind == "slow link" else f"ranks: {one.kind}"
    return f"rank {one.rank} costs {one.cost_ns / 1e6:.1f} ms a step, {100 * one.share:.0f} % of all waiting for {why}"


def _cost(matrix: np.ndarray) -> np.ndarray:
    """What each rank costs each step: the median over those that wait for it. *Shapes*: (steps, n, n) to (steps, n)."""
    num = matrix.shape[1]
    cost = np.zeros((len(matrix), num))
    for cause in range(num):
        others = [victim for victim in range(num) if victim != cause]
        if others:
            cost[:, cause] = np.median(matrix[:, others, cause], axis=1)
    return cost


def _kinds(matrix: np.ndarray, steps: Steps, has_slow_link: bool) -> dict[str, np.ndarray]:
    """Split what each rank caused by what it spent more time on than the others did."""
    caused = matrix.sum(axis=1)
    stopped = np.minimum(steps.stopped, steps.parts["compute"] + steps.parts["input"])
    computing = np.maximum(0, steps.parts["compute"] + steps.parts["overlapped"] - stopped)
    spent = {"compute": computing, "input": steps.parts["input"], "not running": stopped}
    if has_slow_link:  # else nobody knows why data took longer to a rank
        spent["slow link"] = steps.parts["exposed"]
    excess = {}
    for kind, table in spent.items():
        middle = np.median(table, axis=0) if table.shape[0] > 2 else table.min(axis=0)
        excess[kind] = np.maximum(0.0, (table - middle).T)
    total = sum(excess.values())
    shares = {kind: np.divide(one, total, out=np.full(one.shape, float(kind == "compute")), where=total > 0)
              for kind, one in excess.items()}
    found = {kind: caused * share for kind, share in shares.items()}
    return {kind: found.get(kind, np.zeros_like(caused)) for kind in KINDS}


def measured_links(job: Job) -> tuple[tuple[int, int, float], ...]:
    """Links as they were measured: from rank, to rank, bytes per second."""
    found = []
    for rank in job.ranks:
        best: dict[int, float] = {}
        for record in rank.of(Phase.LINK):
            seconds = max(1, int(record["end_ns"]) - int(record["start_ns"])) / 1e9
            # Of two sizes the larger one was sent because the smaller was too fast to tell.
            best[int(record["operation"])] = int(record["num_bytes"]) / seconds
        found += [(peer, rank.rank, rate) for peer, rate in best.items()]
    return tuple(found)


def slow_ranks(links: tuple[tuple[int, int, float], ...]) -> dict[int, float]:
    """Ranks both of whose links are slow, and how much slower than the others, as a share of the median rate."""
    if len(links) < 3:
        return {}
    rates = np.array([rate for _, _, rate in links])
    usual = float(np.max(rates)) if len(links) < 4 else float(np.sort(rates)[len(rates) // 2])
    slow: dict[int, list[float]] = {}
    for one, other, rate in links:
        for rank in (one, other):
            slow.setdefault(rank, []).append(rate / usual)
    return {rank: max(shares) for rank, shares in slow.items() if len(shares) > 1 and max(shares) < SLOW_LINK}


def _blame_links(
    steps: Steps, slow: dict[int, float], matrix: np.ndarray, of_links: np.ndarray, kinds: dict[str, np.ndarray],
) -> None:
    """Charge slow links with what they cost those who are blocked while data moves, the part that goes if they were as fast as
    others, and with the lateness of ranks that data reached late."""
    if not slow:
        return
    slowest = min(slow, key=slow.__getitem__)
    for column, share in slow.items():
        of_links[:, :, column] += (steps.parts["exposed"] * (1 - share)).T
    caused = np.maximum(1e-9, matrix.sum(axis=1))
    moved = matrix * (kinds["slow link"] / caused)[:, None, :]
    matrix -= moved
    of_links[:, :, slowest] += moved.sum(axis=2)
    kinds["slow link"][:] = 0
    for column in range(matrix.shape[1]):
        of_links[:, column, column] = 0
        kinds["slow link"][:, column] = of_links[:, :, column].sum(axis=1)


def _find_slow_links(job: Job, steps: Steps, slow: dict[int, float], of_links: np.ndarray) -> list[Straggler]:
    """Ranks whose link was measured to be slow, and costs something."""
    counted = steps.counted
    exposed = float(steps.parts["exposed"][:, counted].sum()) or 1.0
    found = []
    for column in slow:
        cost = float(_cost(of_links)[counted][:, column].mean())
        if cost >= LEAST_COST * float(steps.length[:, counted].mean()):
            share = min(1.0, float(of_links[counted][:, :, column].sum()) / exposed)
            found.append(Straggler(job.ranks[column].rank, cost, share, "slow link", {"slow link": 1.0}))
    return found


def _find_stragglers(
    job: Job, steps: Steps, matrix: np.ndarray, kinds: dict[str, np.ndarray],
) -> tuple[list[Straggler], str]:
    """Ranks that are late more often than chance makes them, and a word for where there is none."""
    num, counted = len(job.ranks), steps.counted
    costs = _cost(matrix)[counted]
    num_steps = len(costs)
    if num < 2:
        return [], "one rank: nobody waits for another"
    if num_steps < 4:
        return [], f"{num_steps} step(s) are too few to tell a straggler from chance"
    length = float(steps.length[:, counted].mean())
    total = matrix[counted].sum()
    if not total:
        return [], "no straggler: nobody waited for another rank"
    found = []
    worst = np.bincount(costs.argmax(axis=1), minlength=num)
    for column, rank in enumerate(job.ranks):
        mean, share = float(costs[:, column].mean()), float(matrix[counted][:, :, column].sum() / total)
        is_slow = mean >= LEAST_COST * length and share >= LEAST_SHARE
        if is_slow and _chance(int(worst[column]), num_steps, 1 / num) < CHANCE / num:
            of = {kind: float(kinds[kind][counted][:, column].sum()) for kind in KINDS if kind != "slow link"}
            whole = sum(of.values()) or 1.0
            shares = {kind: one / whole for kind, one in of.items()}
            found.append(Straggler(rank.rank, mean, share, max(shares, key=shares.__getitem__), shares))
    return found, f"no straggler: ranks take turns to be late ({total / num_steps / num / 1e6:.2f} ms a step and rank)"


def _chance(times: int, of: int, probability: float) -> float:
    """That something so probable happens at least so many times."""
    return float(sum(comb(of, k) * probability**k * (1 - probability) ** (of - k) for k in range(times, of + 1)))


@dataclass(frozen=True)
class TensorWait:
    """How long ranks waited for a call's last rank. *Units*: ns, means; ``added``: what the last rank was not late already."""

    name: str
    calls: int
    spread_ns: float
    added_ns: float
    last_rank: int
    last_share: float


def tensor_waits(job: Job, arrivals: Arrivals) -> list[TensorWait]:
    """Every name's wait, what is waited for the longest in all first: a call made once does not come before one of every step."""
    times = arrivals.times
    complete = (times >= 0).all(axis=1) if len(times) else np.zeros(0, bool)
    if times.shape[1] < 2 or not complete.any():
        return []
    rows = np.flatnonzero(complete)
    late = times[rows] - times[rows].min(axis=1, keepdims=True)
    added = np.empty(len(rows))
    worst = late.argmax(axis=1)
    for column in range(times.shape[1]):
        order = np.argsort(times[rows, column], kind="stable")
        before = np.concatenate([[0], late[order, column][:-1]])
        # Where all came together in between, as at the end of a step, nobody is late any more.
        together = np.concatenate([[0], times[rows][order].max(axis=1)[:-1]]) <= times[rows][order].min(axis=1)
        before[together] = 0
        own = np.maximum(0, late[order, column] - before)
        here = worst[order] == column
        added[order[here]] = own[here]
    found = []
    for name in np.unique(arrivals.name[rows]):
        own = arrivals.name[rows] == name
        counts = np.bincount(worst[own], minlength=times.shape[1])
        last = int(counts.argmax())
        found.append(TensorWait(
            job.names[name], int(own.sum()), float(late[own].max(axis=1).mean()), float(added[own].mean()),
            job.ranks[last].rank, float(counts[last] / own.sum())))
    return sorted(found, key=lambda one: -one.added_ns * one.calls)
