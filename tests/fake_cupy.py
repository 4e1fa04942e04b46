"""As much of CuPy 14 and of ``numba.cuda`` as hvdlite calls, on the streams and the memory of ``fake_gpu``; ``install`` puts them
where imports find them. Names and signatures: cupy/cuda/stream.pyx, memory.pyx, pinned_memory.pyx, api/runtime.pyx.
"""

import ctypes
import sys
import threading
import types

import numpy as np
from fake_gpu import FakeEvent, FakeMemory, FakeStream, _streams, view

_here = threading.local()
_events = {}


class CUDARuntimeError(RuntimeError):
    pass


class Gpu:
    """What a FakeMemory looks at of its device."""

    def __init__(self, index):
        self.index, self.faults, self.streams = index, [], []
        self.user = Stream.made(self, "user")


class Stream:
    def __init__(self, null=False, non_blocking=False, ptds=False, priority=None):
        assert non_blocking and not null, "the runtime's streams must not wait for the default one"
        self._make(current_gpu(), "runtime")

    @classmethod
    def made(cls, gpu, name):
        self = cls.__new__(cls)
        self._make(gpu, name)
        return self

    def _make(self, gpu, name):
        self._stream = FakeStream(f"{name} of GPU {gpu.index}")
        gpu.streams.append(self._stream)
        self.ptr = self._stream.handle

    def __enter__(self):
        self._former = getattr(_here, "stream", None)
        _here.stream = self

    def __exit__(self, *_):
        _here.stream = self._former


class ExternalStream:
    def __init__(self, ptr, device_id=-1):
        assert ptr in _streams
        self.ptr = ptr

    __enter__, __exit__ = Stream.__enter__, Stream.__exit__


class Event:
    def __init__(self, block=False, disable_timing=False, interprocess=False):
        self.ptr = id(self)
        self._event = None
        _events[self.ptr] = self

    @property
    def done(self):
        return self._event is None or self._event.is_done()

    def __del__(self):
        _events.pop(self.ptr, None)


class Device:
    def __init__(self, index):
        self.id = index

    def __enter__(self):
        self._former = getattr(_here, "gpu", 0)
        _here.gpu = self.id

    def __exit__(self, *_):
        _here.gpu = self._former


class Pinned(np.ndarray):
    pass


class Array:
    """A cupy.ndarray; kernels of CuPy's are done at once."""

    def __init__(self, shape, dtype, memory=None, stride=1):
        self.shape, self.dtype, self.stride = tuple(shape), np.dtype(dtype), stride
        self.size = int(np.prod(self.shape, dtype=int))
        self.device = Device(current_gpu().index)
        self._memory = memory or FakeMemory(current_gpu(), self.size * stride * self.dtype.itemsize)
        self.data = types.SimpleNamespace(ptr=self._memory.address)

    def host(self):
        return view(self.data.ptr, self.size * self.stride, str(self.dtype))[:: self.stride].reshape(self.shape)

    def __setitem__(self, place, values):
        _streams[get_current_stream().ptr].put(lambda: self.host().__setitem__(place, values.host()))


Array.__module__ = "cupy"
_gpus = []


def current_gpu():
    return _gpus[getattr(_here, "gpu", 0)]


def get_current_stream(device_id=-1):
    known = getattr(_here, "stream", None)
    return known or (current_gpu() if device_id < 0 else _gpus[device_id]).user


def _asnumpy(array):
    event = FakeEvent()
    _streams[get_current_stream(array.device.id).ptr].put(event.passed.set)
    event.synchronize()
    return array.host().copy()


def _asarray(values, stride=1):
    values = np.asarray(values)
    made = Array(values.shape, values.dtype, stride=stride)
    made.host()[...] = values
    return made


def _alloc(num_bytes):
    assert getattr(_here, "stream", None) is not None, "the pool has to know on which stream memory is used"
    memory = FakeMemory(current_gpu(), num_bytes)
    return types.SimpleNamespace(ptr=memory.address, mem=memory)


def _pinned(num_bytes):
    return bytearray(num_bytes)


def _memcpy_async(dst, src, size, kind, stream):
    assert kind == 4 and isinstance(dst, int) and isinstance(src, int)
    if (dst < 4096 or src < 4096) and size:
        raise CUDARuntimeError("cudaErrorInvalidValue: invalid argument")
    _streams[stream].put(lambda: ctypes.memmove(dst, src, size), (dst, size), (src, size))


def _event_record(event, stream):
    _events[event]._event = made = FakeEvent()
    _streams[stream].put(made.passed.set)


def _stream_wait_event(stream, event, flags=0):
    _streams[stream].put(_events[event]._event.synchronize)


class Launches(list):
    """The numba.cuda that ``dataplane.cuda`` sees; what it is asked to launch is noted."""

    @staticmethod
    def is_available():
        return True

    @staticmethod
    def external_stream(ptr):
        return ("external", ptr)

    gpus = {}


def install(monkeypatch, num_gpus, nccl):
    """Pretend that CuPy, numba-cuda and so many GPUs are here."""
    _gpus[:] = []
    for index in range(num_gpus):
        _gpus.append(Gpu(index))
    runtime = types.SimpleNamespace(
        CUDARuntimeError=CUDARuntimeError, getDeviceCount=lambda: num_gpus, memcpyDefault=4, memcpyAsync=_memcpy_async,
        eventRecord=_event_record, streamWaitEvent=_stream_wait_event,
        getDeviceProperties=lambda index: dict(uuid=bytes([7, index + 1]), multiProcessorCount=132, pciDomainID=0,
                                               pciBusID=index, pciDeviceID=0))
    cuda = types.ModuleType("cupy.cuda")
    cuda.__dict__.update(
        runtime=runtime, Stream=Stream, ExternalStream=ExternalStream, Event=Event, Device=Device, alloc=_alloc, nccl=nccl,
        alloc_pinned_memory=_pinned, get_current_stream=get_current_stream,
        memory=types.SimpleNamespace(OutOfMemoryError=type("OutOfMemoryError", (MemoryError,), {})))
    cupy = types.ModuleType("cupy")
    cupy.__dict__.update(
        cuda=cuda, ndarray=Array, asnumpy=_asnumpy, asarray=_asarray, empty=Array,
        ascontiguousarray=lambda array: array if array.stride == 1 else _asarray(_asnumpy(array)))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    monkeypatch.setitem(sys.modules, "cupy.cuda.nccl", nccl)
    import numba.cuda

    for name in ("is_available", "external_stream"):
        monkeypatch.setattr(numba.cuda, name, getattr(Launches, name), raising=False)
    from contextlib import nullcontext

    monkeypatch.setattr(numba.cuda, "gpus", [nullcontext() for _ in range(num_gpus)], raising=False)
    return cupy
