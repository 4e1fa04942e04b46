"""Two recordings compared: what changed, and within which interval. Pure functions of two reports.

Intervals are from a moving-block bootstrap of the steps: neighbouring steps resemble one another, so blocks of them are drawn.
*Source*: Kuensch, The Jackknife and the Bootstrap for General Stationary Observations, Annals of Statistics 1989.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hvdlite.errors import InvalidRequestError
from hvdlite.timeline.report import Report
from hvdlite.timeline.steps import PARTS

#: Draws, steps in a block, and the share of draws inside the interval. Chosen.
_DRAWS, _BLOCK, _LEVEL = 2000, 5, 0.95
#: What must differ to be called a change, as a share of the step: two runs of one program on one machine differ by as much.
LEAST_CHANGE = 0.02
#: Tensors whose waits are compared.
_TENSORS = 5


class Change(NamedTuple):
    """One quantity; times in ms per step. ``share``: (after - before) / before, ``low`` and ``high`` its interval."""

    name: str
    before_ms: float
    after_ms: float
    share: float
    low: float
    high: float
    is_significant: bool


def compare(before: Report, after: Report, seed: int = 1) -> list[Change]:
    """The step first, then its parts, then the waits for tensors that differ the most."""
    rng = np.random.default_rng(seed)
    tables = [_per_step(one) for one in (before, after)]
    step_ms = float(tables[0]["step"].mean())
    changes = [_change(name, tables[0][name], tables[1][name], step_ms, rng) for name in ("step", *PARTS)]
    # Of what every other step has at least: what is called once, at the start, differs from run to run.
    waits = [{one.name: one.added_ns * one.calls / report.steps.num / 1e6 for one in report.tensors
              if 2 * one.calls >= report.steps.num} for report in (before, after)]
    names = sorted(set(waits[0]) & set(waits[1]), key=lambda name: -abs(waits[1][name] - waits[0][name]))
    for name in names[:_TENSORS]:
        one, two = waits[0][name], waits[1][name]
        share = (two - one) / one if one > 0 else 0.0
        changes.append(Change(f"wait for {name}", one, two, share, share, share, abs(two - one) > LEAST_CHANGE * step_ms))
    return changes


def _per_step(report: Report) -> dict[str, np.ndarray]:
    """Of every step counted, the mean over ranks, in ms."""
    steps = report.steps
    found = {name: steps.parts[name][:, steps.counted].mean(axis=0) / 1e6 for name in PARTS}
    return {"step": steps.length[:, steps.counted].mean(axis=0) / 1e6, **found}


def _change(name: str, one: np.ndarray, two: np.ndarray, step_ms: float, rng: np.random.Generator) -> Change:
    means = [_bootstrap(values, rng) for values in (one, two)]
    before, after = float(one.mean()), float(two.mean())
    # A part that was next to nothing has no share that means anything: it is counted in shares of the step.
    base = before if before > LEAST_CHANGE * step_ms else step_ms
    share = (after - before) / base if base else 0.0
    low, high = np.quantile((means[1] - means[0]) / base, [(1 - _LEVEL) / 2, (1 + _LEVEL) / 2]) if base else (0.0, 0.0)
    is_significant = bool((low > 0 or high < 0) and abs(after - before) > LEAST_CHANGE * step_ms)
    return Change(name, before, after, share, float(low), float(high), is_significant)


def _bootstrap(values: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Means of resampled steps. *Shapes*: (steps,) to (draws,)."""
    block = max(1, min(_BLOCK, len(values) // 4))
    num_blocks = -(-len(values) // block)
    starts = rng.integers(0, len(values) - block + 1, (_DRAWS, num_blocks))
    chosen = (starts[:, :, None] + np.arange(block)).reshape(_DRAWS, -1)[:, : len(values)]
    means: np.ndarray = values[chosen].mean(axis=1)
    return means


def as_text(changes: list[Change]) -> str:
    """A table; what has changed beyond chance is marked."""
    width = max(len(one.name) for one in changes)
    lines = [f"{'ms per step':{width}}  {'before':>9}  {'after':>9}   change   [95 % interval]"]
    for one in changes:
        interval = f"[{100 * one.low:+.1f} %, {100 * one.high:+.1f} %]" if one.low != one.high else ""
        lines.append(f"{one.name:{width}}  {one.before_ms:9.3f}  {one.after_ms:9.3f}  {100 * one.share:+6.1f} %  {interval}"
                     f"{'  changed' if one.is_significant else ''}")
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Test:
    """A condition as ``step>+5%`` or ``exposed>2ms``: more, or less, by so much, beyond chance."""

    __test__ = False  # to pytest's eye it looks like a class of tests

    text: str
    name: str
    sign: int
    amount: float
    is_share: bool

    def holds(self, changes: list[Change]) -> bool:
        """Whether the change is as large as that, and its interval lies on one side of zero."""
        one = self._of(changes)
        size = self.sign * (one.share if self.is_share else one.after_ms - one.before_ms)
        edge = one.low if self.sign > 0 else -one.high
        return size > self.amount and edge > 0

    def why(self, changes: list[Change]) -> str:
        """What was seen."""
        one = self._of(changes)
        return f"{one.name} {one.before_ms:.3f} ms, then {one.after_ms:.3f} ms ({100 * one.share:+.1f} %)"

    def _of(self, changes: list[Change]) -> Change:
        return next(one for one in changes if one.name == self.name)


def parse_test(text: str) -> Test:
    """Read a condition. Raises: InvalidRequestError for what is none."""
    match = re.fullmatch(r"\s*(\w+)\s*([<>])\s*([+-]?)([\d.]+)\s*(%|ms)\s*", text)
    names = ("step", *PARTS)
    if not match or match.group(1) not in names or (match.group(2) == "<") != (match.group(3) == "-"):
        raise InvalidRequestError(f"--fail-if {text!r}: write NAME>+5%, NAME>2ms or NAME<-5% with a NAME of {', '.join(names)}")
    name, sign, _, amount, unit = match.groups()
    return Test(text.strip(), name, 1 if sign == ">" else -1, float(amount) / (100 if unit == "%" else 1), unit == "%")
