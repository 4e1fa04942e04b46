"""The control plane over MPI, on a duplicated communicator of our own.

*Threads*: made by the thread that calls ``init()``, used by the background thread alone. Every wait is a
non-blocking test with back-off, so that a late peer costs no core.
"""

from __future__ import annotations

import ctypes
import pickle
import socket
from collections.abc import Callable
from typing import Any

import numpy as np

from hvdlite.backoff import LONGEST_TRANSFER_SLEEP_S, complete
from hvdlite.control.base import Topology
from hvdlite.errors import TransportError
from hvdlite.timeline.earlier import new_job

#: Bytes of the first message of gather and broadcast; what does not fit follows in a second one.
_FRAME_BYTES = 2048
_HEADER_BYTES = 8
#: Of messages between two ranks; what follows a gather's first message has tag 0.
_DIRECT_TAG = 1


class MpiControl:
    """Small collectives over MPI."""

    def __init__(self, communicator: Any) -> None:
        from mpi4py import MPI

        self.mpi = MPI
        self.communicator = communicator.Dup()
        self.topology = _topology(MPI, self.communicator)
        self.job = self.communicator.bcast(new_job(), root=0)
        self.num_collectives = self.num_bytes = 0
        self.supports_threads = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        self._sent, self._received = bytearray(), bytearray()
        self._start: Callable[[], Any] = lambda: None
        self._persistent: Any = None

    def agree(self, bits: int, num_words: int, pause: Callable[[float], bool], waited_s: float) -> int:
        self.num_collectives += 1
        num_bytes = 8 * num_words
        self.num_bytes += num_bytes
        try:
            if len(self._received) != num_bytes:
                self._prepare(num_bytes)
            self._sent[:] = bits.to_bytes(num_bytes, "little")
            request = self._start()
        except self.mpi.Exception as error:
            raise transport_error("agreeing with the other ranks", error) from error
        return self._agreed(request, pause, waited_s)

    def _agreed(self, request: Any, pause: Callable[[float], bool], waited_s: float) -> int:
        try:
            complete(request, pause, waited_s)
        except self.mpi.Exception as error:
            raise transport_error("agreeing with the other ranks", error) from error
        return int.from_bytes(self._received, "little")

    def lay_out(self, bits: int, num_words: int) -> Any:
        """Write ``bits`` to where ``agree`` sends them from and return the persistent request that does so, or None: MPI has no
        such requests, or it isn't made for so many words yet (that is for all ranks to do in the same cycle)."""
        if self._persistent is not None and len(self._sent) == 8 * num_words:
            self._sent[:] = bits.to_bytes(8 * num_words, "little")
            return self._persistent
        return None

    def addresses(self) -> tuple[int, int]:
        """Where ``agree`` sends from and receives."""
        sent, received = (ctypes.addressof(ctypes.c_char.from_buffer(one)) for one in (self._sent, self._received))
        return sent, received

    def agree_on_begun(self, pause: Callable[[float], bool], waited_s: float) -> int:
        """``agree`` whose request was started by somebody else, and may be over."""
        self.num_collectives += 1
        self.num_bytes += len(self._sent)
        return self._agreed(self._persistent, pause, waited_s)

    def _prepare(self, num_bytes: int) -> None:
        """Make the buffers, and the persistent request that MPI 4 has: it starts in half the time."""
        self._sent, self._received = bytearray(num_bytes), bytearray(num_bytes)
        arguments = ([self._sent, self.mpi.INT64_T], [self._received, self.mpi.INT64_T], self.mpi.BAND)
        self._free_persistent()
        try:
            request = self._persistent = self.communicator.Allreduce_init(*arguments)
        except NotImplementedError:
            self._start = lambda: self.communicator.Iallreduce(*arguments)
            return

        def start() -> Any:
            request.Start()
            return request

        self._start = start

    def _free_persistent(self) -> None:
        if self._persistent is not None:
            self._persistent.Free()
            self._persistent = None

    def gather(self, value: Any) -> list[Any] | None:
        payload = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
        communicator, size = self.communicator, self.topology.size
        is_root = self.topology.rank == 0
        frames = np.empty((size, _FRAME_BYTES), np.uint8) if is_root else None
        try:
            self.num_collectives += 1
            self.num_bytes += max(_FRAME_BYTES, len(payload))
            complete(communicator.Igather(_frame(payload), frames, root=0))
            if frames is None:
                if len(payload) > _FRAME_BYTES - _HEADER_BYTES:
                    complete(communicator.Isend(_rest(payload), dest=0))
                return None
            return [pickle.loads(self._whole(frames[rank], rank) if rank else payload) for rank in range(size)]
        except self.mpi.Exception as error:
            raise transport_error("gathering requests at rank 0", error) from error

    def broadcast(self, value: Any) -> Any:
        is_root = self.topology.rank == 0
        payload = pickle.dumps(value, pickle.HIGHEST_PROTOCOL) if is_root else b""
        frame = _frame(payload)
        try:
            self.num_collectives += 1
            self.num_bytes += max(_FRAME_BYTES, len(payload)) if is_root else 0
            complete(self.communicator.Ibcast(frame, root=0))
            length = int(frame[:_HEADER_BYTES].view(np.int64)[0])
            first = frame[_HEADER_BYTES:].tobytes()[:length]
            if length > len(first):
                rest = _rest(payload) if is_root else np.empty(length - len(first), np.uint8)
                complete(self.communicator.Ibcast(rest, root=0))
                first += rest.tobytes()
        except self.mpi.Exception as error:
            raise transport_error("taking rank 0's decision", error) from error
        return value if is_root else pickle.loads(first)

    def start_send(self, array: np.ndarray, peer: int) -> Callable[[], None]:
        try:
            request = self.communicator.Isend(array.view(np.uint8), dest=peer, tag=_DIRECT_TAG)
        except self.mpi.Exception as error:
            raise transport_error(f"sending to rank {peer}", error) from error
        return lambda: self._finish(request, f"sending to rank {peer}")

    def send(self, array: np.ndarray, peer: int) -> None:
        self.start_send(array, peer)()

    def receive(self, array: np.ndarray, peer: int) -> None:
        try:
            request = self.communicator.Irecv(array.view(np.uint8), source=peer, tag=_DIRECT_TAG)
        except self.mpi.Exception as error:
            raise transport_error(f"receiving from rank {peer}", error) from error
        self._finish(request, f"receiving from rank {peer}")

    def _finish(self, request: Any, doing: str) -> None:
        try:
            complete(request, longest_s=LONGEST_TRANSFER_SLEEP_S)
        except self.mpi.Exception as error:
            raise transport_error(doing, error) from error

    def close(self) -> None:
        if not self.mpi.Is_finalized():
            self._free_persistent()
            self.communicator.Free()

    def _whole(self, frame: np.ndarray, rank: int) -> bytes:
        length = int(frame[:_HEADER_BYTES].view(np.int64)[0])
        first = frame[_HEADER_BYTES:].tobytes()[:length]
        if length == len(first):
            return first
        rest = np.empty(length - len(first), np.uint8)
        complete(self.communicator.Irecv(rest, source=rank))
        return first + rest.tobytes()


def _frame(payload: bytes) -> np.ndarray:
    frame = np.zeros(_FRAME_BYTES, np.uint8)
    frame[:_HEADER_BYTES].view(np.int64)[0] = len(payload)
    first = payload[: _FRAME_BYTES - _HEADER_BYTES]
    frame[_HEADER_BYTES : _HEADER_BYTES + len(first)] = np.frombuffer(first, np.uint8)
    return frame


def _rest(payload: bytes) -> np.ndarray:
    return np.frombuffer(payload, np.uint8, offset=_FRAME_BYTES - _HEADER_BYTES).copy()


def _host() -> str:
    """What tells this host from others: its name, and which start of which machine this is."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{socket.gethostname()} {file.read()}"
    except OSError:
        return socket.gethostname()


def _topology(MPI: Any, communicator: Any) -> Topology:
    rank, size = communicator.Get_rank(), communicator.Get_size()
    # By name, not by what MPI can share memory with: that can be switched off, and a host stays one host.
    hosts = communicator.allgather(_host())
    local = communicator.Split(hosts.index(hosts[rank]), rank)
    local_rank, local_size = local.Get_rank(), local.Get_size()
    cross = communicator.Split(local_rank, rank)
    sizes = communicator.allgather(local_size)
    topology = Topology(rank, size, local_rank, local_size, cross.Get_rank(), cross.Get_size(), len(set(sizes)) == 1,
                        tuple(hosts.index(host) for host in hosts))
    local.Free()
    cross.Free()
    return topology


def transport_error(doing: str, error: BaseException) -> TransportError:
    return TransportError(f"MPI failed while {doing}: {error}: look for a rank that died or left")
