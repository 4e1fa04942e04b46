"""A device whose memory is the host's: kernels run in Numba's simulator, streams keep their order at once."""

import threading

import numpy as np

from hvdlite.compression.cuda_kernels import WARPS_PER_BLOCK

#: The simulator runs one kernel at a time.
_one_kernel = threading.Lock()


class FakeDevice:
    """What ``dataplane.cuda.Device`` does, done at once; ``calls`` notes what was asked for, in order."""

    num_blocks = 2

    def __init__(self, index=0):
        self.index = index
        self.stream, self.wire = 11, 22
        self.calls = []
        self._kept = []
        self._pinned = []

    def allocate(self, num_bytes):
        return FakeMemory(num_bytes)

    def pinned(self, num_bytes):
        return np.empty(num_bytes, np.uint8)

    def upload(self, array):
        self._kept.append(np.ascontiguousarray(array).copy())
        return self._kept[-1].ctypes.data

    def launch(self, kernel, num_warps, *arguments):
        blocks = min(self.num_blocks, -(-num_warps // WARPS_PER_BLOCK))
        self.calls.append(("launch", kernel.__name__, num_warps))
        with _one_kernel, np.errstate(all="ignore"):
            kernel[blocks, WARPS_PER_BLOCK](*arguments)

    def copy(self, target, source, num_bytes, stream=0):
        import ctypes

        self.calls.append(("copy", num_bytes))
        ctypes.memmove(target, source, num_bytes)

    def record(self, stream=0, timed=False):
        self.calls.append(("record", stream or self.stream))
        return FakeEvent(self)

    def wait_for(self, event, stream=0):
        self.calls.append(("wait_for", stream or self.stream))

    def elapsed_ns(self, event):
        return event.ns

    def keep(self, *what):
        self._kept.append(what)

    def poll(self):
        self._kept.clear()

    def synchronize(self):
        self.calls.append(("synchronize",))


class FakeEvent:
    def __init__(self, device):
        import time

        self.device, self.ns = device, time.monotonic_ns()

    def is_done(self):
        return True

    def synchronize(self):
        pass


class FakeMemory:
    def __init__(self, num_bytes):
        self.memory = np.zeros(num_bytes + 256, np.uint8)
        self.address = (self.memory.ctypes.data + 255) // 256 * 256
        self.num_bytes = num_bytes
