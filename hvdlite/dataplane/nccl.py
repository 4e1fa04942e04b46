"""The data plane for GPU memory over NCCL, through ``cupy.cuda.nccl``.

Every call is enqueued on the device's stream and returns at once, so "overwritten" and "combined" of the contract mean: in the
order of that stream. Sizes and barriers, which are about hosts, go over the process set's host plane.

*Order*: calls are issued by the background thread in plan order, on one stream whatever the process set, so no two communicators
ever wait for one another.
*Failure*: NCCL tells of a failed peer only when asked (``poll``). Then, and when a call fails, the communicator is aborted, so
that what waits on the stream ends; the plane is of no more use. What that leaves in the tensors is undefined, and the job ends.
*Differs*: 16-bit floats are combined here, as NCCL combines them, and so is what Min and Max make of NaN; Average is known for
floats where NCCL has it (2.10). int16 is moved but not combined, which NCCL cannot.
*Never run on a GPU so far*: tests run it on a stand-in with the signatures of ``cupy.cuda.nccl``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from hvdlite.dataplane.base import DataPlane, Transfer, offsets
from hvdlite.dataplane.device import Device, DeviceArray
from hvdlite.errors import TransportError
from hvdlite.message import ReduceOp

#: From this version on NCCL averages; as NCCL codes versions. *Source*: NCCL release notes, 2.10.3.
_FIRST_AVERAGING = 21000
_DTYPES = {
    "int8": "NCCL_INT8", "uint8": "NCCL_UINT8", "bool": "NCCL_UINT8", "int32": "NCCL_INT32", "int64": "NCCL_INT64",
    "float16": "NCCL_FLOAT16", "bfloat16": "NCCL_BFLOAT16", "float32": "NCCL_FLOAT32", "float64": "NCCL_FLOAT64",
}
_OPS = {ReduceOp.Sum: "NCCL_SUM", ReduceOp.Product: "NCCL_PROD", ReduceOp.Min: "NCCL_MIN", ReduceOp.Max: "NCCL_MAX"}


class NcclPlane:
    """Collectives over one communicator, of one GPU for each rank of a process set."""

    def __init__(self, nccl: Any, host: DataPlane, device: Device, *, last_error: Callable[[], str] = str) -> None:
        """Collective over ``host``, the same ranks' plane for host memory, which stays its owner's. ``nccl``: the module
        ``cupy.cuda.nccl``; ``last_error``: what NCCL says of its last failure beyond the code.

        Raises: TransportError, on every rank where NCCL reports it.
        """
        self.rank, self.size = host.rank, host.size
        self.device = device
        self._nccl, self._host, self._last_error = nccl, host, last_error
        self._reason = ""
        self._communicator: Any = None
        self._queued: list[tuple[int, int, bool, Any, _Message]] = []
        # The first 128 bytes are the id, the last one says whether there is one: a rank 0 without must not leave others waiting.
        unique = np.zeros(129, np.uint8)
        failure: BaseException | None = None
        if self.rank == 0:
            try:
                unique[:128] = np.frombuffer(nccl.get_unique_id(), np.uint8)
                unique[128] = 1
            except RuntimeError as error:
                failure = error
        host.broadcast(unique, 0)
        if not unique[128]:
            raise self._failed("making an id on rank 0", failure or RuntimeError("rank 0 tells why"))
        with self._mapped("connecting"):
            self._communicator = nccl.NcclCommunicator(self.size, unique[:128].tobytes(), self.rank)

    def combines(self, dtype: str) -> bool:
        """Whether NCCL combines elements of this dtype."""
        return hasattr(self._nccl, _DTYPES.get(dtype, "")) and dtype != "bool"

    def averages(self, dtype: str) -> bool:
        """Whether Average is an op of it."""
        return "float" in dtype and hasattr(self._nccl, "NCCL_AVG") and self._nccl.get_version() >= _FIRST_AVERAGING

    # -- collectives ------------------------------------------------------------------------------------------------------

    def allreduce(self, source: DeviceArray, target: DeviceArray, op: ReduceOp) -> None:
        if len(source):
            with self._mapped("allreduce"):
                self._communicator.allReduce(
                    source.address, target.address, len(source), self._dtype(source), self._op(op), self._stream)

    def reducescatter(self, source: DeviceArray, target: DeviceArray, counts: Sequence[int], op: ReduceOp) -> None:
        begin = offsets(counts)
        with self._mapped("reducescatter"):
            if len(set(counts)) == 1:
                if counts[0]:
                    self._communicator.reduceScatter(
                        source.address, target.address, counts[0], self._dtype(source), self._op(op), self._stream)
                return
            with self._group():
                for root, count in enumerate(counts):
                    if count:
                        at = source.address + int(begin[root]) * source.itemsize
                        self._communicator.reduce(
                            at, target.address if root == self.rank else 0, count, self._dtype(source), self._op(op), root,
                            self._stream)

    def allgather(self, source: DeviceArray, target: DeviceArray, counts: Sequence[int]) -> None:
        source, target = source.as_dtype("uint8"), target.as_dtype("uint8")
        item_bytes = len(target) // sum(counts) if sum(counts) else 0
        begin = offsets(counts) * item_bytes
        with self._mapped("allgather"):
            if len(set(counts)) == 1:
                if len(source):
                    self._communicator.allGather(source.address, target.address, len(source), self._byte, self._stream)
                return
            with self._group():
                for root, count in enumerate(counts):
                    if count:
                        at = target.address + int(begin[root])
                        self._communicator.broadcast(
                            source.address if root == self.rank else at, at, count * item_bytes, self._byte, root, self._stream)

    def alltoall(self, source: DeviceArray, target: DeviceArray, counts: np.ndarray) -> None:
        sent, received = counts[self.rank] * source.itemsize, counts[:, self.rank] * source.itemsize
        send_from, receive_at = offsets(sent), offsets(received)
        with self._mapped("alltoall"):
            if own := int(sent[self.rank]):
                self.device.copy(target.address + int(receive_at[self.rank]), source.address + int(send_from[self.rank]), own)
            with self._group():
                for peer in range(self.size):
                    if peer != self.rank and sent[peer]:
                        self._send(source.address + int(send_from[peer]), int(sent[peer]), peer)
                    if peer != self.rank and received[peer]:
                        self._receive(target.address + int(receive_at[peer]), int(received[peer]), peer)

    def broadcast(self, buffer: DeviceArray, root: int) -> None:
        if len(buffer):
            with self._mapped("broadcast"):
                self._communicator.broadcast(buffer.address, buffer.address, buffer.nbytes, self._byte, root, self._stream)

    # -- messages ---------------------------------------------------------------------------------------------------------

    def send(self, array: DeviceArray, peer: int, tag: int) -> Transfer:
        """As the contract; but NCCL has no tags: all that was begun leaves in one group, in their order, at the first ``wait``,
        so both ends must have begun the same messages by then."""
        return self._queue(tag, peer, True, array)

    def receive(self, array: DeviceArray, peer: int, tag: int) -> Transfer:
        return self._queue(tag, peer, False, array)

    def _queue(self, tag: int, peer: int, is_sent: bool, array: DeviceArray) -> Transfer:
        message = _Message(self)
        if len(array):
            self._queued.append((tag, peer, is_sent, array, message))
        return message

    def flush(self) -> None:
        """Issue the messages that were begun, as one group."""
        queued, self._queued = sorted(self._queued, key=lambda one: one[0]), []
        if not queued:
            return
        with self._mapped("messages"), self._group():
            for _, peer, is_sent, array, _ in queued:
                (self._send if is_sent else self._receive)(array.address, array.nbytes, peer)
        self.device.keep(queued)

    # -- what is about hosts ----------------------------------------------------------------------------------------------

    def exchange_sizes(self, values: Sequence[int]) -> np.ndarray:
        return self._host.exchange_sizes(values)

    def barrier(self) -> None:
        self._host.barrier()

    def subset(self, ranks: Sequence[int]) -> NcclPlane | None:
        host = self._host.subset(ranks)
        return None if host is None else NcclPlane(self._nccl, host, self.device, last_error=self._last_error)

    def levels(self) -> None:
        """None: NCCL itself looks at which GPUs share a host."""

    # -- the end ----------------------------------------------------------------------------------------------------------

    def poll(self) -> None:
        """Ask NCCL whether a call that was enqueued has failed since. Raises: TransportError, after an abort."""
        communicator = self._communicator  # once: another thread may abort
        if communicator is not None:
            with self._mapped("a call that was under way"):
                communicator.check_async_error()

    def require(self) -> None:
        """As ``poll``, and raise after an abort too, whoever it came from."""
        with self._mapped("a call that was under way"):
            self.poll()

    def abort(self, reason: str) -> None:
        """End what waits on the stream, whatever becomes of it."""
        self._reason = self._reason or reason
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            communicator.abort()

    def close(self) -> None:
        """Destroy the communicator once the stream has done what it is to do; every rank of the set does so in the same cycle."""
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            self._reason = "it was closed"
            self.device.synchronize()
            communicator.destroy()

    # -- words of NCCL ----------------------------------------------------------------------------------------------------

    def _send(self, address: int, num_bytes: int, peer: int) -> None:
        self._communicator.send(address, num_bytes, self._byte, peer, self._stream)

    def _receive(self, address: int, num_bytes: int, peer: int) -> None:
        self._communicator.recv(address, num_bytes, self._byte, peer, self._stream)

    @property
    def _stream(self) -> int:
        return self.device.stream

    @property
    def _byte(self) -> int:
        return int(self._nccl.NCCL_UINT8)

    def _dtype(self, array: DeviceArray) -> int:
        return int(getattr(self._nccl, _DTYPES[array.dtype]))

    def _op(self, op: ReduceOp) -> int:
        return int(self._nccl.NCCL_AVG if op == ReduceOp.Average else getattr(self._nccl, _OPS[op]))

    @contextmanager
    def _group(self) -> Iterator[None]:
        """Calls that start together. A group that was begun is ended, or the next call would join it."""
        self._nccl.groupStart()
        try:
            yield
        except BaseException:
            try:
                self._nccl.groupEnd()
            except RuntimeError:
                pass  # it tells again of what failed in it, which is on its way up already
            raise
        self._nccl.groupEnd()

    @contextmanager
    def _mapped(self, doing: str) -> Iterator[None]:
        if self._reason:
            raise TransportError(f"NCCL on GPU {self.device.index}: its communicator is gone, {self._reason}: call init() again")
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, TransportError):
                raise
            raise self._failed(doing, error) from error

    def _failed(self, doing: str, error: BaseException) -> TransportError:
        more = self._last_error().strip()
        failure = TransportError(
            f"NCCL failed in {doing} on GPU {self.device.index}, rank {self.rank} of {self.size}: {error}"
            f"{f' ({more})' if more else ''}: look for a rank that died, for two ranks on one GPU, and for different versions of "
            "NCCL; NCCL_DEBUG=WARN tells more")
        self.abort(str(failure).partition(": look for")[0])
        return failure


class _Message:
    """One that leaves with the others begun by then."""

    def __init__(self, plane: NcclPlane) -> None:
        self._plane = plane

    def wait(self) -> None:
        """Have it enqueued: what follows on the stream finds it done."""
        self._plane.flush()
