"""The data plane of ranks that are threads of one process (and of size 1)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hvdlite.control.local import LocalGroup
from hvdlite.dataplane.base import Transfer, host_groups, offsets
from hvdlite.message import ReduceOp

_UFUNCS = {ReduceOp.Sum: np.add, ReduceOp.Min: np.minimum, ReduceOp.Max: np.maximum, ReduceOp.Product: np.multiply}


class LocalPlane:
    """Collectives by reading one another's arrays, between two meetings of all threads."""

    def __init__(self, group: LocalGroup, rank: int, hosts: Sequence[int] = ()) -> None:
        """``hosts``: which host each rank plays to be on; without it all are on one."""
        self._hosts = tuple(hosts) or (0,) * group.size
        self._levels: tuple[LocalPlane, LocalPlane] | None = None
        self.rank = rank
        self.size = group.size
        self._group = group

    def allreduce(self, source: np.ndarray, target: np.ndarray, op: ReduceOp) -> None:
        if self.size == 1:
            _copy(source, target)
            return
        self._combine(source, target, slice(0, len(source)), op)

    def reducescatter(self, source: np.ndarray, target: np.ndarray, counts: Sequence[int], op: ReduceOp) -> None:
        begin = offsets(counts)
        self._combine(source, target, slice(begin[self.rank], begin[self.rank + 1]), op)

    def _combine(self, source: np.ndarray, target: np.ndarray, piece: slice, op: ReduceOp) -> None:
        sources = self._group.exchange(self.rank, source)
        total = sources[0][piece].copy()
        for other in sources[1:]:
            _UFUNCS[op](total, other[piece], out=total)
        self.barrier()  # everyone has read: sources may now be overwritten
        target[:] = total

    def allgather(self, source: np.ndarray, target: np.ndarray, counts: Sequence[int]) -> None:
        begin = offsets(counts)
        for rank, piece in enumerate(self._group.exchange(self.rank, source)):
            target[begin[rank] : begin[rank + 1]] = piece
        self.barrier()

    def alltoall(self, source: np.ndarray, target: np.ndarray, counts: np.ndarray) -> None:
        place = offsets(counts[:, self.rank])
        for rank, other in enumerate(self._group.exchange(self.rank, source)):
            begin = offsets(counts[rank])
            target[place[rank] : place[rank + 1]] = other[begin[self.rank] : begin[self.rank + 1]]
        self.barrier()

    def broadcast(self, buffer: np.ndarray, root: int) -> None:
        _copy(self._group.exchange(self.rank, buffer)[root], buffer)
        self.barrier()

    def send(self, array: np.ndarray, peer: int, tag: int) -> Transfer:
        self._group.post((self.rank, peer, tag), array.copy())
        return _Nothing()

    def receive(self, array: np.ndarray, peer: int, tag: int) -> Transfer:
        return _Expected(self._group, (peer, self.rank, tag), array)

    def exchange_sizes(self, values: Sequence[int]) -> np.ndarray:
        return np.array(self._group.exchange(self.rank, tuple(values)), np.int64)

    def barrier(self) -> None:
        self._group.exchange(self.rank, None)

    def subset(self, ranks: Sequence[int]) -> LocalPlane | None:
        groups = self._group.exchange(self.rank, LocalGroup(len(ranks)) if self.rank == ranks[0] else None)
        hosts = [self._hosts[rank] for rank in ranks]
        return LocalPlane(groups[ranks[0]], ranks.index(self.rank), hosts) if self.rank in ranks else None

    def levels(self) -> tuple[LocalPlane, LocalPlane] | None:
        cut = host_groups(self._hosts)
        if cut is not None and self._levels is None:
            self._levels = self._part(cut[0]), self._part(cut[1])
        return self._levels

    def _part(self, parts: list[list[int]]) -> LocalPlane:
        (own,) = [ranks for ranks in parts if self.rank in ranks]
        groups = self._group.exchange(self.rank, LocalGroup(len(own)) if self.rank == own[0] else None)
        return LocalPlane(groups[own[0]], own.index(self.rank))

    def close(self) -> None:
        pass


class _Nothing:
    """A message that has gone."""

    def wait(self) -> None:
        pass


class _Expected:
    """A message that will be taken from the group's mail."""

    def __init__(self, group: LocalGroup, address: tuple[int, int, int], array: np.ndarray) -> None:
        self._group, self._address, self._array = group, address, array

    def wait(self) -> None:
        self._array[:] = self._group.collect(self._address)


def _copy(source: np.ndarray, target: np.ndarray) -> None:
    if source is not target:
        target[:] = source
