"""The contract of ``dataplane.base``, as checks that every plane has to pass: ``CONTRACT``, each called on every rank alike.

A check takes a plane and how the plane's memory is filled and read: ``HostMemory``, or ``DeviceMemory`` of a plane for GPUs.
"""

import numpy as np

from hvdlite.buffer import NUMPY_DTYPES
from hvdlite.dataplane.device import DeviceArray
from hvdlite.message import ReduceOp

#: 16-bit floats are summed by ``halves`` where the plane does not.
REDUCED = ["float32", "float64", "int8", "uint8", "int32", "int64"]
MOVED = [*REDUCED, "float16", "bfloat16", "bool", "int16"]


class HostMemory:
    """NumPy arrays."""

    reduced = [*REDUCED, "int16"]

    def put(self, values, dtype):
        return np.array(values).astype(NUMPY_DTYPES[dtype])

    def get(self, array):
        return array


class DeviceMemory:
    """Arrays on a device, all kept: that is their owner's business, not the plane's."""

    reduced = [*REDUCED, "float16", "bfloat16"]

    def __init__(self, device):
        self.device, self._kept = device, []

    def put(self, values, dtype):
        host = np.ascontiguousarray(np.array(values).astype(NUMPY_DTYPES[dtype])).reshape(-1)
        there = self.device.allocate(host.nbytes)
        self.device.copy(there.address, host.ctypes.data, host.nbytes)
        self._kept.append((host, there))
        return DeviceArray(there.address, len(host), dtype, there)

    def get(self, array):
        host = np.empty(len(array), NUMPY_DTYPES[array.dtype])
        self.device.copy(host.ctypes.data, array.address, host.nbytes)
        self.device.synchronize()
        return host


def _values(rank, count, dtype="float32"):
    """Small whole numbers, exact in every dtype; bfloat16 as its bits."""
    values = (np.arange(count) * 7 + rank) % 5 + 1
    if dtype == "bfloat16":
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return values % 2 if dtype == "bool" else values


def _floats(array, dtype):
    return (array.astype(np.uint32) << 16).view(np.float32) if dtype == "bfloat16" else array.astype(np.float64)


_FUNCTIONS = {ReduceOp.Sum: np.sum, ReduceOp.Min: np.min, ReduceOp.Max: np.max, ReduceOp.Product: np.prod}


def check_allreduce(plane, memory):
    for dtype in memory.reduced:
        for count in (0, 1, 5, 1000):
            everyone = np.array([_floats(_values(rank, count, dtype), dtype) for rank in range(plane.size)])
            for op, function in _FUNCTIONS.items():
                source, target = memory.put(_values(plane.rank, count, dtype), dtype), memory.put(np.zeros(count), dtype)
                plane.allreduce(source, target, op)
                expected = function(everyone, axis=0)
                assert np.array_equal(_floats(memory.get(target), dtype), expected), (dtype, count, op)
                assert np.array_equal(memory.get(source), _values(plane.rank, count, dtype))
                plane.allreduce(source, source, op)
                assert np.array_equal(_floats(memory.get(source), dtype), expected), (dtype, count, op, "in place")


def check_reducescatter(plane, memory):
    for dtype in memory.reduced:
        for counts in ([3] * plane.size, [2 * rank for rank in range(plane.size)], [0] * plane.size):
            total = sum(counts)
            everyone = np.array([_floats(_values(rank, total, dtype), dtype) for rank in range(plane.size)])
            source = memory.put(_values(plane.rank, total, dtype), dtype)
            target = memory.put(np.zeros(counts[plane.rank]), dtype)
            plane.reducescatter(source, target, counts, ReduceOp.Sum)
            start = sum(counts[: plane.rank])
            expected = everyone.sum(axis=0)[start : start + counts[plane.rank]]
            assert np.array_equal(_floats(memory.get(target), dtype), expected), (dtype, counts)


def check_allgather(plane, memory):
    for dtype in MOVED:
        for counts in ([4] * plane.size, [3 * rank for rank in range(plane.size)], [0] * plane.size):
            source = memory.put(_values(plane.rank, counts[plane.rank], dtype), dtype)
            target = memory.put(np.zeros(sum(counts)), dtype)
            plane.allgather(source, target, counts)
            expected = np.concatenate([_values(rank, count, dtype) for rank, count in enumerate(counts)])
            assert np.array_equal(memory.get(target), expected.astype(NUMPY_DTYPES[dtype])), (dtype, counts)


def check_alltoall(plane, memory):
    for dtype in MOVED:
        for factor in (0, 1, 300):
            ranks = np.arange(plane.size)
            counts = factor * (ranks[:, None] + 2 * ranks)

            def piece(sender, receiver, counts=counts, dtype=dtype):
                return _values(3 * sender + receiver, int(counts[sender, receiver]), dtype)

            source = memory.put(np.concatenate([piece(plane.rank, to) for to in range(plane.size)]), dtype)
            target = memory.put(np.zeros(int(counts[:, plane.rank].sum())), dtype)
            plane.alltoall(source, target, counts)
            expected = np.concatenate([piece(sender, plane.rank) for sender in range(plane.size)])
            assert np.array_equal(memory.get(target), expected.astype(NUMPY_DTYPES[dtype])), (dtype, factor)


def check_broadcast(plane, memory):
    for dtype in MOVED:
        for root in range(plane.size):
            for count in (0, 1, 1000):
                buffer = memory.put(_values(plane.rank, count, dtype), dtype)
                plane.broadcast(buffer, root)
                assert np.array_equal(memory.get(buffer), _values(root, count, dtype).astype(NUMPY_DTYPES[dtype]))


def check_messages(plane, memory):
    """To the right neighbour and from the left, two with one tag and one with another, whose size differs."""
    right, left = (plane.rank + 1) % plane.size, (plane.rank - 1) % plane.size
    if plane.size == 1:
        return
    lengths = [(5, 10), (5, 10), (7, 2000)]  # tag, bytes
    incoming = [memory.put(np.zeros(size), "uint8") for _, size in lengths]
    transfers = [plane.receive(array, left, tag) for (tag, _), array in zip(lengths, incoming, strict=True)]
    outgoing = [memory.put(_values(plane.rank + number, size), "uint8") for number, (_, size) in enumerate(lengths)]
    transfers += [plane.send(array, right, tag) for (tag, _), array in zip(lengths, outgoing, strict=True)]
    for transfer in transfers:
        transfer.wait()
    for number, array in enumerate(incoming):
        assert np.array_equal(memory.get(array), _values(left + number, len(array)).astype(np.uint8)), number


def check_sizes_and_barrier(plane, memory):
    sizes = plane.exchange_sizes([plane.rank, 2**40 + plane.rank])
    assert sizes.tolist() == [[rank, 2**40 + rank] for rank in range(plane.size)]
    plane.barrier()


def check_subset(plane, memory):
    """All but rank 0, if there are others; then again all."""
    ranks = list(range(1, plane.size)) or [0]
    for _ in range(2):
        part = plane.subset(ranks)
        if plane.rank not in ranks:
            assert part is None
            continue
        assert (part.rank, part.size) == (ranks.index(plane.rank), len(ranks))
        values = memory.put(_values(plane.rank, 9), "float32")
        part.allreduce(values, values, ReduceOp.Sum)
        assert np.array_equal(memory.get(values), sum(_values(rank, 9) for rank in ranks))
        part.close()
    check_broadcast(plane, memory)


CONTRACT = [check_allreduce, check_reducescatter, check_allgather, check_alltoall, check_broadcast, check_messages,
            check_sizes_and_barrier, check_subset]
