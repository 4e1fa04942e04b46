"""GPUs and NCCL without either: streams are threads that work through a queue, device memory is the host's, by address.

``FakeDevice`` keeps the contract of ``dataplane.device``; ``FakeNccl`` stands in for the module ``cupy.cuda.nccl``, with its
names and signatures (CuPy 14, cupy_backends/cuda/libs/nccl.pyx), for ranks that are threads. It is stricter than NCCL: calls of a
communicator that do not match in order, kind, count, dtype, op or root on all ranks fail, where NCCL hangs or computes nonsense.
Whatever hangs in NCCL ends here after ``patience_s``.
"""

import ctypes
import itertools
import queue
import threading
import time
from collections import defaultdict, deque

import numpy as np

from hvdlite.buffer import NUMPY_DTYPES
from hvdlite.dataplane.device import DeviceArray

_handles = itertools.count(1000)
_streams = {}


def view(address, count, dtype):
    """Memory by address, bfloat16 as its bits."""
    kind = NUMPY_DTYPES[dtype]
    if not count:
        return np.empty(0, kind)
    return np.frombuffer((ctypes.c_uint8 * (count * kind.itemsize)).from_address(int(address)), kind)


class FakeStream:
    """Work in order, on a thread of its own. ``gate``: the stream stands still while it is cleared."""

    def __init__(self, name):
        self.handle, self.name = next(_handles), name
        self.gate = threading.Event()
        self.gate.set()
        self.pending = deque()  # of each piece of work the addresses it touches
        self.failures = []
        self._work = queue.SimpleQueue()
        _streams[self.handle] = self
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def put(self, function, *ranges):
        self.pending.append(ranges)
        self._work.put(function)

    def _run(self):
        while True:
            function = self._work.get()
            self.gate.wait(30)
            try:
                function()
            except Exception as error:
                self.failures.append(error)
            self.pending.popleft()
            del function  # and what it holds

    def is_empty(self):
        return not self.pending


class FakeEvent:
    def __init__(self):
        self.passed = threading.Event()

    def is_done(self):
        return self.passed.is_set()

    def synchronize(self):
        assert self.passed.wait(30), "the event is never reached"


class FakeMemory:
    """Device memory. ``faults`` of the device tells whether it went while a stream was still to use it."""

    def __init__(self, device, num_bytes):
        self.device = device
        self.bytes = np.full(num_bytes + 256, 0xAB, np.uint8)
        self.address = (self.bytes.ctypes.data + 255) // 256 * 256
        self.num_bytes = num_bytes

    def __del__(self):
        for stream in self.device.streams:
            for ranges in stream.pending.copy():
                if any(start < self.address + self.num_bytes and self.address < start + size for start, size in ranges):
                    self.device.faults.append(f"memory freed while {stream.name} was to use it")
                    _leaked.append(self.bytes)


_leaked = []


class FakeDevice:
    """One GPU; ``calls`` notes what was asked for, ``done`` what the streams have done, each in order."""

    def __init__(self, index=0, identity=None):
        self.index, self.identity = index, 1 + index if identity is None else identity
        self.communication, self.copies, self.users = (FakeStream(f"{name} of GPU {index}") for name in ("comm", "wire", "user"))
        self.streams = [self.communication, self.copies, self.users]
        self.stream, self.wire, self.user = (one.handle for one in self.streams)
        self.calls, self.done, self.faults = [], [], []
        self.num_kept = 0
        self._kept, self._uploads = deque(), []

    def _put(self, stream, what, function, *ranges):
        chosen = _streams[self.stream if stream is None else stream]
        self.calls.append((what, chosen.name))

        def run():
            function()
            self.done.append((what, chosen.name))

        chosen.put(run, *ranges)

    def allocate(self, num_bytes):
        memory = FakeMemory(self, num_bytes)
        return DeviceArray(memory.address, num_bytes, "uint8", memory)

    def pinned(self, num_bytes):
        return np.empty(num_bytes, np.uint8)

    def upload(self, array):
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8).copy()
        there = self.allocate(len(flat))
        self.copy(there.address, flat.ctypes.data, len(flat))
        self._uploads.append((flat, there))
        return there.address

    def launch(self, kernel, num_warps, *arguments):
        from hvdlite.compression.cuda_kernels import WARPS_PER_BLOCK

        def run():
            with _one_kernel, np.errstate(all="ignore"):
                kernel[min(2, -(-num_warps // WARPS_PER_BLOCK)), WARPS_PER_BLOCK](*arguments)

        self._put(None, "launch", run)

    def copy(self, target, source, num_bytes, stream=None):
        if num_bytes:
            self._put(stream, "copy", lambda: ctypes.memmove(target, source, num_bytes), (target, num_bytes), (source, num_bytes))

    def download(self, address, num_bytes):
        host = np.empty(num_bytes, np.uint8)
        self.copy(host.ctypes.data, address, num_bytes)
        self.record().synchronize()
        return host

    def record(self, stream=None):
        event = FakeEvent()
        self._put(stream, "record", event.passed.set)
        return event

    def wait_for(self, event, stream=None):
        self._put(stream, "wait_for", event.synchronize)

    def keep(self, *what):
        self.num_kept += 1
        self._kept.append((self.record(), what))

    def poll(self):
        if self._uploads:
            uploads, self._uploads = self._uploads, []
            self.keep(uploads)
        while self._kept and self._kept[0][0].is_done():
            self._kept.popleft()

    def synchronize(self):
        for stream in (self.wire, self.stream):
            self.record(stream).synchronize()
        self.poll()


#: The simulator runs one kernel at a time.
_one_kernel = threading.Lock()


# -- NCCL -------------------------------------------------------------------------------------------------------------------

class NcclError(RuntimeError):
    WORDS = {1: "UNHANDLED_CUDA_ERROR: unhandled cuda error", 2: "SYSTEM_ERROR: unhandled system error",
             3: "INTERNAL_ERROR: internal error", 4: "INVALID_ARGUMENT: invalid argument",
             5: "INVALID_USAGE: invalid usage", 6: "REMOTE_ERROR: remote process exited or there was a network error"}

    def __init__(self, status):
        self.status = status
        super().__init__(f"NCCL_ERROR_{self.WORDS[status]}")


class _Clique:
    """The ranks of one communicator."""

    def __init__(self, size, patience_s):
        self.size, self.patience_s = size, patience_s
        self.changed = threading.Condition()
        self.connected = set()
        self.errors = {}  # of each rank the status that check_async_error tells
        self.meetings = defaultdict(dict)
        self.mail = defaultdict(deque)

    def fail(self, status, but=()):
        with self.changed:
            for rank in range(self.size):
                if rank not in but:
                    self.errors.setdefault(rank, status)
            self.changed.notify_all()

    def wait(self, rank, condition):
        """With ``changed`` held: until so, or an error of this rank or too long; then every rank fails."""
        deadline = time.monotonic() + self.patience_s
        while not condition():
            if rank in self.errors:
                raise NcclError(self.errors[rank])
            if not self.changed.wait(max(0, deadline - time.monotonic())) and time.monotonic() >= deadline:
                self.fail(5)
                raise NcclError(5)


class FakeNccl:
    """The module. ``lacks``: names that an older one has not."""

    available = True
    NcclError = NcclError
    NCCL_SUM, NCCL_PROD, NCCL_MAX, NCCL_MIN, NCCL_AVG = range(5)
    NCCL_INT8, NCCL_UINT8, NCCL_INT32, NCCL_UINT32, NCCL_INT64, NCCL_UINT64 = range(6)
    NCCL_FLOAT16, NCCL_FLOAT32, NCCL_FLOAT64, NCCL_BFLOAT16 = range(6, 10)

    def __init__(self, version=22105, patience_s=10.0, max_connections=None):
        self.version, self.patience_s, self.max_connections = version, patience_s, max_connections
        self.cliques = {}
        self.calls = []  # (rank, kind) in order of issue
        self.num_communicators = 0
        self.num_destroyed = self.num_aborted = 0
        self.lock = threading.Lock()
        self.group = threading.local()
        module = self

        class Communicator(NcclCommunicator):
            nccl = module

        self.NcclCommunicator = Communicator

    def get_version(self):
        return self.version

    def get_unique_id(self):
        with self.lock:
            return (1 + len(self.cliques) + next(_handles)).to_bytes(8, "little") + bytes(120)

    def groupStart(self):
        self.group.depth = getattr(self.group, "depth", 0) + 1
        if self.group.depth == 1:
            self.group.calls = []

    def groupEnd(self):
        self.group.depth -= 1
        if self.group.depth:
            return
        by_communicator = defaultdict(list)
        for communicator, call, stream in self.group.calls:
            by_communicator[communicator, stream].append(call)
        for (communicator, stream), calls in by_communicator.items():
            communicator._enqueue(calls, stream)

    def inject(self, status, ranks=None):
        """Let every communicator fail behind the ranks' backs."""
        for clique in self.cliques.values():
            clique.fail(status, () if ranks is None else set(range(clique.size)) - set(ranks))


class NcclCommunicator:
    nccl = None

    def __init__(self, ndev, commId, rank, config=None):
        module = self.nccl
        if not isinstance(commId, bytes) or len(commId) != 128:
            raise ValueError(f"commId length {len(commId)} != 128.")
        with module.lock:
            self._clique = module.cliques.setdefault(commId, _Clique(ndev, module.patience_s))
            module.num_communicators += 1
        self._rank, self._number, self._is_gone = rank, 0, False
        with self._clique.changed:
            if rank in self._clique.connected or ndev != self._clique.size or not 0 <= rank < ndev:
                raise NcclError(4)
            self._clique.connected.add(rank)
            self._clique.changed.notify_all()
            self._clique.wait(rank, lambda: len(self._clique.connected) == ndev)

    def destroy(self):
        self._is_gone = True
        self.nccl.num_destroyed += 1

    def abort(self):
        self._is_gone = True
        self.nccl.num_aborted += 1
        self._clique.fail(6)

    def check_async_error(self):
        if self._rank in self._clique.errors:
            raise NcclError(self._clique.errors[self._rank])

    def allReduce(self, sendbuf, recvbuf, count, datatype, op, stream):
        self._call(("allReduce", count, datatype, op, None), sendbuf, recvbuf, count, stream)

    def reduce(self, sendbuf, recvbuf, count, datatype, op, root, stream):
        self._call(("reduce", count, datatype, op, root), sendbuf, recvbuf, count, stream)

    def broadcast(self, sendbuff, recvbuff, count, datatype, root, stream):
        self._call(("broadcast", count, datatype, None, root), sendbuff, recvbuff, count, stream)

    def reduceScatter(self, sendbuf, recvbuf, recvcount, datatype, op, stream):
        self._call(("reduceScatter", recvcount, datatype, op, None), sendbuf, recvbuf, recvcount, stream)

    def allGather(self, sendbuf, recvbuf, count, datatype, stream):
        self._call(("allGather", count, datatype, None, None), sendbuf, recvbuf, count, stream)

    def send(self, sendbuf, count, datatype, peer, stream):
        self._call(("send", count, datatype, None, peer), sendbuf, 0, count, stream)

    def recv(self, recvbuf, count, datatype, peer, stream):
        self._call(("recv", count, datatype, None, peer), 0, recvbuf, count, stream)

    def _call(self, what, source, target, count, stream):
        for one in (source, target, count, stream):
            if not isinstance(one, int) or one < 0:  # CuPy takes nothing else
                raise TypeError(f"{what[0]}: {one!r} is no address, count or stream")
        kind, dtype, peer = what[0], what[2], what[4]
        if self._is_gone or dtype not in _NAMES or (peer is not None and not 0 <= peer < self._clique.size):
            raise NcclError(4)
        self.nccl.calls.append((self._rank, kind))
        call = (what, source, target)
        if getattr(self.nccl.group, "depth", 0):
            self.nccl.group.calls.append((self, call, stream))
        else:
            self._enqueue([call], stream)

    def _enqueue(self, calls, stream):
        numbered = []
        for call in calls:
            if call[0][0] not in ("send", "recv"):
                numbered.append((self._number, call))
                self._number += 1
        messages = [call for call in calls if call[0][0] in ("send", "recv")]
        ranges = [(at, what[1] * NUMPY_DTYPES[_NAMES[what[2]]].itemsize) for what, *both in calls for at in both if at]
        _streams[stream].put(lambda: self._run(numbered, messages), *ranges)

    def _run(self, numbered, messages):
        clique, rank = self._clique, self._rank
        with clique.changed:
            if rank in clique.errors:
                return
            for number, call in numbered:
                meeting = clique.meetings[number]
                meeting[rank] = call
                if len(meeting) == clique.size:
                    if len({what for what, *_ in meeting.values()}) > 1:
                        clique.fail(5)
                        return
                    _collective(meeting)
                    meeting["done"] = True
                    clique.changed.notify_all()
                clique.wait(rank, lambda meeting=meeting: "done" in meeting)
            sent = []
            for what, source, _ in messages:
                if what[0] == "send":
                    message = dict(what=what[1:3], source=source, arrived=False)
                    clique.mail[rank, what[4]].append(message)
                    sent.append(message)
            clique.changed.notify_all()
            for what, _, target in messages:
                if what[0] == "recv":
                    box = clique.mail[what[4], rank]
                    clique.wait(rank, lambda box=box: bool(box))
                    message = box.popleft()
                    if message["what"] != what[1:3]:
                        clique.fail(5)
                        return
                    view(target, what[1], _NAMES[what[2]])[:] = view(message["source"], what[1], _NAMES[what[2]])
                    message["arrived"] = True
                    clique.changed.notify_all()
            clique.wait(rank, lambda: all(one["arrived"] for one in sent))


_NAMES = {0: "int8", 1: "uint8", 2: "int32", 4: "int64", 6: "float16", 7: "float32", 8: "float64", 9: "bfloat16"}


def _collective(meeting):
    calls = [meeting[rank] for rank in sorted(meeting)]
    kind, count, datatype, op, root = calls[0][0]
    dtype, size = _NAMES[datatype], len(calls)
    if kind == "broadcast":
        values = view(calls[root][1], count, dtype).copy()
        for _, _, target in calls:
            view(target, count, dtype)[:] = values
    elif kind == "allGather":
        values = np.concatenate([view(source, count, dtype) for _, source, _ in calls])
        for _, _, target in calls:
            view(target, size * count, dtype)[:] = values
    else:
        length = count * (size if kind == "reduceScatter" else 1)
        total = _combined([view(source, length, dtype) for _, source, _ in calls], dtype, op)
        for rank, (_, _, target) in enumerate(calls):
            if kind == "reduceScatter":
                view(target, count, dtype)[:] = total[rank * count : (rank + 1) * count]
            elif kind == "allReduce" or rank == root:
                view(target, count, dtype)[:] = total


def _combined(rows, dtype, op):
    wide = [to_float(row, dtype) for row in rows] if dtype in ("float16", "bfloat16") else rows
    function = {0: np.add, 1: np.multiply, 2: np.maximum, 3: np.minimum, 4: np.add}[op]
    total = wide[0].copy()
    for row in wide[1:]:
        total = function(total, row)
    if op == 4:
        assert "float" in dtype, "the average of integers is not to be asked for"
        total = (total / len(rows)).astype(total.dtype)
    return from_float(total, dtype) if dtype in ("float16", "bfloat16") else total


def to_float(values, dtype):
    """16-bit floats as float32, others as they are."""
    return (values.astype(np.uint32) << 16).view(np.float32) if dtype == "bfloat16" else values.astype(np.float32)


def from_float(values, dtype):
    """float32 in a dtype, bfloat16 as its bits, rounded to nearest even."""
    if dtype != "bfloat16":
        return values.astype(dtype)
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
