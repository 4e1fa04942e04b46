"""Who takes part: process sets that come and go, and ranks that run out of data. Every rank makes these calls."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from hvdlite import submission
from hvdlite.errors import InvalidRequestError, format_ranks
from hvdlite.message import Collective
from hvdlite.objects import allgather_object
from hvdlite.process_set import Members, ProcessSet
from hvdlite.runtime import Runtime, default_runtime
from hvdlite.submission import Submission


def add_process_set(process_set: ProcessSet | Iterable[int], runtime: Runtime | None = None) -> ProcessSet:
    """Register a set of ranks; collective over all ranks, members or not, with the same ranks everywhere.

    Raises: InvalidRequestError for ranks that do not exist and, on every rank, for a set that exists already;
    NotImplementedError for a set given by communicator, which ``init(process_sets=...)`` takes; MismatchError where the
    ranks pass different sets.
    """
    runtime = runtime or default_runtime()
    made = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    if made.mpi_comm is not None:
        raise NotImplementedError("add_process_set: a set given by a communicator: pass its ranks, or pass it to init()")
    if made.process_set_id is not None and runtime.process_sets.get(made.process_set_id) == made.members():
        raise InvalidRequestError(f"add_process_set: {made} is registered already: make a new ProcessSet")
    assert made.ranks is not None
    made.register(_add(runtime, tuple(made.ranks)))
    return made


def remove_process_set(process_set: ProcessSet, runtime: Runtime | None = None) -> bool:
    """Unregister a set; collective over all ranks. False for the global set and for one that is not registered."""
    runtime = runtime or default_runtime()
    if process_set.process_set_id in (None, 0):
        return False
    members = runtime.members(process_set)
    call = Submission(Collective.REMOVE_PROCESS_SET, None, name=_next_name(runtime), runtime=runtime)
    submission.change_process_sets(call, (members.process_set_id,)).wait()
    del runtime.process_sets[members.process_set_id]
    process_set.register(None)
    return True


def join(runtime: Runtime | None = None) -> int:
    """Say that this rank has no data left, and wait until all have; return the rank that came last.

    Meanwhile this rank takes part in the allreduces of the others with values that change no result; an Average still
    divides by the number of all ranks. Other operations of the others fail with MismatchError.
    """
    runtime = runtime or default_runtime()
    last: int = submission.join(Submission(Collective.JOIN, None, name="join", runtime=runtime)).wait()
    runtime.restart_unnamed()
    return last


def register_at_init(process_sets: Sequence[ProcessSet], runtime: Runtime) -> None:
    """Register the sets given to ``init``. Those given by communicator may differ between ranks.

    Raises: InvalidRequestError, on every rank, for what is listed twice or exists already.
    """
    mine = [_ranks_of(one, runtime) for one in process_sets]
    everyones = allgather_object(mine, runtime=runtime)
    if len({len(theirs) for theirs in everyones}) > 1:
        counts = ", ".join(f"rank {rank} has {len(theirs)}" for rank, theirs in enumerate(everyones))
        raise InvalidRequestError(f"init(process_sets=...): the lists differ in length: {counts}: pass as many on every rank")
    known = {one.ranks: one for one in runtime.process_sets.values()}  # init() may be called again with the same sets
    duplicates = {ranks for theirs in everyones for ranks in theirs
                  if theirs.count(ranks) > 1 or ranks == runtime.process_sets[0].ranks}
    if duplicates:
        raise InvalidRequestError(
            f"init(process_sets=...): {', '.join(map(format_ranks, sorted(duplicates)))}: listed twice, or the set of all: "
            "list every set of ranks once")
    for index in range(len(mine)):
        for ranks in sorted({theirs[index] for theirs in everyones}):
            if ranks not in known:
                known[ranks] = _add(runtime, ranks)
    for one, ranks in zip(process_sets, mine, strict=True):
        one.register(known[ranks])


def _add(runtime: Runtime, ranks: tuple[int, ...]) -> Members:
    size = runtime.topology.size
    if ranks[-1] >= size:
        raise InvalidRequestError(f"process set of {format_ranks(ranks)}: this job has ranks 0 to {size - 1} only")
    call = Submission(Collective.ADD_PROCESS_SET, None, name=_next_name(runtime), runtime=runtime)
    process_set_id = submission.change_process_sets(call, ranks).wait()
    own = runtime.topology.rank
    members = Members(process_set_id, ranks, ranks.index(own) if own in ranks else -1)
    runtime.process_sets[process_set_id] = members
    return members


def _next_name(runtime: Runtime) -> str:
    """One count for both directions, so that ranks that call differently are told so."""
    return runtime.label("process_sets")


def _ranks_of(process_set: Any, runtime: Runtime) -> tuple[int, ...]:
    if not isinstance(process_set, ProcessSet):
        raise InvalidRequestError(f"init(process_sets=...): {process_set!r} is no ProcessSet: pass ProcessSet([0, 1])")
    if process_set.mpi_comm is None:
        assert process_set.ranks is not None
        return tuple(process_set.ranks)
    return tuple(sorted(process_set.mpi_comm.allgather(runtime.topology.rank)))
