"""What ranks tell each other: Request ("ready here") and Agreement (what rank 0 answers).

Wire format: named tuples of plain Python values, pickled. They are tuples, not dataclasses, because every
cycle compares and hashes them, and tuples do both in C.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final, NamedTuple


class ReduceOp(IntEnum):
    """How values are combined. The codes are Horovod's."""

    Average = 0
    Sum = 1
    Adasum = 2
    Min = 3
    Max = 4
    Product = 5


class Collective:
    """The kinds of collective operation; plain strings, because every call compares them."""

    ALLREDUCE: Final = "allreduce"
    ALLGATHER: Final = "allgather"
    BROADCAST: Final = "broadcast"
    ALLTOALL: Final = "alltoall"
    REDUCESCATTER: Final = "reducescatter"
    BARRIER: Final = "barrier"
    JOIN: Final = "join"
    ADD_PROCESS_SET: Final = "add_process_set"
    REMOVE_PROCESS_SET: Final = "remove_process_set"


#: Collectives whose first dimensions may differ between ranks and between calls: a Request writes -1 there.
RAGGED = frozenset((Collective.ALLGATHER, Collective.ALLTOALL))

#: What changes the whole job and is never cached: it runs once, then its slot is given up.
SINGULAR = frozenset((Collective.JOIN, Collective.ADD_PROCESS_SET, Collective.REMOVE_PROCESS_SET))

#: Written instead of a first dimension that is exchanged with the data.
ANY_LENGTH = -1


class Key(NamedTuple):
    """What identifies an operation on every rank: one may be in flight per key and rank."""

    process_set_id: int
    collective: str
    name: str

    def __str__(self) -> str:
        return f"{self.collective} {self.name!r}"


class Request(NamedTuple):
    """One rank's call, as far as the ranks must agree on it.

    *Shapes*: one entry per tensor of the call in ``dtypes`` and ``shapes``; a group is one Request. ``names``: the
    tensors' own names, where a group has such.
    *Units*: ``root_rank`` is a global rank, -1 where there is no root.
    """

    key: Key
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    op: int = ReduceOp.Sum.value
    root_rank: int = -1
    prescale: float = 1.0
    postscale: float = 1.0
    device: str = "cpu"
    compressor: str = "none"
    names: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """How timelines and reports call it: a group by its first and last tensor."""
        key = f"{self.key.collective}.{self.key.name}"
        if not self.names:
            return key
        return f"{key}[{self.names[0]}]" if len(self.names) == 1 else f"{key}[{self.names[0]} .. {self.names[-1]}]"


class Report(NamedTuple):
    """All that one rank has pending, and how long each has waited, in seconds."""

    requests: tuple[Request, ...]
    waited_s: tuple[float, ...]

    @property
    def has_joined(self) -> bool:
        """Whether the rank is out of data: it takes part in others' allreduces with neutral values."""
        return any(request.key.collective == Collective.JOIN for request in self.requests)


class Agreement(NamedTuple):
    """What rank 0 made of all reports; every rank applies it to its slots in this order.

    ``evicted``: slots given up. ``assigned``: (slot, request) pairs, request None while the ranks that
    submitted so far disagree. ``errors``: (key, message) of operations that fail on every rank. ``ready``:
    slots that every rank submitted alike. ``fatal``: why the job must end, or empty. ``last_joined``: the rank that
    joined last, once all have.
    """

    evicted: tuple[int, ...]
    assigned: tuple[tuple[int, Request | None, Key], ...]
    errors: tuple[tuple[Key, str], ...]
    ready: tuple[int, ...]
    fatal: str
    last_joined: int = -1


class Farewell(NamedTuple):
    """What a rank says when the job ends: whether it asked for it, whether because it failed, why (for
    people), how many operations it still had pending, and whether its process ends."""

    leaving: bool
    failed: bool
    reason: str
    num_pending: int
    is_final: bool = False
