"""Stall inspection: which tensors wait for which ranks, and for how long. Pure functions of reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hvdlite.errors import format_ranks
from hvdlite.message import Collective, Key, Report, Request

#: How many tensor names one message spells out. Chosen: fits a terminal.
_NAMES_SHOWN = 5


def stalled(
    reports: Sequence[Report],
    pending: Mapping[Key, Mapping[int, Request]],
    process_sets: Mapping[int, Sequence[int]],
    limit_s: float,
) -> dict[tuple[int, ...], list[str]]:
    """Operations that waited ``limit_s`` or longer somewhere, grouped by the ranks they wait for."""
    waited: dict[Key, float] = {}
    for report in reports:
        for request, seconds in zip(report.requests, report.waited_s, strict=True):
            waited[request.key] = max(seconds, waited.get(request.key, 0.0))
    joined = {rank for rank, report in enumerate(reports) if report.has_joined}
    found: dict[tuple[int, ...], list[str]] = {}
    for key, by_rank in pending.items():
        if key.collective == Collective.JOIN:
            continue  # who has no data left waits as long as the others have some
        missing = tuple(rank for rank in process_sets[key.process_set_id] if rank not in by_rank and rank not in joined)
        if missing and waited[key] >= limit_s:
            found.setdefault(missing, []).append(f"{_worded(key, by_rank)} ({waited[key]:.0f} s)")
    return found


def _worded(key: Key, by_rank: Mapping[int, Request]) -> str:
    names = next(iter(by_rank.values())).names
    return f"{key} of {', '.join(names[:_NAMES_SHOWN])}{' ...' if len(names) > _NAMES_SHOWN else ''}" if names else str(key)


def fatal(
    reports: Sequence[Report],
    pending: Mapping[Key, Mapping[int, Request]],
    process_sets: Mapping[int, Sequence[int]],
    shutdown_s: float,
) -> str:
    """Why the job must end because of a stall, or an empty string; ``shutdown_s`` 0 never ends it."""
    if not shutdown_s:
        return ""
    found = stalled(reports, pending, process_sets, shutdown_s)
    if not found:
        return ""
    return f"{describe(found)}; the limit of {shutdown_s:g} s (stall_shutdown_s) has passed"


def describe(found: Mapping[tuple[int, ...], list[str]]) -> str:
    """Word ``stalled``'s result in one line."""
    sides = []
    for missing, names in found.items():
        shown = ", ".join(names[:_NAMES_SHOWN])
        more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
        sides.append(f"{format_ranks(missing)} did not submit {shown}{more}")
    return "stalled: " + "; ".join(sides)
