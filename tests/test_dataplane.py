"""The contract of data planes on those of ranks that are threads, and what NCCL's plane makes of failures and of order.

tests/parallel/test_dataplane.py runs the same contract over MPI.
"""

import sys
import threading

import numpy as np
import pytest
from fake_gpu import FakeDevice, FakeNccl, NcclError
from plane_contract import CONTRACT, DeviceMemory, HostMemory

from hvdlite.config import Config
from hvdlite.control.local import LocalGroup
from hvdlite.dataplane.local import LocalPlane
from hvdlite.dataplane.nccl import NcclPlane
from hvdlite.errors import TransportError, UnavailableError
from hvdlite.message import ReduceOp
from hvdlite.runtime import Runtime


def on_ranks(size, body, timeout_s=30):
    """Run ``body(LocalPlane)`` on so many threads; results in rank order, or the first exception of any."""
    group = LocalGroup(size)
    results, errors = [None] * size, []

    def run(rank):
        try:
            results[rank] = body(LocalPlane(group, rank))
        except BaseException as error:
            errors.append(error)
            group.abort(f"rank {rank}: {error}")

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    return results


def on_gpus(size, body, nccl=None, **options):
    """As ``on_ranks``, with a plane of NCCL's; afterwards nothing has gone wrong behind its back."""
    nccl = nccl or FakeNccl()

    def run(host):
        device = FakeDevice(host.rank)
        plane = NcclPlane(nccl, host, device, **options)
        result = body(plane, DeviceMemory(device))
        plane.close()
        assert not device.faults and not any(stream.failures for stream in device.streams)
        return result

    return on_ranks(size, run)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("check", CONTRACT, ids=lambda check: check.__name__)
def test_contract_of_the_local_plane(check, size):
    on_ranks(size, lambda plane: check(plane, HostMemory()))


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("check", CONTRACT, ids=lambda check: check.__name__)
def test_contract_of_nccl(check, size):
    nccl = FakeNccl()
    on_gpus(size, check, nccl)
    assert nccl.num_destroyed == nccl.num_communicators and not nccl.num_aborted


def test_equal_pieces_take_one_call_and_unequal_ones_a_group():
    nccl = FakeNccl()

    def body(plane, memory):
        for counts in ([2, 2], [1, 3]):
            plane.allgather(memory.put(np.ones(counts[plane.rank]), "float32"), memory.put(np.ones(4), "float32"), counts)
            target = memory.put(np.ones(counts[plane.rank]), "float32")
            plane.reducescatter(memory.put(np.ones(4), "float32"), target, counts, ReduceOp.Sum)
            assert memory.get(target).tolist() == [2] * counts[plane.rank]

    on_gpus(2, body, nccl)
    kinds = [kind for rank, kind in nccl.calls if rank == 0]
    assert kinds == ["allGather", "reduceScatter", "broadcast", "broadcast", "reduce", "reduce"]


def test_floats_are_averaged_by_nccl_where_it_can():
    def body(plane, memory):
        assert [plane.averages(dtype) for dtype in ("float16", "bfloat16", "float32", "int32")] == [True, True, True, False]
        values = memory.put([1 + plane.rank, 4], "float32")
        plane.allreduce(values, values, ReduceOp.Average)
        assert memory.get(values).tolist() == [1.5, 4]

    on_gpus(2, body)
    on_gpus(1, lambda plane, _: pytest.fail("too old") if plane.averages("float32") else None, FakeNccl(version=2804))


def test_what_nccl_combines():
    def body(plane, _):
        assert {dtype for dtype in ("float16", "bfloat16", "float64", "int8", "int64") if plane.combines(dtype)} == {
            "float16", "bfloat16", "float64", "int8", "int64"}
        assert not plane.combines("int16") and not plane.combines("bool")

    on_gpus(1, body)


def test_a_call_returns_before_the_stream_has_come_to_it():
    def body(plane, memory):
        values = memory.put(np.ones(4), "float32")
        plane.device.synchronize()
        plane.device.communication.gate.clear()
        plane.allreduce(values, values, ReduceOp.Sum)
        assert not plane.device.communication.is_empty()
        plane.device.communication.gate.set()
        assert memory.get(values).tolist() == [2] * 4

    on_gpus(2, body)


def caught(function, *arguments):
    with pytest.raises(TransportError) as error:
        function(*arguments)
    return str(error.value)


def test_an_error_behind_our_backs_is_told_with_nccls_reason_and_ends_what_waits():
    """Rank 1 never makes the second call: rank 0's stream waits until NCCL tells of the failure, and the plane aborts."""
    nccl = FakeNccl()
    injected = threading.Barrier(2)

    def body(host):
        device = FakeDevice(host.rank)
        plane, memory = NcclPlane(nccl, host, device, last_error=lambda: "Net: connection closed by peer"), DeviceMemory(device)
        values = memory.put(np.ones(4), "float32")
        plane.allreduce(values, values, ReduceOp.Sum)
        plane.poll()  # nothing has happened so far
        if host.rank == 0:
            plane.allreduce(values, values, ReduceOp.Sum)
        injected.wait(10)
        if host.rank == 0:
            nccl.inject(6)
        injected.wait(10)
        text = caught(plane.poll)
        assert "NCCL failed in a call that was under way on GPU" in text and "REMOTE_ERROR" in text
        assert "(Net: connection closed by peer)" in text and f"rank {host.rank} of 2" in text
        device.record().synchronize()  # the stream goes on
        again = caught(plane.allreduce, values, values, ReduceOp.Sum)
        assert "its communicator is gone" in again and "REMOTE_ERROR" in again
        plane.poll()
        plane.close()

    on_ranks(2, body)
    assert nccl.num_aborted == 2 and nccl.num_destroyed == 0


@pytest.mark.parametrize("change", ["kind", "count", "dtype", "op", "order"])
def test_calls_that_do_not_match_are_an_error_on_every_rank(change):
    def body(host):
        device = FakeDevice(host.rank)
        plane, memory = NcclPlane(nccl, host, device), DeviceMemory(device)
        values = memory.put(np.ones(8), "float32")
        other = change if host.rank else ""

        def add(count):
            plane.allreduce(values[:count], values[:count], ReduceOp.Max if other == "op" else ReduceOp.Sum)

        if other == "kind":
            plane.broadcast(values, 0)
        elif other == "dtype":
            plane.allreduce(values.as_dtype("int32"), values.as_dtype("int32"), ReduceOp.Sum)
        else:
            add({"count": 7, "order": 4}.get(other, 8))
            add({"order": 8}.get(other, 4))
        device.record().synchronize()
        assert "INVALID_USAGE" in caught(plane.poll)

    nccl = FakeNccl(patience_s=2)
    on_ranks(2, body)


def test_a_message_without_a_counterpart_fails_instead_of_hanging():
    def body(host):
        device = FakeDevice(host.rank)
        plane, memory = NcclPlane(nccl, host, device), DeviceMemory(device)
        if host.rank == 0:
            plane.send(memory.put(np.ones(4), "uint8"), 1, 0).wait()
        device.record().synchronize()
        if host.rank == 0:
            assert "INVALID_USAGE" in caught(plane.poll)

    nccl = FakeNccl(patience_s=0.3)
    on_ranks(2, body)


def test_one_ranks_abort_wakes_the_others():
    def body(host):
        device = FakeDevice(host.rank)
        plane, memory = NcclPlane(nccl, host, device), DeviceMemory(device)
        if host.rank:
            plane.abort("rank 1 gave up")
            assert "rank 1 gave up" in caught(plane.broadcast, memory.put(np.ones(1), "uint8"), 0)
        else:
            values = memory.put(np.ones(4), "float32")
            plane.allreduce(values, values, ReduceOp.Sum)
            device.record().synchronize()
            assert "REMOTE_ERROR" in caught(plane.poll)

    nccl = FakeNccl()
    on_ranks(2, body)
    assert nccl.num_aborted == 2


def test_a_failure_within_a_group_ends_the_group():
    def body(host):
        device = FakeDevice(host.rank)
        plane, memory = NcclPlane(nccl, host, device), DeviceMemory(device)
        nccl.NcclCommunicator.send = lambda *_: (_ for _ in ()).throw(NcclError(3))
        text = caught(plane.alltoall, memory.put(np.ones(4), "uint8"), memory.put(np.ones(4), "uint8"), np.full((2, 2), 2))
        assert "NCCL failed in alltoall" in text and "INTERNAL_ERROR" in text
        assert nccl.group.depth == 0

    nccl = FakeNccl()
    on_ranks(2, body)


def test_no_id_is_told_on_every_rank():
    def body(host):
        assert "NCCL failed in making an id on rank 0" in caught(NcclPlane, nccl, host, FakeDevice(host.rank))

    nccl = FakeNccl()
    nccl.get_unique_id = lambda: (_ for _ in ()).throw(NcclError(2))
    on_ranks(2, body)


def test_two_ranks_on_one_gpu_are_told_in_nccls_words():
    class Duplicate(FakeNccl):
        def __init__(self):
            super().__init__()

            def refuse(*_):
                raise NcclError(5)

            self.NcclCommunicator = refuse

    def body(host):
        words = "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000"
        text = caught(lambda: NcclPlane(nccl, host, FakeDevice(0), last_error=lambda: words))
        assert words in text and "INVALID_USAGE" in text and "two ranks on one GPU" in text

    nccl = Duplicate()
    on_ranks(2, body)


def test_nccl_asked_for_where_there_is_no_gpu_is_an_error_at_init_that_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)  # as where it is not installed
    with pytest.raises(UnavailableError, match=r"HVDLITE_GPU_PLANE=nccl.*pip install hvdlite\[gpu\]"):
        Runtime.local(LocalGroup(1), 0, Config(gpu_plane="nccl"))
    Runtime.local(LocalGroup(1), 0, Config(gpu_plane="auto"))
    Runtime.local(LocalGroup(1), 0, Config(gpu_plane="mpi"))
