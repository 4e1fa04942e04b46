"""ControlPlane: the few small collectives that negotiation needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum, IntEnum, auto
from typing import Any, NamedTuple, Protocol

import numpy as np

from hvdlite.response_cache import SlotTable
from hvdlite.tensor_queue import TensorEntry, TensorQueue


@dataclass(frozen=True)
class Topology:
    """Where this rank stands. ``local`` counts the ranks of one host, ``cross`` the hosts at one local rank."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    is_homogeneous: bool
    #: Of every rank, the lowest rank of its host.
    hosts: tuple[int, ...] = ()


class ControlPlane(Protocol):
    """Small collectives over all ranks, issued by the background thread in the same order everywhere.

    *Guarantees*: a wait for other ranks uses (nearly) no CPU time; nothing but the transport's own failure
    is raised, as TransportError. ``num_collectives`` counts what was issued, ``num_bytes`` what this
    rank contributed to it.
    """

    topology: Topology
    #: What tells this job from others, the same on all ranks.
    job: str
    num_collectives: int
    num_bytes: int

    def agree(self, bits: int, num_words: int, pause: Callable[[float], bool], waited_s: float) -> int:
        """Combine ``bits``, ``num_words`` 64-bit words equal in number everywhere, of all ranks by bitwise AND.

        ``pause`` sleeps for some seconds while other ranks are awaited, and tells whether it was woken up; what it
        raises ends the wait. ``waited_s``: how long nothing has happened so far, the longer the lazier.
        """

    def gather(self, value: Any) -> list[Any] | None:
        """Collect one value per rank at rank 0; None elsewhere."""

    def broadcast(self, value: Any) -> Any:
        """Hand rank 0's value to every rank."""

    def start_send(self, array: np.ndarray, peer: int) -> Callable[[], None]:
        """Start sending ``array`` to a rank and return what waits until it may be changed."""

    def send(self, array: np.ndarray, peer: int) -> None:
        """Send ``array`` to a rank."""

    def receive(self, array: np.ndarray, peer: int) -> None:
        """Receive what a rank sends, exactly as large as ``array``."""

    def close(self) -> None:
        """Give up the plane's resources; every rank closes it in the same cycle."""


class Outcome(Enum):
    """What became of a call in its caller's thread; after BEGUN it is the background thread's."""

    NOTHING = auto()
    BEGUN = auto()
    DONE = auto()


class Begun(IntEnum):
    """How far a call came that was handed over."""

    NOTHING = 0
    AGREEING = 1
    EXCHANGING = 2
    FAILED = 3


class Note(NamedTuple):
    """One call that was done in its caller's thread: its slot, its entry if calls are recorded, and when it was made, began to
    agree, was agreed, and ended."""

    slot: int
    entry: TensorEntry | None
    made_ns: int
    began_ns: int
    agreed_ns: int
    ended_ns: int


class FastPath(Protocol):
    """Calls that are made in their caller's thread while the background thread has nothing to do.

    *Threads*: ``run`` from any thread, everything else from the background thread. Between ``open`` and ``close`` callers own
    the communicators, one at a time.
    """

    #: Whether entries are kept for ``finished``, and the background thread is woken to look at them.
    is_recording: bool

    def run(self, entry: TensorEntry, slots: SlotTable, queue: TensorQueue) -> Outcome:
        """Agree and exchange, if it is such a call and every rank is there; the sum is in place then, and nothing else done."""

    def open(self, bits: int, num_words: int) -> None:
        """Let callers in. ``bits``: what this rank agrees to with nothing pending, as in ``ControlPlane.agree``."""

    def close(self) -> None:
        """Let nobody in any more; waits for who is in."""

    def finished(self) -> Iterable[Note]:
        """What was done since the last time, in order."""

    @property
    def begun(self) -> Begun:
        """How far the call came that was handed over, if there is one."""

    def take_over(self, queue: TensorQueue) -> TensorEntry | None:
        """Its entry, in flight like any other from now on; None where it is so already."""

    def agree(self, pause: Callable[[float], bool], waited_s: float) -> int:
        """Its agreement, as from ``ControlPlane.agree``."""

    def complete_exchange(self, pause: Callable[[float], bool]) -> None:
        """Wait for its sum. Raises: TransportError, also where it is FAILED."""
