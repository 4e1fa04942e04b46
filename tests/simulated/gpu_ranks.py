"""Ranks that are threads with a GPU each, and tensors on it, all stand-ins of fake_gpu."""

import numpy as np
import pytest
from fake_gpu import FakeDevice, FakeMemory, FakeNccl, NcclError, view
from ranks import run_ranks

from hvdlite import adapters
from hvdlite.buffer import NUMPY_DTYPES, Buffer
from hvdlite.dataplane.device import DeviceArray
from hvdlite.dataplane.gpus import Gpus
from hvdlite.errors import UnavailableError


class Tensor:
    """A tensor on a FakeDevice; ``strided``: only every other element is its own."""

    def __init__(self, device, shape, dtype, stride=1):
        self.device, self.shape, self.dtype, self.stride = device, tuple(shape), dtype, stride
        self.count = int(np.prod(shape, dtype=int))
        self.memory = FakeMemory(device, self.count * stride * NUMPY_DTYPES[dtype].itemsize)

    def _copy(self, host, to_device):
        there = view(self.memory.address, self.count * self.stride, self.dtype)[:: self.stride]
        if to_device:
            there[:] = host
        else:
            host[:] = there

    def write(self, values, stream=None):
        """Enqueue it on the user's stream."""
        host = np.array(values).reshape(-1).astype(NUMPY_DTYPES[self.dtype])
        self.device._put(self.device.user if stream is None else stream, "produce", lambda: self._copy(host, True))
        return self

    def read(self):
        """Enqueue it on the user's stream, and look once that has come to it."""
        host = np.empty(self.count, NUMPY_DTYPES[self.dtype])
        self.device._put(self.device.user, "consume", lambda: self._copy(host, False))
        self.device.record(self.device.user).synchronize()
        return host.reshape(self.shape)


class TensorAdapter:
    @staticmethod
    def small_copy(tensor):
        return None

    @staticmethod
    def gpu_of(tensor):
        return tensor.device.index

    @staticmethod
    def device_buffer(tensor, writable, device):
        flat, address = tensor, tensor.memory.address
        if tensor.stride > 1:
            flat = Tensor(device, tensor.shape, tensor.dtype)
            address = flat.memory.address
            device._put(device.user, "gather", lambda: flat._copy(view(
                tensor.memory.address, tensor.count * tensor.stride, tensor.dtype)[:: tensor.stride], True))
        array = DeviceArray(address, tensor.count, tensor.dtype, flat)
        made = Buffer(array, tensor.dtype, tensor.shape, "cuda", tensor, None, address, device, lambda: device.user)
        if writable and flat is not tensor:
            made.write_back = lambda stream: device._put(
                stream, "scatter", lambda: tensor._copy(view(address, tensor.count, tensor.dtype), True))
        return made

    @staticmethod
    def device_empty(shape, dtype, like, stream=None):
        return TensorAdapter.device_buffer(Tensor(like.on, shape, dtype), True, like.on)

    @staticmethod
    def buffer(tensor, writable):
        """As frameworks copy where there is no device."""
        host = tensor.read().reshape(-1)
        made = Buffer(host, tensor.dtype, tensor.shape, "cuda", tensor)
        made.write_back = lambda: tensor.write(host)
        return made

    @staticmethod
    def empty(shape, dtype, like):
        return TensorAdapter.buffer(Tensor(like.device, shape, dtype), True)


class Ranks:
    """Ranks with a GPU each. ``way``: nccl or mpi; ``lacks``: ranks without CuPy; ``modules``: each rank's NCCL."""

    def __init__(self, way="nccl", size=2, lacks=(), nccl=None, setting=None, indices=None, hierarchical=False, modules=None):
        self.nccl, self.size, self.way = nccl or FakeNccl(), size, way
        self.devices = [FakeDevice(rank) for rank in range(size)] if indices is None else [FakeDevice(one) for one in indices]
        self.lacks, self.setting = lacks, setting or ("mpi" if way == "mpi" else "auto")
        self.hierarchical, self.modules = hierarchical, modules or [self.nccl] * size

    def gpus(self, rank):
        def open_device(index):
            if rank in self.lacks:
                raise UnavailableError("CuPy is not installed")
            assert index == self.devices[rank].index
            return self.devices[rank]

        def load():
            if rank in self.lacks:
                raise UnavailableError("CuPy is not installed")
            return self.modules[rank], str

        return Gpus(self.setting, self.devices[rank].index, open_device, load, hierarchical=self.hierarchical)

    def run(self, body, config=None, hosts=()):
        def on_rank(rank):
            device = self.devices[rank.rank]
            rank.tensor = lambda values, dtype="float32", stride=1: Tensor(
                device, np.shape(values), dtype, stride).write(values)
            rank.device = device
            return body(rank)

        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(adapters._known, Tensor, TensorAdapter)
            results = run_ranks(self.size, on_rank, config, gpus=self.gpus, hosts=hosts)
        for device in self.devices:
            device.synchronize()
            assert not device.faults
            # What waits in a communicator ends with an error when that is aborted.
            expected = NcclError if any(one.num_aborted for one in self.modules) else ()
            failures = [one for stream in device.streams for one in stream.failures if not isinstance(one, expected)]
            assert not failures, failures
        return results
