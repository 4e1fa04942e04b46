"""The data plane for host memory over MPI.

Where all ranks share one host with a core each, a transfer is a memory copy: blocking calls on segments that
fit in cache. Elsewhere every transfer is non-blocking and awaited with back-off, so the wait costs no core.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from hvdlite.backoff import LONGEST_TRANSFER_SLEEP_S, complete
from hvdlite.dataplane.base import Transfer, as_bits, host_groups, offsets
from hvdlite.errors import TransportError
from hvdlite.message import ReduceOp

#: Bytes per blocking call in shared memory. Measured (tools/bench_runtime.py): larger segments fall out of cache.
_SEGMENT_BYTES = 2 << 20
#: Up to this a tensor alone may be exchanged by the thread that waits for it (control/fast_path.py). Those are summed in the same
#: way here, or which thread does it would show in the last bit. Chosen: the exchange takes less than the wake-ups it saves.
SMALL_BYTES = 4096
#: What every MPI has.
_MOST_TAGS = 32768


class MpiPlane:
    """Collectives over one communicator."""

    def __init__(self, communicator: Any, *, is_shared_memory: bool, max_count: int, hosts: Sequence[int] = ()) -> None:
        """``communicator`` becomes the plane's own. ``max_count``: largest count for one MPI call. ``hosts``: each rank's."""
        from mpi4py import MPI

        self.rank: int = communicator.Get_rank()
        self.size: int = communicator.Get_size()
        self._mpi = MPI
        self.communicator = communicator
        self._is_shared_memory = is_shared_memory
        self._max_count = max_count
        self._hosts = tuple(hosts) or (0,) * self.size
        self._levels: tuple[MpiPlane, MpiPlane] | None = None
        # By op, not as a dict: an enumeration's hash is Python code.
        by_op = {ReduceOp.Sum: MPI.SUM, ReduceOp.Min: MPI.MIN, ReduceOp.Max: MPI.MAX, ReduceOp.Product: MPI.PROD}
        self._ops = [by_op.get(op) for op in sorted(ReduceOp)]

    def allreduce(self, source: np.ndarray, target: np.ndarray, op: ReduceOp) -> None:
        mpi_op = self._ops[op]
        send = self._mpi.IN_PLACE if source is target else source
        try:
            if target.nbytes <= SMALL_BYTES:
                self._complete(self.communicator.Iallreduce(send, target, mpi_op))
                return
            if self._is_shared_memory and target.nbytes <= _SEGMENT_BYTES and len(target) <= self._max_count:
                self.communicator.Allreduce(send, target, mpi_op)
                return
            for piece in self._pieces(len(target), target.itemsize):
                self._allreduce_piece(send if source is target else source[piece], target[piece], mpi_op)
        except self._mpi.Exception as error:
            raise _failed("allreduce", error) from error

    def _allreduce_piece(self, send: Any, target: np.ndarray, mpi_op: Any) -> None:
        if self._is_shared_memory:
            self.communicator.Allreduce(send, target, mpi_op)
        else:
            self._complete(self.communicator.Iallreduce(send, target, mpi_op))

    def reducescatter(self, source: np.ndarray, target: np.ndarray, counts: Sequence[int], op: ReduceOp) -> None:
        with self._mapped("reducescatter"):
            if sum(counts) <= self._max_count:
                self._complete(self.communicator.Ireduce_scatter(source, target, list(counts), self._ops[op]))
                return
        total = np.empty_like(source)
        self.allreduce(source, total, op)
        start = sum(counts[: self.rank])
        target[:] = total[start : start + counts[self.rank]]

    def allgather(self, source: np.ndarray, target: np.ndarray, counts: Sequence[int]) -> None:
        source, target = as_bits(source), as_bits(target)
        begin = offsets(counts)
        with self._mapped("allgather"):
            if begin[-1] <= self._max_count:
                receive = [target, list(counts), begin[:-1].tolist(), self._datatype(target)]
                self._complete(self.communicator.Iallgatherv(source, receive))
                return
        target[begin[self.rank] : begin[self.rank + 1]] = source
        for root in range(self.size):
            self.broadcast(target[begin[root] : begin[root + 1]], root)

    def alltoall(self, source: np.ndarray, target: np.ndarray, counts: np.ndarray) -> None:
        source, target = as_bits(source), as_bits(target)
        sent, received = counts[self.rank], counts[:, self.rank]
        with self._mapped("alltoall"):
            # Both bounds look at every rank's totals, so that all ranks take the same way.
            if max(counts.sum(axis=0).max(), counts.sum(axis=1).max()) <= self._max_count:
                datatype = self._datatype(target)
                send_from, receive_at = offsets(sent), offsets(received)
                # Its own part is copied: some MPIs send it to themselves, 8 KB per test (25 MB took 700 ms).
                own = slice(send_from[self.rank], send_from[self.rank + 1])
                target[receive_at[self.rank] : receive_at[self.rank + 1]] = source[own]
                to_others = np.arange(self.size) != self.rank
                send = [source, (sent * to_others).tolist(), send_from[:-1].tolist(), datatype]
                receive = [target, (received * to_others).tolist(), receive_at[:-1].tolist(), datatype]
                self._complete(self.communicator.Ialltoallv(send, receive))
                return
            self._alltoall_in_pieces(source, target, sent, received)

    def _alltoall_in_pieces(
        self, source: np.ndarray, target: np.ndarray, sent: np.ndarray, received: np.ndarray
    ) -> None:
        send_from, receive_at = offsets(sent), offsets(received)
        requests = []
        for peer in range(self.size):
            outgoing = source[send_from[peer] : send_from[peer + 1]]
            incoming = target[receive_at[peer] : receive_at[peer + 1]]
            if peer == self.rank:
                incoming[:] = outgoing
                continue
            requests += [self.communicator.Irecv(incoming[piece], peer) for piece in self._pieces(len(incoming))]
            requests += [self.communicator.Isend(outgoing[piece], peer) for piece in self._pieces(len(outgoing))]
        for request in requests:
            self._complete(request)

    def broadcast(self, buffer: np.ndarray, root: int) -> None:
        moved = as_bits(buffer)
        with self._mapped("broadcast"):
            for piece in self._pieces(len(moved)):
                self._complete(self.communicator.Ibcast(moved[piece], root))

    def send(self, array: np.ndarray, peer: int, tag: int) -> Transfer:
        return self._transfer(self.communicator.Isend, array, peer, tag)

    def receive(self, array: np.ndarray, peer: int, tag: int) -> Transfer:
        return self._transfer(self.communicator.Irecv, array, peer, tag)

    def _transfer(self, start: Callable[[Any, int, int], Any], array: np.ndarray, peer: int, tag: int) -> Transfer:
        with self._mapped("a message"):
            return _MpiTransfer(self, [start(array[piece], peer, tag % _MOST_TAGS) for piece in self._pieces(len(array))])

    def exchange_sizes(self, values: Sequence[int]) -> np.ndarray:
        everyone = np.empty((self.size, len(values)), np.int64)
        with self._mapped("exchange of sizes"):
            self._complete(self.communicator.Iallgather(np.array(values, np.int64), everyone))
        return everyone

    def barrier(self) -> None:
        with self._mapped("barrier"):
            self._complete(self.communicator.Ibarrier())

    def subset(self, ranks: Sequence[int]) -> MpiPlane | None:
        with self._mapped("making a process set"):
            made = self.communicator.Split(0 if self.rank in ranks else self._mpi.UNDEFINED, self.rank)
        if made == self._mpi.COMM_NULL:
            return None
        return MpiPlane(made, is_shared_memory=self._is_shared_memory, max_count=self._max_count,
                        hosts=[self._hosts[rank] for rank in ranks])

    def levels(self) -> tuple[MpiPlane, MpiPlane] | None:
        cut = host_groups(self._hosts)
        if cut is not None and self._levels is None:
            with self._mapped("making planes of hosts"):
                local, cross = (self.communicator.Split(self._color(parts), self.rank) for parts in cut)
            self._levels = (MpiPlane(local, is_shared_memory=False, max_count=self._max_count),
                            MpiPlane(cross, is_shared_memory=False, max_count=self._max_count))
        return self._levels

    def _color(self, parts: list[list[int]]) -> int:
        return next(number for number, ranks in enumerate(parts) if self.rank in ranks)

    def close(self) -> None:
        for one in self._levels or ():
            one.close()
        if not self._mpi.Is_finalized():
            self.communicator.Free()

    def _complete(self, request: Any) -> None:
        complete(request, longest_s=LONGEST_TRANSFER_SLEEP_S)

    def _pieces(self, count: int, item_bytes: int = 0) -> Iterator[slice]:
        """Cut ``count`` elements into what one call may carry; equal on all ranks."""
        step = self._max_count
        if self._is_shared_memory and item_bytes:
            step = min(step, _SEGMENT_BYTES // item_bytes)
        for start in range(0, count, step):
            yield slice(start, min(start + step, count))

    def _datatype(self, array: np.ndarray) -> Any:
        return self._mpi.Datatype.fromcode(array.dtype.char)

    @contextmanager
    def _mapped(self, doing: str) -> Iterator[None]:
        try:
            yield
        except self._mpi.Exception as error:
            raise _failed(doing, error) from error


class _MpiTransfer:
    """A message of one or several pieces."""

    def __init__(self, plane: MpiPlane, requests: list[Any]) -> None:
        self._plane, self._requests = plane, requests

    def wait(self) -> None:
        with self._plane._mapped("a message"):
            for request in self._requests:
                self._plane._complete(request)


def _failed(doing: str, error: BaseException) -> TransportError:
    return TransportError(f"MPI failed in {doing}: {error}: look for a rank that died or left")
