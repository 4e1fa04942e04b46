"""The report for a terminal: plain text, colour where it is one."""

from __future__ import annotations

from collections.abc import Sequence

from hvdlite.timeline.amounts import Amount, rate, size
from hvdlite.timeline.bandwidth import SizeRow
from hvdlite.timeline.fusion_use import WhatIf
from hvdlite.timeline.report import Report, mean_parts, peak_busbw
from hvdlite.timeline.steps import PARTS

_SHOWN = 10
_LARGE_BYTES = 1 << 20


def as_text(report: Report, *, width: int = 100, colour: bool = False) -> str:
    """Word everything; lines are at most ``width`` long, tables excepted where that is below 60."""
    words = _Words(max(60, width), colour)
    job, steps = report.job, report.steps
    words.title(f"{job.size} ranks, {steps.num} steps")
    if steps.source != "marked":
        words.line(f"Steps: {steps.source}.")
    for note in job.notes:
        words.line(f"! {note}", "33")
    worst = max(rank.error_ns for rank in job.ranks)
    words.line("Clocks: " + ("one for all ranks" if not worst else
               f"merged within +- {worst / 1e3:.1f} us of rank 0's; " + ", ".join(
                   f"rank {rank.rank} +- {rank.error_ns / 1e3:.1f} us ({rank.clock.drift * 1e6:+.1f} ppm)"
                   for rank in job.ranks if rank.clock.num_readings)) + ".")
    if report.violations:
        words.line(f"! {report.violations} operations end before their last rank came: do not trust times between ranks", "31")
    for error in report.errors[:_SHOWN]:
        words.line(f"! {error}", "31")

    words.title("What to change")
    for one in report.advice:
        gain = f"{100 * one.gain:4.0f} % of a step: " if one.gain else "       ? : "
        words.line(gain + one.what, "1")
    if not report.advice:
        words.line("Nothing stands out.")

    words.title("Where a step goes (ms, mean)")
    parts = mean_parts(report)
    words.table(["rank", "step", *PARTS], [
        [rank, *(own[name] / 1e6 for name in ("step", *PARTS))] for rank, own in parts.items()])
    words.line("exposed: blocked while data moves; idle: blocked and waiting for ranks; overlapped: hidden behind computing.")

    words.title("Who made whom wait (ms per step)")
    words.line(report.blame.verdict, "1")
    matrix = report.blame.matrix[steps.counted].mean(axis=0) / 1e6
    if len(job.ranks) > 1:
        shown = job.ranks[: _SHOWN + 2]
        words.table(["suffers \\ causes", *(f"rank {rank.rank}" for rank in shown), "sum"],
                    [[f"rank {rank.rank}", *matrix[row, : len(shown)], matrix[row].sum()] for row, rank in enumerate(shown)])
    for slow in report.blame.stragglers:
        words.line(f"rank {slow.rank}: " + ", ".join(
            f"{kind} {100 * share:.0f} %" for kind, share in slow.kinds.items() if share > 0.005))

    if report.tensors:
        words.title("Waiting for the last rank, by tensor (ms a call)")
        words.table(["added", "spread", "calls", "last rank", "tensor"], [
            [one.added_ns / 1e6, one.spread_ns / 1e6, one.calls, f"{one.last_rank} ({100 * one.last_share:.0f} %)", one.name]
            for one in report.tensors[:_SHOWN]])

    words.title("Critical path")
    total = sum(report.path.by_kind.values()) or 1
    kinds = ", ".join(f"{kind} {100 * ns / total:.0f} %" for kind, ns in report.path.by_kind.items())
    passes = ", ".join(f"rank {rank} in {100 * share:.0f} %" for rank, share in report.path.passes.items())
    words.line(f"{kinds}; it passes through {passes} of steps.")

    _fusion(report, words)
    _bandwidth(report, words)
    if report.compressed or report.decisions:
        words.title("Compression")
        words.table(["bucket", "operations", "size", "saved %", "residual norm"], [
            [one.bucket, one.operations, size(one.bytes), 100 * one.saved, one.norm] for one in report.compressed[:_SHOWN]])
        for decision in report.decisions[:_SHOWN]:
            words.line(decision)
    return "\n".join(words.lines) + "\n"


def _fusion(report: Report, words: _Words) -> None:
    fusion = report.fusion
    words.title("Fusion")
    words.line(f"{fusion.operations} operations of {fusion.tensors_per_operation:.1f} tensors and "
               f"{size(fusion.bytes_per_operation)}; {fusion.packed} packed ones fill {100 * fusion.fill:.0f} % of "
               f"{fusion.threshold_bytes / 2**20:g} MiB. Closed because of: " +
               ", ".join(f"{reason} {count}" for reason, count in fusion.reasons.items()) + ".")
    if report.what_if:
        words.table(["operations", "moving data (ms per step)", "setting"], [
            [one.operations, one.seconds * 1e3 / report.steps.num, worded(one)]
            for one in distinct(report.what_if, fusion.threshold_bytes)])


def share_of_link(row: SizeRow, peak: float) -> float | str:
    """Percent of the slowest link's rate; of small operations the latency tells more, and they pass in a link's burst."""
    return 100 * row.busbw / peak if peak and row.busbw and row.bytes >= _LARGE_BYTES else Amount("n/a")


def worded(one: WhatIf) -> str:
    """A setting and its value."""
    return f"threshold {one.value / 2**20:g} MiB" if one.setting == "fusion_threshold_bytes" else f"cycle time {one.value:g} ms"


def distinct(tried: list[WhatIf], current: int) -> list[WhatIf]:
    """The settings that make a difference: of those in a row with as many operations the first, and the current one."""
    found: list[WhatIf] = []
    for one in tried:
        if not found or (found[-1].setting, found[-1].operations) != (one.setting, one.operations) or one.value == current:
            found.append(one)
    return found


def _bandwidth(report: Report, words: _Words) -> None:
    words.title("Bandwidth")
    peak = peak_busbw(report)
    words.table(["operation", "ranks", "size", "calls", "ms", "algbw", "busbw", "% of link"], [
        [row.phase, row.num_ranks, size(row.bytes), row.operations, row.seconds * 1e3, rate(row.algbw),
         rate(row.busbw) if row.busbw else Amount("n/a"), share_of_link(row, peak)]
        for row in report.sizes])
    for one in report.fits:
        words.line(f"{one.phase}: {one.alpha_s * 1e6:.0f} us + bytes / {rate(one.beta)} "
                   f"(busbw {rate(one.busbw)}, " + (f"fitted to {one.num_sizes} sizes)" if one.num_sizes > 1 else
                                                    "that of the slowest link: there is one size only)"))
    for sender, receiver, speed in report.blame.links:
        words.line(f"link from rank {sender} to rank {receiver}: {rate(speed)}, measured at the start")


class _Words:
    """Lines, at most so wide."""

    def __init__(self, width: int, colour: bool) -> None:
        self.lines: list[str] = []
        self._width, self._colour = width, colour

    def title(self, text: str) -> None:
        self.lines += ["", self._painted(text, "1;36"), self._painted("-" * min(self._width, len(text)), "36")]

    def line(self, text: str, code: str = "") -> None:
        import textwrap

        self.lines += [self._painted(one, code) for one in textwrap.wrap(text, self._width, subsequent_indent="  ")]

    def table(self, head: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        cells = [list(head), *([_cell(one) for one in row] for row in rows)]
        widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
        # The last column gives way: names are long.
        rest = self._width - sum(widths[:-1]) - 2 * (len(widths) - 1)
        widths[-1] = min(widths[-1], max(12, rest))
        for row in cells:
            row[-1] = row[-1] if len(row[-1]) <= widths[-1] else row[-1][: widths[-1] - 3] + "..."
            is_name = [len(rows) > 0 and is_text(rows[0][column]) for column in range(len(head))]
            self.lines.append("  ".join(
                text.ljust(size) if left else text.rjust(size)
                for text, size, left in zip(row, widths, is_name, strict=True)).rstrip())

    def _painted(self, text: str, code: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self._colour and code else text


def is_text(value: object) -> bool:
    """Whether it stands on the left of a column."""
    return isinstance(value, str) and not isinstance(value, Amount)


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e5 else f"{value:.0f}"
    return "".join(one if one.isprintable() else "?" for one in str(value))
