"""CudaDevice and the adapter for CuPy, on a stand-in for CuPy: that they call what CuPy has, as it has it, in the right order."""

import sys
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import fake_cupy
import numpy as np
import pytest
from fake_gpu import FakeNccl
from plane_contract import CONTRACT, DeviceMemory
from ranks import run_ranks
from test_dataplane import on_ranks

from hvdlite import adapters, submission
from hvdlite.config import Config
from hvdlite.dataplane import cuda
from hvdlite.dataplane.gpus import Gpus, open_cuda
from hvdlite.dataplane.nccl import NcclPlane
from hvdlite.errors import InvalidRequestError, TransportError, UnavailableError
from hvdlite.message import Collective, ReduceOp
from hvdlite.submission import Submission

NUM_GPUS = 3


@pytest.fixture
def nccl():
    return FakeNccl()


@pytest.fixture
def cupy(monkeypatch, nccl):
    monkeypatch.setattr(adapters, "_known", {})
    monkeypatch.delitem(sys.modules, "hvdlite.adapters.cupy", raising=False)
    yield fake_cupy.install(monkeypatch, NUM_GPUS, nccl)
    sys.modules.pop("hvdlite.adapters.cupy", None)
    for gpu in fake_cupy._gpus:
        assert not gpu.faults and not [one for stream in gpu.streams for one in stream.failures]


@pytest.mark.parametrize("check", CONTRACT, ids=lambda check: check.__name__)
def test_contract_of_nccl_on_cuda_devices(cupy, nccl, check):
    def body(host):
        device = cuda.CudaDevice(host.rank)
        plane = NcclPlane(cuda.load_nccl()[0], host, device)
        check(plane, DeviceMemory(device))
        plane.close()

    on_ranks(NUM_GPUS, body)
    assert nccl.num_destroyed == nccl.num_communicators


def test_devices_are_told_apart(cupy):
    assert len({cuda.CudaDevice(index).identity for index in range(NUM_GPUS)}) == NUM_GPUS
    assert cuda.CudaDevice(1).identity == cuda.CudaDevice(1).identity < 2**63


def test_memory_is_kept_until_the_stream_has_passed(cupy):
    device = cuda.CudaDevice(0)
    stream = device._streams[0]._stream
    stream.gate.clear()
    there = device.allocate(64)
    device.upload(np.arange(4))
    device.copy(there.address, there.address, 64)
    device.keep(there)
    del there
    device.poll()
    device.poll()
    assert len(device._kept) == 2
    stream.gate.set()
    device.synchronize()
    assert not device._kept and not device._uploads


def test_pinned_memory_and_downloads(cupy):
    device = cuda.CudaDevice(2)
    assert [len(device.pinned(size)) for size in (0, 1, 1000)] == [0, 1, 1000]
    address = device.upload(np.arange(10))
    assert device.download(address, 80).view(np.int64).tolist() == list(range(10))


def test_a_launch_is_on_the_devices_stream(cupy):
    seen = []

    class Kernel:
        def __getitem__(self, configuration):
            return lambda *arguments: seen.append((configuration, arguments))

    from hvdlite.compression.cuda_kernels import THREADS, WARPS_PER_BLOCK

    device = cuda.CudaDevice(0)
    device.launch(Kernel(), 3 * WARPS_PER_BLOCK + 1, 5, 6)
    device.launch(Kernel(), 10**9, 5, 6)
    stream = ("external", device.stream)
    assert seen == [((4, THREADS, stream), (5, 6)), ((8 * 132, THREADS, stream), (5, 6))]


def test_cudas_errors_are_told_as_such(cupy):
    device = cuda.CudaDevice(0)
    with pytest.raises(TransportError, match="CUDA failed in a copy on GPU 0: cudaErrorInvalidValue: invalid argument"):
        device.copy(1, 1, 8)


def test_a_local_rank_that_sees_fewer_gpus_counts_round(cupy):
    """And what init() looks at binds nobody: the first tensor says which GPU the process works on."""
    assert cuda.num_gpus() == NUM_GPUS
    gpus = Gpus("nccl", NUM_GPUS + 1)
    gpus.require()
    assert gpus.opened is None
    assert gpus.device(2).index == 2
    assert open_cuda(NUM_GPUS + 1).index == 1


def test_what_is_missing_is_told(monkeypatch, cupy, nccl):
    nccl.available = False
    with pytest.raises(UnavailableError, match=r"this CuPy was built without it.*pip install hvdlite\[gpu\]"):
        cuda.load_nccl()
    monkeypatch.setattr(cupy.cuda.runtime, "getDeviceCount", lambda: 0)
    assert cuda.why_unavailable() == "there is no GPU"
    with pytest.raises(UnavailableError, match="GPU 0: there is no GPU: pip install"):
        cuda.CudaDevice(0)

    def no_driver():
        raise fake_cupy.CUDARuntimeError("cudaErrorInsufficientDriver")

    monkeypatch.setattr(cupy.cuda.runtime, "getDeviceCount", no_driver)
    assert cuda.why_unavailable() == "CUDA cannot be used: cudaErrorInsufficientDriver"


@pytest.mark.parametrize("plane", ["auto", "nccl", "mpi"])
def test_cupy_arrays_end_to_end(cupy, nccl, plane):
    """Nothing here needs a kernel of ours."""
    def body(rank):
        with cupy.cuda.Device(rank.rank):
            me = rank.rank
            for dtype in ("float32", "float64", "float16"):
                got = rank.allreduce(cupy.asarray(np.full((2, 3), me + 1, dtype)), name=dtype)
                assert got.shape == (2, 3) and got.dtype == dtype and (cupy.asnumpy(got) == 2).all()
            strided = cupy.asarray(np.full(5, me + 1.0), stride=2)
            assert rank.allreduce(strided, name="strided", op=ReduceOp.Sum, in_place=True) is strided
            assert cupy.asnumpy(strided).tolist() == [6] * 5
            got = rank.allgather_async(cupy.asarray(np.full((me, 2), me)), name="gather").wait(20)
            assert cupy.asnumpy(got).tolist() == [[1, 1], [2, 2], [2, 2]]
            got = rank.broadcast_async(cupy.asarray(np.array([me, 5])), 1, name="b").wait(20)
            assert cupy.asnumpy(got).tolist() == [1, 5]
            call = Submission(Collective.ALLTOALL, cupy.asarray(np.arange(3) + 10 * me), name="a", runtime=rank.runtime)
            assert cupy.asnumpy(submission.alltoall(call, splits=None).wait(20)).tolist() == [me, 10 + me, 20 + me]
            with pytest.raises(InvalidRequestError, match="dtype uint32 is not exchanged"):
                rank.allreduce(cupy.empty((2,), np.uint32), name="c")
            with pytest.raises(InvalidRequestError, match="a tensor is on GPU"), cupy.cuda.Device((me + 1) % NUM_GPUS):
                rank.allreduce(cupy.asarray(np.ones(2)), name="elsewhere")

    run_ranks(NUM_GPUS, body, Config(heartbeat_ms=5, gpu_plane=plane), gpus=lambda rank: Gpus(plane, rank))
    assert nccl.num_communicators == nccl.num_destroyed == (0 if plane == "mpi" else NUM_GPUS)


@pytest.fixture
def torch_on_gpus(cupy, monkeypatch):
    """torch, whose host tensors are taken for those of the calling thread's GPU. What torch does itself is done at once, whatever
    the stream; so results are looked at when the runtime's stream is empty."""
    import torch

    from hvdlite.adapters import torch as adapter

    here = threading.local()
    streams = []

    @contextmanager
    def on_stream(stream, index):
        streams.append((stream, index))
        fake_cupy._streams[stream].put(lambda: None)
        _drain(stream)
        yield

    monkeypatch.setattr(adapter, "gpu_of", lambda tensor: here.index)
    monkeypatch.setattr(adapter, "_on_stream", on_stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: SimpleNamespace(cuda_stream=fake_cupy._gpus[index].user.ptr))
    return torch, here, streams


def _drain(stream):
    done = threading.Event()
    fake_cupy._streams[stream].put(done.set)
    assert done.wait(20)


def _look(rank, tensor):
    """A tensor's values when the user's stream has come there, which waits for the runtime's."""
    _drain(fake_cupy._gpus[rank.rank].user.ptr)
    return tensor.tolist()


def test_torch_tensors_end_to_end(torch_on_gpus, nccl):
    torch, here, streams = torch_on_gpus

    def body(rank):
        here.index = me = rank.rank
        for dtype in ("float16", "bfloat16", "float32", "float64"):
            got = rank.allreduce(torch.full((2, 2), me + 1).to(getattr(torch, dtype)), name=dtype)
            assert _look(rank, got) == [[2, 2], [2, 2]] and got.dtype == getattr(torch, dtype)
        base = torch.full((4, 2), me + 1.0)
        column = base[:, 0]
        assert rank.allreduce(column, name="column", op=ReduceOp.Sum, in_place=True) is column
        assert _look(rank, base) == [[6, me + 1]] * 4
        parameter = torch.ones(3, requires_grad=True)
        assert _look(rank, rank.allreduce(parameter, name="p", op=ReduceOp.Sum)) == [3, 3, 3]
        got = rank.allgather_async(torch.full((me, 1), me), name="g").wait(20)
        assert _look(rank, got) == [[1], [2], [2]]
        assert _look(rank, rank.broadcast_async(torch.tensor([me, 9]), 2, name="b").wait(20)) == [2, 9]
        assert _look(rank, rank.allreduce(torch.zeros(0), name="empty")) == []
        for bad, says in ((torch.ones(2, dtype=torch.complex64), "dtype torch.complex64"), (torch.eye(2).to_sparse(), "layout"),
                          (torch.ones(1).expand(4), "overlap")):
            with pytest.raises(InvalidRequestError, match=says):
                rank.allreduce(bad, name="bad", in_place=True)

    run_ranks(NUM_GPUS, body, gpus=lambda rank: Gpus("auto", rank))
    assert nccl.num_communicators == NUM_GPUS
    users = {(gpu.user.ptr, gpu.index) for gpu in fake_cupy._gpus}
    assert users <= set(streams), "what allgather makes belongs to the caller's stream"
    assert len(set(streams) - users) == NUM_GPUS, "strided results are written on the runtime's stream"


def test_torch_training_end_to_end(torch_on_gpus, nccl, monkeypatch):
    """A wrapped optimizer: gradients leave from hooks, step waits by streams."""
    torch, here, _ = torch_on_gpus
    from hvdlite.optimizer import GradientExchange, GradientSpec

    def body(rank):
        here.index = me = rank.rank
        specs = [GradientSpec(f"w{index}", 4 * 40_000, "cuda") for index in range(3)]
        exchange = GradientExchange(specs, label="g", in_place=True, runtime=rank.runtime)
        for step in range(3):
            gradients = [torch.full((40_000,), float(me + index + step)) for index in range(3)]
            for number, bucket in enumerate(exchange.buckets):
                exchange.send(number, [gradients[index] for index in bucket])
            exchange.finish(lambda index: None)
            for index, one in enumerate(gradients):
                assert set(_look(rank, one)) == {1.0 + index + step}

    run_ranks(NUM_GPUS, body, gpus=lambda rank: Gpus("auto", rank))
    assert nccl.num_communicators == NUM_GPUS
