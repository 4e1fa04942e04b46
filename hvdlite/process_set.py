"""Process sets: some of the ranks, which run collectives among themselves."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from hvdlite.errors import InvalidRequestError, NotInitializedError


@dataclass(frozen=True)
class Members:
    """A set as the runtime knows it. ``ranks``: global, ascending. ``rank_in_set``: this rank's place, or -1."""

    process_set_id: int
    ranks: tuple[int, ...]
    rank_in_set: int

    def size(self) -> int:
        """How many ranks it has."""
        return len(self.ranks)


class ProcessSet:
    """A set as users hold it: give it to ``init(process_sets=[...])`` or ``add_process_set``, then to collectives.

    ``process_set_id`` is None, and so are ``size()`` and ``rank()``, until it is registered and after its removal.
    """

    def __init__(self, ranks_or_comm: Iterable[int] | Any) -> None:
        """``ranks_or_comm``: global ranks, or an mpi4py communicator.

        Raises: InvalidRequestError for anything else.
        """
        self.process_set_id: int | None = None
        self.mpi_comm: Any = None
        self._members: Members | None = None
        self.ranks: list[int] | None = None
        if hasattr(ranks_or_comm, "Get_group"):
            self.mpi_comm = ranks_or_comm
            return
        try:
            ranks = list(ranks_or_comm)
        except TypeError:
            ranks = [None]
        if any(isinstance(rank, bool) or not hasattr(rank, "__index__") for rank in ranks):
            raise InvalidRequestError(f"ProcessSet({ranks_or_comm!r}): pass a list of ranks, or an mpi4py communicator")
        self.ranks = sorted(rank.__index__() for rank in ranks)
        if not self.ranks or self.ranks[0] < 0 or len(set(self.ranks)) < len(self.ranks):
            raise InvalidRequestError(f"ProcessSet({self.ranks}): pass at least one rank, none twice, none below 0")

    def register(self, members: Members | None) -> None:
        """Note what the runtime made of it; None when it is gone."""
        self._members = members
        self.process_set_id = None if members is None else members.process_set_id
        if members is not None:
            self.ranks = list(members.ranks)

    def size(self) -> int | None:
        """How many ranks it has; None while it is not registered."""
        return None if self._members is None else self._members.size()

    def rank(self) -> int | None:
        """This process's place in it; None while it is not registered.

        Raises: InvalidRequestError on a rank that is not in it.
        """
        if self._members is None:
            return None
        if self._members.rank_in_set < 0:
            raise InvalidRequestError(f"{self}: this rank is not in it")
        return self._members.rank_in_set

    def included(self) -> bool | None:
        """Whether this process is in it; None while it is not registered."""
        return None if self._members is None else self._members.rank_in_set >= 0

    def members(self) -> Members:
        """What the runtime knows. Raises: InvalidRequestError while it is not registered."""
        if self._members is None:
            if self is global_process_set:
                raise NotInitializedError("hvdlite is not running in this process: call init() first")
            raise InvalidRequestError(f"{self} is not registered (any more): pass it to add_process_set() or init() first")
        return self._members

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"

    __repr__ = __str__


#: All ranks.
global_process_set = ProcessSet([0])
global_process_set.ranks = None
