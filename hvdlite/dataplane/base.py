"""DataPlane: collectives on flat arrays, within one process set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from hvdlite.message import ReduceOp


class Transfer(Protocol):
    """A message on its way; its array is left alone until it has arrived or, at the sender, gone."""

    def wait(self) -> None:
        """Return once that is so; uses no core meanwhile."""


class MovesRows(Protocol):
    """What gathers and exchanges rows, of arrays on the host or a GPU alike; see :class:`DataPlane`."""

    rank: int

    def exchange_sizes(self, values: Sequence[int]) -> np.ndarray: ...

    def allgather(self, source: Any, target: Any, counts: Sequence[int]) -> None: ...

    def alltoall(self, source: Any, target: Any, counts: np.ndarray) -> None: ...


class DataPlane(Protocol):
    """Collectives among the ranks of one process set; ``rank`` and ``size`` count inside the set.

    *Shapes*: all arrays are 1-D, contiguous NumPy arrays; counts are in elements, in rank order.
    *Threads*: the background thread only, in plan order on every rank.
    *Guarantees*: outputs are bitwise equal on all ranks; Average is not known here (it is Sum and a scale).
    *Raises*: TransportError.
    """

    rank: int
    size: int

    def allreduce(self, source: np.ndarray, target: np.ndarray, op: ReduceOp) -> None:
        """Combine ``source`` of all ranks into ``target``, which may be ``source`` itself. No 16-bit floats."""

    def reducescatter(self, source: np.ndarray, target: np.ndarray, counts: Sequence[int], op: ReduceOp) -> None:
        """Combine as allreduce, keep only this rank's piece, of ``counts[rank]`` elements. No 16-bit floats."""

    def allgather(self, source: np.ndarray, target: np.ndarray, counts: Sequence[int]) -> None:
        """Concatenate every rank's ``source`` (``counts[r]`` elements) in rank order."""

    def alltoall(self, source: np.ndarray, target: np.ndarray, counts: np.ndarray) -> None:
        """Send ``counts[i, j]`` elements from rank i to rank j; ``counts`` is (size, size), equal everywhere."""

    def broadcast(self, buffer: np.ndarray, root: int) -> None:
        """Overwrite ``buffer`` with that of rank ``root`` of the set."""

    def send(self, array: np.ndarray, peer: int, tag: int) -> Transfer:
        """Start sending bytes to rank ``peer``; two messages with equal ``tag`` arrive in order. *Shapes*: (n,), uint8."""

    def receive(self, array: np.ndarray, peer: int, tag: int) -> Transfer:
        """Start receiving exactly ``len(array)`` bytes from rank ``peer``. *Shapes*: (n,), uint8."""

    def exchange_sizes(self, values: Sequence[int]) -> np.ndarray:
        """Give equally many integers on every rank; return them all, shape (size, len(values)), int64."""

    def barrier(self) -> None:
        """Return once every rank of the set is here."""

    def subset(self, ranks: Sequence[int]) -> DataPlane | None:
        """Make a plane of some of this plane's ranks, ascending; every rank of this plane calls it. None outside."""

    def levels(self) -> tuple[DataPlane, DataPlane] | None:
        """The planes of the ranks of this rank's host, and of the ranks of all hosts that have its place within theirs.

        None where there is one host, or each has one rank, or they differ in number. Every rank calls it; made once.
        """

    def close(self) -> None:
        """Give up the plane's resources; every rank of the set closes it in the same cycle."""


def host_groups(hosts: Sequence[int]) -> tuple[list[list[int]], list[list[int]]] | None:
    """Cut ranks, given each one's host, into those of each host and those of each place within a host; None as ``levels``."""
    by_host: dict[int, list[int]] = {}
    for rank, host in enumerate(hosts):
        by_host.setdefault(host, []).append(rank)
    local = list(by_host.values())
    if len(local) < 2 or len(local[0]) < 2 or any(len(one) != len(local[0]) for one in local):
        return None
    return local, [list(one) for one in zip(*local, strict=True)]


def offsets(counts: Sequence[int] | np.ndarray) -> np.ndarray:
    """Where each rank's piece begins, and the total as the last one. *Shapes*: (n,) to (n + 1,)."""
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def even_counts(total: int, parts: int) -> list[int]:
    """Cut ``total`` into ``parts``; the first ``total % parts`` get one more."""
    return [total // parts + (part < total % parts) for part in range(parts)]


def as_bits(array: np.ndarray) -> np.ndarray:
    """View an array as unsigned integers of equal size: any dtype can be moved as such."""
    return array.view(f"u{array.dtype.itemsize}")
