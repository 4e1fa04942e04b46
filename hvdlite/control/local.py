"""Ranks that are threads of one process: for size 1, and for tests of everything above the transport."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from operator import and_
from typing import Any

import numpy as np

from hvdlite.control.base import Topology
from hvdlite.errors import TransportError
from hvdlite.timeline.earlier import new_job

#: Of the control plane's own mail; the data plane's tags are never negative.
_TAG = -1


class LocalGroup:
    """A meeting point for ``size`` threads.

    *Threads*: one per rank. Each call of ``exchange`` on one rank meets the same-numbered call on the others.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.job = new_job()
        # Guards everything below; notified when a round is full and when the group is broken.
        self._changed = threading.Condition()
        self._round = [0] * size
        self._values: dict[int, list[Any]] = {}
        self._filled: dict[int, int] = {}
        self._taken: dict[int, int] = {}
        self._mail: dict[tuple[int, int, int], deque[Any]] = {}
        self._broken = ""

    def exchange(self, rank: int, value: Any, pause: Callable[[float], bool] | None = None) -> list[Any]:
        """Give ``value``, wait for the other ranks, return all values in rank order."""
        def put(values: list[Any]) -> None:
            values[rank] = value

        return self._meet(rank, put, [None] * self.size, pause)

    def fold(self, rank: int, value: Any, function: Callable[[Any, Any], Any], pause: Callable[[float], bool]) -> Any:
        """Give ``value``, wait for the other ranks, return what ``function`` makes of all values, in any order."""
        def put(values: list[Any]) -> None:
            values[:] = [function(values[0], value) if values else value]

        return self._meet(rank, put, [], pause)[0]

    def _meet(
        self, rank: int, put: Callable[[list[Any]], None], empty: list[Any], pause: Callable[[float], bool] | None
    ) -> list[Any]:
        if self.size == 1:
            put(empty)
            return empty
        with self._changed:
            number = self._round[rank]
            self._round[rank] += 1
            values = self._values.setdefault(number, empty)
            put(values)
            self._filled[number] = self._filled.get(number, 0) + 1
            if self._filled[number] == self.size:
                self._changed.notify_all()
            while self._filled[number] < self.size and not self._broken:
                self._changed.wait(0.05 if pause else None)
                if pause:
                    pause(0.0)
            if self._broken:
                raise TransportError(f"local group: {self._broken}: start the ranks again")
            self._taken[number] = self._taken.get(number, 0) + 1
            if self._taken[number] == self.size:
                for table in (self._values, self._filled, self._taken):
                    del table[number]
            return values

    def post(self, address: tuple[int, int, int], value: Any) -> None:
        """Leave a value for a rank. ``address``: from, to, tag."""
        with self._changed:
            self._mail.setdefault(address, deque()).append(value)
            self._changed.notify_all()

    def collect(self, address: tuple[int, int, int]) -> Any:
        """Wait for the next value at an address and take it."""
        with self._changed:
            while not self._mail.get(address) and not self._broken:
                self._changed.wait()
            if self._broken:
                raise TransportError(f"local group: {self._broken}: start the ranks again")
            values = self._mail[address]
            value = values.popleft()
            if not values:
                del self._mail[address]
            return value

    def abort(self, reason: str) -> None:
        """Make every present and future ``exchange`` raise."""
        with self._changed:
            self._broken = self._broken or reason
            self._changed.notify_all()


class LocalControl:
    """The control plane of one rank in a LocalGroup."""

    def __init__(self, group: LocalGroup, rank: int) -> None:
        size = group.size
        self.topology = Topology(rank, size, rank, size, 0, 1, True)
        self.num_collectives = self.num_bytes = 0
        self.job = group.job
        self._group = group

    def agree(self, bits: int, num_words: int, pause: Callable[[float], bool], waited_s: float) -> int:
        self.num_collectives += 1
        self.num_bytes += 8 * num_words
        return self._group.fold(self.topology.rank, bits, and_, pause)

    def gather(self, value: Any) -> list[Any] | None:
        self.num_collectives += 1
        values = self._group.exchange(self.topology.rank, value)
        return list(values) if self.topology.rank == 0 else None

    def broadcast(self, value: Any) -> Any:
        self.num_collectives += 1
        return self._group.exchange(self.topology.rank, value)[0]

    def start_send(self, array: np.ndarray, peer: int) -> Callable[[], None]:
        self._group.post((self.topology.rank, peer, _TAG), array.copy())
        return lambda: None

    def send(self, array: np.ndarray, peer: int) -> None:
        self.start_send(array, peer)

    def receive(self, array: np.ndarray, peer: int) -> None:
        array[:] = self._group.collect((peer, self.topology.rank, _TAG))

    def close(self) -> None:
        pass
