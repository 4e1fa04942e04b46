"""ProcessSet: some of the ranks, which run collectives among themselves."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ProcessSet:
    """An agreed set. ``ranks`` are global ranks, ascending; set 0 holds all. ``rank_in_set``: this rank's place, or -1."""

    process_set_id: int
    ranks: tuple[int, ...]
    rank_in_set: int

    def size(self) -> int:
        """How many ranks it has."""
        return len(self.ranks)
