"""The report as one page: inline SVG, own style for light and dark, nothing from the network."""

from __future__ import annotations

import html
import time
from collections.abc import Sequence

import numpy as np

from hvdlite.timeline.amounts import Amount, rate, size
from hvdlite.timeline.report import Report, mean_parts, peak_busbw
from hvdlite.timeline.report_text import distinct, is_text, share_of_link, worded
from hvdlite.timeline.steps import PARTS

#: Steps drawn one by one; of more every nth group's mean. Chosen: one for every two pixels.
_COLUMNS = 400
_ROWS = 30
#: Hues that differ in lightness too. *Source*: Okabe and Ito, Color Universal Design.
_COLOURS = {"compute": "#0072b2", "input": "#cc79a7", "overlapped": "#56b4e9", "exposed": "#e69f00", "idle": "#d55e00"}

_STYLE = """
:root{--back:#fff;--text:#1b1f24;--soft:#57606a;--line:#d0d7de;--panel:#f6f8fa;--accent:#0a58ca;--heat:213,94,0}
@media(prefers-color-scheme:dark){:root:not(.light){--back:#0d1117;--text:#e6edf3;--soft:#9198a1;--line:#30363d;--panel:#161b22;--accent:#6cb6ff;--heat:255,140,60}}
:root.dark{--back:#0d1117;--text:#e6edf3;--soft:#9198a1;--line:#30363d;--panel:#161b22;--accent:#6cb6ff;--heat:255,140,60}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1060px;padding:24px 20px 60px;background:var(--back);color:var(--text);
font:15px/1.5 system-ui,sans-serif}
h1{font-size:24px;margin:0 0 4px}h2{font-size:18px;margin:34px 0 8px}p{margin:6px 0}.soft{color:var(--soft)}
.box{background:var(--panel);border:1px solid var(--line);border-radius:8px;padding:12px 16px;margin:10px 0}
.box li{margin:6px 0}.warn{border-left:4px solid #d55e00}b.gain{display:inline-block;min-width:64px;color:var(--accent)}
.wide{overflow-x:auto}table{border-collapse:collapse;margin:8px 0;font-variant-numeric:tabular-nums}
th,td{padding:4px 12px;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}
th{color:var(--soft);font-weight:600}
td.name,th.name{text-align:left;max-width:420px;overflow:hidden;text-overflow:ellipsis}
svg{max-width:100%;height:auto;display:block}
svg text{fill:var(--text);font:12px system-ui,sans-serif}svg .axis{stroke:var(--line)}
.legend span{display:inline-block;margin-right:16px}
.legend i{display:inline-block;width:12px;height:12px;border-radius:2px;
margin-right:6px;vertical-align:-1px}
button{float:right;background:var(--panel);color:var(--text);border:1px solid var(--line);border-radius:6px;
padding:4px 10px;cursor:pointer}
"""
_SCRIPT = """
document.getElementById('theme').onclick=function(){var r=document.documentElement,
d=r.classList.contains('dark')||(!r.classList.contains('light')&&matchMedia('(prefers-color-scheme:dark)').matches);
r.classList.remove('dark','light');r.classList.add(d?'light':'dark')};
"""


def as_html(report: Report) -> str:
    """The page."""
    job, steps = report.job, report.steps
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(job.epoch_ns / 1e9))
    worst = max(rank.error_ns for rank in job.ranks)
    clocks = "one clock for all ranks" if not worst else f"clocks merged within &plusmn;{worst / 1e3:.1f} &micro;s"
    body = [
        '<button id="theme" title="light or dark">&#9680;</button>', "<h1>hvdlite timeline report</h1>",
        f'<p class="soft">{job.size} ranks on {len({rank.host for rank in job.ranks})} host(s), {steps.num} steps '
        f"({_text(steps.source)}), recorded {when} UTC, {clocks}</p>",
        *[f'<div class="box warn">{_text(note)}</div>' for note in (*job.notes, *report.errors[:10])],
        *([f'<div class="box warn">{report.violations} operations end before their last rank came: do not trust times between '
           "ranks</div>"] if report.violations else []),
        "<h2>What to change</h2>", _advice(report), "<h2>Where a step goes</h2>", _legend(), _parts(report),
        "<h2>Step by step</h2>", _steps(report), "<h2>Who made whom wait</h2>", f"<p><b>{_text(report.blame.verdict)}</b></p>",
        _matrix(report), "<h2>Waiting for the last rank, by tensor</h2>",
        '<p class="soft">ms a call; what is waited for the longest in all comes first</p>',
        _table(["tensor", "added ms", "spread ms", "last rank", "calls"], [
            [one.name, one.added_ns / 1e6, one.spread_ns / 1e6, f"{one.last_rank} ({100 * one.last_share:.0f} %)", one.calls]
            for one in report.tensors[:_ROWS]]),
        "<h2>Critical path</h2>", _path(report), "<h2>Fusion</h2>", _fusion(report), "<h2>Bandwidth</h2>", _bandwidth(report)]
    if report.compressed or report.decisions:
        body += ["<h2>Compression</h2>", _table(["bucket", "operations", "size", "saved %", "residual norm"], [
            [one.bucket, one.operations, size(one.bytes), 100 * one.saved, one.norm] for one in report.compressed[:_ROWS]]),
            *[f"<p>{_text(one)}</p>" for one in report.decisions[:_ROWS]]]
    return ('<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
            f'<link rel="icon" href="data:,"><title>hvdlite timeline report</title><style>{_STYLE}</style></head><body>'
            + "\n".join(body) + f"<script>{_SCRIPT}</script></body></html>\n")


def _text(value: object) -> str:
    return html.escape(str(value).encode("utf-8", "replace").decode())


def _advice(report: Report) -> str:
    if not report.advice:
        return '<div class="box">Nothing stands out.</div>'
    rows = [f'<li><b class="gain">{f"&minus;{100 * one.gain:.0f} %" if one.gain else "?"}</b> {_text(one.what)}</li>'
            for one in report.advice]
    return f'<div class="box"><p class="soft">What it is expected to save of a step:</p><ul>{"".join(rows)}</ul></div>'


def _legend() -> str:
    told = {"compute": "compute", "input": "input", "overlapped": "exchange behind computing", "exposed": "blocked, data moves",
            "idle": "blocked, waiting for ranks"}
    return '<p class="legend">' + "".join(
        f'<span><i style="background:{_COLOURS[name]}"></i>{told[name]}</span>' for name in PARTS) + "</p>"


def _parts(report: Report) -> str:
    """A bar for each rank."""
    means = mean_parts(report)
    longest = max(one["step"] for one in means.values()) or 1.0
    shown = list(means.items())[:64]
    svg = []
    for row, (rank, parts) in enumerate(shown):
        x, y = 70.0, 6 + 26 * row
        svg.append(f'<text x="0" y="{y + 14}">rank {rank}</text>')
        for name in PARTS:
            width = 820 * parts[name] / longest
            svg.append(f'<rect x="{x:.1f}" y="{y}" width="{max(0.0, width):.1f}" height="20" fill="{_COLOURS[name]}">'
                       f"<title>rank {rank}: {name} {parts[name] / 1e6:.3f} ms</title></rect>")
            x += width
        svg.append(f'<text x="{x + 8:.1f}" y="{y + 14}">{parts["step"] / 1e6:.2f} ms</text>')
    return (f'<div class="wide"><svg viewBox="0 0 1000 {12 + 26 * len(shown)}" role="img" aria-label="parts of a step by rank">'
            + "".join(svg) + "</svg></div>" + _table(
        ["rank", "step ms", *(f"{name} ms" for name in PARTS)],
        [[rank, *(one[name] / 1e6 for name in ("step", *PARTS))] for rank, one in shown]))


def _steps(report: Report) -> str:
    """Columns over the steps: the mean over ranks."""
    steps = report.steps
    groups = np.array_split(np.arange(steps.num), min(steps.num, _COLUMNS))
    means = {name: [float(steps.parts[name][:, own].mean()) for own in groups] for name in PARTS}
    totals = np.sum([means[name] for name in PARTS], axis=0)
    # One very long step, as the first one often is, must not flatten the others.
    top = float(min(totals.max(), 2 * np.quantile(totals, 0.95))) or 1.0
    width, svg = 900 / len(groups), []
    for column, own in enumerate(groups):
        y = 200.0
        for name in PARTS:
            height = min(y - 10, 190 * means[name][column] / top)
            y -= height
            svg.append(f'<rect x="{60 + column * width:.2f}" y="{y:.1f}" width="{width * 0.94:.2f}" '
                       f'height="{max(0, height):.1f}" fill="{_COLOURS[name]}"><title>step {int(steps.numbers[own[0]])}: {name} '
                       f"{means[name][column] / 1e6:.3f} ms</title></rect>")
    return ('<div class="wide"><svg viewBox="0 0 1000 230" role="img" aria-label="parts of each step">'
            f'<line class="axis" x1="58" y1="200" x2="965" y2="200"/><text x="0" y="16">{top / 1e6:.1f} ms</text>'
            f'<text x="40" y="204">0</text><text x="60" y="222">step {int(steps.numbers[0])}</text>'
            f'<text x="960" y="222" text-anchor="end">step {int(steps.numbers[-1])}</text>' + "".join(svg) + "</svg></div>")


def _matrix(report: Report) -> str:
    matrix = report.blame.matrix[report.steps.counted].mean(axis=0) / 1e6
    ranks = [rank.rank for rank in report.job.ranks][:_ROWS]
    if len(ranks) < 2:
        return ""
    most = float(matrix.max()) or 1.0
    head = "".join(f"<th>{rank}</th>" for rank in ranks)
    rows = []
    for row, rank in enumerate(ranks):
        cells = "".join(f'<td style="background:rgba(var(--heat),{0.75 * float(value) / most:.2f})">{float(value):.2f}</td>'
                        for value in matrix[row, : len(ranks)])
        rows.append(f'<tr><th class="name">rank {rank} waits</th>{cells}<td>{float(matrix[row].sum()):.2f}</td></tr>')
    kinds = "".join(
        f"<p>rank {one.rank}: " + ", ".join(f"{kind} {100 * share:.0f} %" for kind, share in one.kinds.items() if share > 0.005)
        + "</p>" for one in report.blame.stragglers)
    return ('<p class="soft">ms per step; a column is what one rank costs the others</p><div class="wide"><table>'
            f'<tr><th class="name">because of rank</th>{head}<th>sum</th></tr>{"".join(rows)}</table></div>{kinds}')


def _path(report: Report) -> str:
    total = sum(report.path.by_kind.values()) or 1
    kinds = ", ".join(f"{kind} {100 * ns / total:.0f} %" for kind, ns in report.path.by_kind.items())
    return f"<p>{kinds}.</p>" + _table(["rank", "on the path in % of steps", "own work on it, ms per step"], [
        [rank, 100 * share, report.path.by_rank[rank] / 1e6 / max(1, report.steps.num)]
        for rank, share in report.path.passes.items()])


def _fusion(report: Report) -> str:
    fusion = report.fusion
    told = (f"<p>{fusion.operations} operations of {fusion.tensors_per_operation:.1f} tensors and "
            f"{size(fusion.bytes_per_operation)} on average; {fusion.packed} packed ones fill "
            f"{100 * fusion.fill:.0f} % of the {fusion.threshold_bytes / 2**20:g} MiB threshold.</p>")
    return told + _table(["closed because of", "operations"], list(fusion.reasons.items())) + _table(
        ["another setting", "operations", "moving data, ms per step"],
        [[worded(one), one.operations, one.seconds * 1e3 / report.steps.num]
         for one in distinct(report.what_if, fusion.threshold_bytes)])


def _bandwidth(report: Report) -> str:
    peak = peak_busbw(report)
    told = _table(["operation", "ranks", "size", "calls", "ms", "algbw", "busbw", "% of link"], [
        [row.phase, row.num_ranks, size(row.bytes), row.operations, row.seconds * 1e3, rate(row.algbw),
         rate(row.busbw) if row.busbw else Amount("n/a"), share_of_link(row, peak)]
        for row in report.sizes])
    fits = [f"<p>{one.phase}: {one.alpha_s * 1e6:.0f} &micro;s + bytes / {rate(one.beta)}</p>" for one in report.fits]
    links = _table(["link measured at the start", "rate"], [
        [f"from rank {sender} to rank {receiver}", rate(speed)] for sender, receiver, speed in report.blame.links[:_ROWS]])
    return told + "".join(fits) + (links if report.blame.links else "")


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    if not rows:
        return '<p class="soft">none</p>'
    left = [is_text(value) and column == 0 for column, value in enumerate(rows[0])]

    def cell(value: object, is_name: bool) -> str:
        shown = f"{value:.4g}" if isinstance(value, float) else _text(value)
        return f'<td class="name" title="{shown}">{shown}</td>' if is_name else f"<td>{shown}</td>"

    first = "".join(f'<th class="name">{_text(one)}</th>' if name else f"<th>{_text(one)}</th>"
                    for one, name in zip(head, left, strict=True))
    lines = "".join("<tr>" + "".join(cell(value, name) for value, name in zip(row, left, strict=True)) + "</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{first}</tr>{lines}</table></div>'
