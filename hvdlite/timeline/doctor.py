"""Why a job hung or died, told from its rings alone, with all processes gone.

What every rank had submitted and not seen complete is compared over the ranks, as is what was said of each name; a rank that
lacks a call is told what it did last, and what it did next in the steps before.
"""

from __future__ import annotations

from pathlib import Path

from hvdlite.errors import format_ranks
from hvdlite.timeline.job import FINISHED, NEGOTIATED, Job, Rank, merge
from hvdlite.timeline.phase import Phase
from hvdlite.timeline.ring import TimelineError, missing_ranks, read_directory

#: Records of a ring's end that are looked at. Chosen: many steps.
_NEWEST = 50_000
_SHOWN = 5
#: What ranks must agree on for one name, and how it is called.
_FIELDS = (("shapes", "shapes"), ("dtypes", "dtypes"), ("op", "ops"), ("root", "root ranks"), ("names", "tensors"),
           ("compressor", "compressors"))


def examine(directory: Path | str) -> tuple[list[str], bool]:
    """Lines of what was found, and whether all is well. Raises: TimelineError without rings."""
    rings = read_directory(directory, newest=_NEWEST)
    missing = missing_ranks(rings)
    lines = []
    if missing:
        lines.append(f"{format_ranks(missing)} left no ring: it never came to init(), or its host's files are not here")
    if not any(len(ring.records) for ring in rings if ring.header["thread"] != "clock"):
        raise TimelineError(f"{directory}: the rings hold no record: the job ended before its first operation")
    job = merge(rings, missing, allow_unsynced=True, directory=str(directory))
    pending = {rank.rank: open_calls(job, rank) for rank in job.ranks}
    lines += _mismatches(job, pending)
    lines += _waits(job, pending)
    lines += _ends(job, pending)
    is_well = not lines
    lines += [_state(job, rank, pending[rank.rank]) for rank in job.ranks]
    return (["All ranks completed what they submitted."] if is_well else []) + lines, is_well


def open_calls(job: Job, rank: Rank) -> dict[str, int]:
    """Calls that were submitted and did not complete or fail, and when they were, in order."""
    found: dict[str, int] = {}
    failed: set[str] = set()
    for phase, name, start_ns in rank.of(Phase.SUBMIT, Phase.ERROR)[["phase", "name", "start_ns"]].tolist():
        if phase == Phase.SUBMIT:
            found[job.names[name]] = start_ns
        else:
            failed.add(job.names[name])
    last = {job.names[name]: end_ns for name, end_ns in rank.of(*FINISHED)[["name", "end_ns"]].tolist()}
    started = {name: at for name, at in found.items() if last.get(name, -1) <= at}
    # A call fails under its key's name, which begins the message.
    return {name: at for name, at in started.items()
            if not any(_key_words(job, name) and text.startswith(_key_words(job, name)) for text in failed)}


def _key_words(job: Job, name: str) -> str:
    for about in job.about.get(name, {}).values():
        return f"{about['key'][1]} {about['key'][2]!r}:"
    return ""


def _mismatches(job: Job, pending: dict[int, dict[str, int]]) -> list[str]:
    """Names of which ranks have said different things."""
    lines = []
    keys: dict[tuple[str, ...], dict[int, tuple[str, dict[str, object]]]] = {}
    for name, of_ranks in job.about.items():
        for rank, about in of_ranks.items():
            # A group's label has its tensors in it: ranks that differ in these have one key.
            keys.setdefault(tuple(map(str, about["key"])), {})[rank] = (name, about)
    for key, told in keys.items():
        for field, word in _FIELDS:
            values: dict[str, list[int]] = {}
            for rank, (_, about) in told.items():
                values.setdefault(str(about[field]), []).append(rank)
            if len(values) > 1:
                sides = "; ".join(f"{format_ranks(ranks)}: {value[:200]}" for value, ranks in values.items())
                lines.append(f"MISMATCH {key[1]} {key[2]!r}: {word} differ: {sides}: submit the same on every rank")
                break
    errors = {job.names[name] for rank in job.ranks for name in rank.of(Phase.ERROR)["name"].tolist()}
    return lines + [f"ERROR {text}" for text in sorted(errors)[:_SHOWN]]


def _waits(job: Job, pending: dict[int, dict[str, int]]) -> list[str]:
    """Who has what pending that others have not."""
    lines = []
    present = set(pending)
    names = dict.fromkeys(name for own in pending.values() for name in own)
    lacking: dict[tuple[int, ...], list[str]] = {}
    for name in names:
        have = {rank for rank, own in pending.items() if name in own}
        members = _members(job, name) or present
        lacks = tuple(sorted((members & present) - have))
        if lacks:
            lacking.setdefault(lacks, []).append(name)
        elif have:
            lines.append(f"IN FLIGHT {name}: submitted by {format_ranks(have)} and not complete: data was on its way")
    crossed = [ranks for ranks in lacking if any(pending[rank] for rank in ranks)]
    for ranks, own in lacking.items():
        have = present - set(ranks)
        more = f" and {len(own) - _SHOWN} more" if len(own) > _SHOWN else ""
        word = "DIFFERENT ORDER" if len(crossed) > 1 and ranks in crossed else "WAITING"
        lines.append(f"{word} {format_ranks(have)} for {format_ranks(ranks)}: {', '.join(own[:_SHOWN])}{more}")
        for rank in ranks:
            lines.append(f"  {_doing(job, next(one for one in job.ranks if one.rank == rank), own[0], pending[rank])}")
    return lines


def _members(job: Job, name: str) -> set[int]:
    """Ranks that ever submitted a name of a process set that is not of all; empty for those of all."""
    about = next(iter(job.about.get(name, {}).values()), None)
    if about is None or not about["key"][0]:
        return set()
    number = job.names.index(name)
    return {rank.rank for rank in job.ranks if (rank.of(Phase.SUBMIT)["name"] == number).any()}


def _doing(job: Job, rank: Rank, wanted: str, pending: dict[str, int]) -> str:
    """What a rank did last, and what it should have done next."""
    records = rank.of(Phase.SUBMIT)
    order = [job.names[name] for name in records["name"].tolist()]
    ended = [job.names[name] for name in rank.of(Phase.END)["name"].tolist()]
    if ended:
        return f"rank {rank.rank} had left: {ended[-1]}"
    at = _end_of(job)
    if not order:
        return f"rank {rank.rank} never submitted anything"
    silent_s = (at - int(records["start_ns"].max())) / 1e9
    text = f"rank {rank.rank} submitted {order[-1]} last, {silent_s:.2f} s before the end"
    follower = expected_next(order)
    if pending:
        text += f", and waits for {', '.join(list(pending)[:_SHOWN])}"
        if wanted in order or any(wanted in _order(job, other) for other in job.ranks):
            text += f"; it has passed over {wanted}"
    elif follower:
        text += f"; next it should have submitted {follower}"
    marks = rank.of(Phase.INPUT, Phase.FORWARD, Phase.BACKWARD, Phase.STEP)
    if len(marks):
        last = marks[int(marks["end_ns"].argmax())]
        text += f"; its last mark is the end of {Phase(int(last['phase'])).name.lower()} of step {int(last['count'])}"
    stopped = rank.of(Phase.NOT_RUNNING)
    if len(stopped) and at - int(stopped["end_ns"].max()) < 1e9:
        text += "; it did not run towards the end"
    return text


def expected_next(order: list[str]) -> str:
    """What followed the last name the time before, if that was ever submitted before."""
    for place in range(len(order) - 2, -1, -1):
        if order[place] == order[-1]:
            return order[place + 1]
    return ""


def _order(job: Job, rank: Rank) -> list[str]:
    return [job.names[name] for name in rank.of(Phase.SUBMIT)["name"].tolist()]


def _end_of(job: Job) -> int:
    return max(int(rank.records["end_ns"].max(initial=0)) for rank in job.ranks)


def _ends(job: Job, pending: dict[int, dict[str, int]]) -> list[str]:
    """Ranks whose recording stops without a farewell, or long before the others'."""
    lines = []
    at = _end_of(job)
    ended = {rank.rank: job.names[int(own["name"][-1])] for rank in job.ranks if len(own := rank.of(Phase.END))}
    for rank in job.ranks:
        last = int(rank.records["end_ns"].max(initial=0))
        if rank.rank not in ended:
            lines.append(f"rank {rank.rank} ends without a farewell, {(at - last) / 1e9:.2f} s before the job's last record: "
                         "it was killed, crashed or still runs")
    for reason in sorted(set(ended.values())):
        if not reason.startswith("NotInitializedError"):
            lines.append(f"{format_ranks(rank for rank, one in ended.items() if one == reason)} ended by {reason}")
    return lines


def _state(job: Job, rank: Rank, pending: dict[str, int]) -> str:
    steps = rank.of(Phase.STEP)
    told = f"rank {rank.rank} on {rank.header['host']} (process {rank.header['pid']}):"
    told += f" {int(steps['count'].max()) + 1} steps," if len(steps) else ""
    negotiated = set(rank.of(*NEGOTIATED)["plan"].tolist())
    told += f" {len(negotiated)} agreed plans, {len(pending)} call(s) pending"
    return told
