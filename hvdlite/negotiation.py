"""Negotiation: what rank 0 decides from every rank's report. Pure functions of values.

An operation is ready when every rank of its process set has it pending with an equal Request. When all have
it pending but differ, it fails on all of them with one message. Until all have it, its slot holds the
request that the early ranks agree on, or None while they disagree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hvdlite import stall
from hvdlite.errors import format_ranks
from hvdlite.message import SINGULAR, Agreement, Collective, Key, ReduceOp, Report, Request
from hvdlite.response_cache import SlotTable

#: Seconds after which one name submitted to different collectives is called a mismatch. Chosen: long enough
#: for two calls of one name that merely cross, short enough to end a mistake within a second.
CROSSED_AFTER_S = 0.3


def negotiate(
    table: SlotTable,
    reports: Sequence[Report],
    process_sets: Mapping[int, Sequence[int]],
    *,
    stall_shutdown_s: float = 0.0,
) -> Agreement:
    """Decide one exchange; ``table`` is read, not changed."""
    pending = _by_key(reports)
    assigned: dict[int, tuple[int, Request | None, Key]] = {}
    errors: list[tuple[Key, str]] = []
    ready: list[int] = []
    dropped: set[int] = set()
    free = table.next_free()
    joined = {rank for rank, report in enumerate(reports) if report.has_joined}
    hopeless = _crossed(pending, reports, process_sets) | _cut_off(pending, joined, process_sets)
    for key, by_rank in pending.items():
        agreed = _common(list(by_rank.values()))
        missing = set(process_sets[key.process_set_id]) - by_rank.keys()
        complete = not missing or (missing <= joined and _goes_on(key))
        slot = table.find(key)
        if key in hopeless or (complete and agreed is None):
            errors.append((key, hopeless.get(key) or describe_mismatch(key, by_rank)))
            if slot is not None:
                dropped.add(slot)
            continue
        if slot is None:
            slot = next(free)
            assigned[slot] = (slot, agreed, key)
        elif table.requests[slot] != agreed:
            assigned[slot] = (slot, agreed, key)
        if complete:
            ready.append(slot)
    evicted = sorted(dropped | set(_overflow(table, pending, len(dropped), len(assigned))))
    return Agreement(
        evicted=tuple(evicted),
        assigned=tuple(assigned.values()),
        errors=tuple(errors),
        ready=tuple(sorted(ready)),
        fatal=stall.fatal(reports, pending, process_sets, stall_shutdown_s),
        last_joined=_last_joined(reports) if len(joined) == len(reports) else -1,
    )


def _goes_on(key: Key) -> bool:
    """Whether an operation can do without ranks that have joined."""
    return key.collective == Collective.ALLREDUCE and key.process_set_id == 0


def _cut_off(
    pending: Mapping[Key, Mapping[int, Request]], joined: set[int], process_sets: Mapping[int, Sequence[int]]
) -> dict[Key, str]:
    """Find what only joined ranks are missing from, and cannot do without them."""
    found: dict[Key, str] = {}
    for key in pending if joined else ():
        missing = set(process_sets[key.process_set_id]) - pending[key].keys()
        if missing and missing <= joined and key.collective not in SINGULAR and not _goes_on(key):
            found[key] = (f"{key}: {format_ranks(missing)} called join(): only an allreduce over all ranks goes on without "
                          "them: call other operations while every rank still has data")
    return found


def _last_joined(reports: Sequence[Report]) -> int:
    """The rank that has waited least in join(); of several the highest."""
    waited = [min(seconds for request, seconds in zip(report.requests, report.waited_s, strict=True)
                  if request.key.collective == Collective.JOIN) for report in reports]
    return min(range(len(reports)), key=lambda rank: (waited[rank], -rank))


def _by_key(reports: Sequence[Report]) -> dict[Key, dict[int, Request]]:
    """Sort the reports by operation, in order of first appearance, rank 0's first."""
    pending: dict[Key, dict[int, Request]] = {}
    for rank, report in enumerate(reports):
        for request in report.requests:
            pending.setdefault(request.key, {})[rank] = request
    return pending


def _common(requests: list[Request]) -> Request | None:
    first = requests[0]
    return first if all(request == first for request in requests) else None


def _overflow(table: SlotTable, pending: Mapping[Key, object], leaving: int, coming: int) -> list[int]:
    excess = len(table) - leaving + coming - table.capacity
    if excess <= 0:
        return []
    chosen: list[int] = []
    for slot in table.evictable(lambda key: key in pending):
        if len(chosen) == excess:
            break
        chosen.append(slot)
    return chosen


def _crossed(
    pending: Mapping[Key, Mapping[int, Request]],
    reports: Sequence[Report],
    process_sets: Mapping[int, Sequence[int]],
) -> dict[Key, str]:
    """Find names that some ranks gave to one collective and the other ranks to another, for good."""
    by_name: dict[tuple[int, str], list[Key]] = {}
    for key in pending:
        by_name.setdefault((key.process_set_id, key.name), []).append(key)
    found: dict[Key, str] = {}
    for (process_set_id, _), keys in by_name.items():
        members = len(process_sets[process_set_id])
        incomplete = [key for key in keys if len(pending[key]) < members]
        ranks = {rank for key in incomplete for rank in pending[key]}
        if len(incomplete) < 2 or len(ranks) < members or not _all_waited(incomplete, pending, reports):
            continue
        sides = "; ".join(f"{format_ranks(pending[key])} called {key.collective}" for key in incomplete)
        for key in incomplete:
            found[key] = f"{key}: operations differ: {sides}; call the same operation under this name on every rank"
    return found


def _all_waited(keys: list[Key], pending: Mapping[Key, Mapping[int, Request]], reports: Sequence[Report]) -> bool:
    wanted = set(keys)
    return all(
        waited_s >= CROSSED_AFTER_S
        for rank in {rank for key in keys for rank in pending[key]}
        for request, waited_s in zip(reports[rank].requests, reports[rank].waited_s, strict=True)
        if request.key in wanted
    )


#: What is compared, in this order: field of Request, its name in the plural, and what to do.
_COMPARED = (
    ("names", "names of its tensors", "give the tensors the same names, in the same order, on every rank"),
    ("dtypes", "dtypes", "submit the same dtype on every rank"),
    ("shapes", "shapes", "submit the same shape on every rank"),
    ("op", "reduction ops", "use the same op on every rank"),
    ("root_rank", "root ranks", "name the same root_rank on every rank"),
    ("prescale", "prescale factors", "use the same prescale_factor on every rank"),
    ("postscale", "postscale factors", "use the same postscale_factor on every rank"),
    ("device", "devices", "put the tensor on the same kind of device on every rank"),
    ("compressor", "compressors", "use the same compression on every rank"),
)


def describe_mismatch(key: Key, by_rank: Mapping[int, Request]) -> str:
    """Word the first difference between the ranks' requests, with the ranks on each side."""
    for field, plural, advice in _COMPARED:
        sides: dict[object, list[int]] = {}
        for rank, request in sorted(by_rank.items()):
            sides.setdefault(getattr(request, field), []).append(rank)
        if len(sides) > 1 and key.collective in SINGULAR:
            plural, advice = "ranks of the process set", "pass the same ranks everywhere, in the same order of calls"
        if len(sides) > 1:
            words = [f"{format_ranks(ranks)} {'has' if len(ranks) == 1 else 'have'} {_word(field, value)}"
                     for value, ranks in sides.items()]
            return f"{key}: {plural} differ: {', '.join(words)}; {advice}"
    raise AssertionError(f"{key}: no difference in {by_rank}")


def _word(field: str, value: object) -> str:
    if field == "op":
        return ReduceOp(value).name  # type: ignore[arg-type]
    if field == "shapes":
        shapes = [f"({', '.join('any' if n < 0 else str(n) for n in shape)}{',' if len(shape) == 1 else ''})"
                  for shape in value]  # type: ignore[attr-defined]
        return shapes[0] if len(shapes) == 1 else f"[{', '.join(shapes)}]"
    if field == "names":
        return f"[{', '.join(value)}]"  # type: ignore[arg-type]
    if field == "dtypes":
        return value[0] if len(value) == 1 else f"[{', '.join(value)}]"  # type: ignore
    return str(value)
