"""ControlPlane: the few small collectives that negotiation needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np


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
