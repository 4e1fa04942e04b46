"""GPU tensors from the call to the result, on stand-ins: streams and NCCL's ranks are threads, kernels run in the simulator."""

import logging
import threading

import numpy as np
import pytest
import torch
from fake_gpu import FakeDevice, FakeNccl, from_float, to_float, view
from gpu_ranks import Ranks, Tensor
from ranks import run_ranks

from hvdlite import submission
from hvdlite.collectives import staged
from hvdlite.compressor import Compression, compressed_allreduce
from hvdlite.config import Config
from hvdlite.dataplane import quantized_device
from hvdlite.dataplane.device import DeviceArray
from hvdlite.errors import HorovodInternalError, InvalidRequestError, TransportError, UnavailableError
from hvdlite.message import Collective, ReduceOp
from hvdlite.submission import Submission

both_ways = pytest.mark.parametrize("way", ["nccl", "mpi"])


def allreduce(rank, tensor, **options):
    return rank.allreduce_async(tensor, **options)


@both_ways
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "int8", "uint8", "int16", "int32", "int64"])
def test_allreduce_of_every_dtype(way, dtype):
    """Alone, in place and fused; sums and averages of whole numbers are exact, of integers toward zero."""
    ranks = Ranks(way)

    def values(rank, count):
        whole = (np.arange(count) % 7 + 3 * rank - (0 if dtype == "uint8" else 4)).astype(np.float32)
        return from_float(whole, dtype) if dtype == "bfloat16" else whole

    def seen(tensor):
        return to_float(tensor.read(), dtype) if dtype == "bfloat16" else tensor.read().astype(np.float64)

    def whole(rank, count):
        return np.arange(count) % 7 + 3.0 * rank - (0 if dtype == "uint8" else 4)

    def body(rank):
        for op in (ReduceOp.Sum, ReduceOp.Average, ReduceOp.Max, ReduceOp.Min):
            counts = (1, 0, 5, 33)
            handles = [rank.allreduce_async(rank.tensor(values(rank.rank, count), dtype), name=f"{op.name}{count}", op=op)
                       for count in counts]
            for count, handle in zip(counts, handles, strict=True):
                both = np.stack([whole(one, count) for one in range(2)])
                expected = {ReduceOp.Sum: both.sum(0), ReduceOp.Average: both.sum(0) / 2, ReduceOp.Max: both.max(0),
                            ReduceOp.Min: both.min(0)}[op]
                if "float" not in dtype:
                    expected = np.trunc(expected)
                assert np.array_equal(seen(handle.wait(20)), expected), (op, count)
        tensor = rank.tensor(values(rank.rank, 9), dtype)
        assert rank.allreduce(tensor, name="in place", op=ReduceOp.Sum, in_place=True) is tensor
        assert np.array_equal(seen(tensor), whole(0, 9) + whole(1, 9))

    ranks.run(body, Config(heartbeat_ms=5, cycle_time_ms=20))
    assert ranks.nccl.num_communicators == ranks.nccl.num_destroyed == (2 if way == "nccl" else 0)


@both_ways
def test_scales_and_strides(way):
    def body(rank):
        tensor = rank.tensor(np.full(6, 4.0 * (rank.rank + 1)), stride=2)
        assert rank.allreduce(tensor, name="x", op=ReduceOp.Sum, in_place=True, prescale=0.5, postscale=3.0) is tensor
        assert tensor.read().tolist() == [18] * 6
        counts = rank.tensor([3, -3], "int32")
        assert rank.allreduce(counts, name="i", op=ReduceOp.Sum, prescale=2.0).read().tolist() == [12, -12]
        group = [rank.tensor(np.full(n, rank.rank + 1.0)) for n in (3, 70, 1)]
        made = rank.allreduce(group, name="g", is_group=True, postscale=2.0)
        assert [one.read().tolist() for one in made] == [[3] * 3, [3] * 70, [3]]

    Ranks(way).run(body)


@both_ways
def test_the_other_collectives(way):
    def call(rank, kind, tensor):
        return Submission(kind, tensor, name="x", runtime=rank.runtime)

    def body(rank):
        me = rank.rank
        got = rank.allgather_async(rank.tensor(np.full((me + 1, 2), me), "int16"), name="x").wait(20)
        assert got.read().tolist() == [[0, 0], [1, 1], [1, 1]]
        got = rank.allgather_async(rank.tensor(np.full((2,), me == 0), "bool"), name="same").wait(20)
        assert got.read().tolist() == [True, True, False, False]
        got = rank.broadcast_async(rank.tensor([me, 7 + me]), 1, name="x").wait(20)
        assert got.read().tolist() == [1, 8]
        rows = rank.tensor([10 * me, 10 * me + 1, 10 * me + 2])
        handle = submission.alltoall(call(rank, Collective.ALLTOALL, rows), splits=[1, 2])
        tensor, _ = handle.wait(20)
        assert tensor.read().tolist() == ([0, 10] if me == 0 else [1, 2, 11, 12])
        handle = submission.reducescatter(call(rank, Collective.REDUCESCATTER, rank.tensor([[1, 1], [2, 2], [3, 3.0]])),
                                          op=ReduceOp.Average, prescale_factor=2.0, postscale_factor=1.0)
        assert handle.wait(20).read().tolist() == ([[2, 2], [4, 4]] if me == 0 else [[6, 6]])

    Ranks(way).run(body)


@both_ways
def test_adasum_goes_through_the_host(way, caplog):
    caplog.set_level(logging.INFO, "hvdlite")

    def body(rank):
        got = rank.allreduce(rank.tensor([1.0, 0] if rank.rank else [0, 2.0]), name="a", op=ReduceOp.Adasum)
        assert got.read().tolist() == [1, 2]

    Ranks(way).run(body)
    noted = [one for one in caplog.messages if "go through host memory: over NCCL there is no such thing" in one]
    assert len(noted) == (way == "nccl")


@both_ways
def test_a_producer_that_is_late_and_a_consumer_that_is_early(way):
    """Nobody waits on a thread: the streams do. The producer has written nothing when the call is made, nor when its handle is
    complete; what the consumer enqueues after the wait still finds the result."""
    ranks = Ranks(way)

    def body(rank):
        rank.allreduce(rank.tensor(np.ones(2)), name="first")  # connects
        device = rank.device
        device.users.gate.clear()
        tensor = rank.tensor(np.full(40, rank.rank + 1.0))
        handle = rank.allreduce_async(tensor, name="late", op=ReduceOp.Sum)
        if way == "nccl":
            result = handle.wait(20)  # complete, although nothing has been written
            assert not device.users.is_empty() and not device.communication.is_empty()
            device.users.gate.set()
        else:
            device.users.gate.set()
            result = handle.wait(20)
        assert result.read().tolist() == [3] * 40
        assert tensor.read().tolist() == [rank.rank + 1] * 40

    ranks.run(body)
    for device in ranks.devices:
        names = [what for what, stream in device.done if stream.startswith("user")]
        at = len(names) - 1 - names[::-1].index("wait_for")
        assert "consume" in names[at:], "the consumer's stream waits before it reads"


def test_tensors_live_until_the_stream_has_passed_them_and_not_much_longer():
    ranks = Ranks("nccl", size=1)

    def body(rank):
        device = rank.device
        rank.allreduce(rank.tensor(np.ones(2)), name="first")
        device.communication.gate.clear()
        handle = rank.allreduce_async(rank.tensor(np.ones(50)), name="x")
        handle.wait(20)
        del handle
        rank.allreduce_async(rank.tensor(np.ones(2)), name="y").wait(20)  # whatever the loop polls meanwhile
        assert not device.faults
        device.communication.gate.set()
        device.record().synchronize()
        rank.allreduce(rank.tensor(np.ones(2)), name="z")
        for _ in range(100):
            device.record().synchronize()
            rank.runtime.background.queue.wake()
            if len(device._kept) < 4:
                break
        assert len(device._kept) < 8

    ranks.run(body)


@both_ways
def test_a_rank_that_has_joined_stands_in_with_memory_of_its_own(way):
    def body(rank):
        rank.allreduce(rank.tensor(np.ones(2)), name="all", op=ReduceOp.Sum)
        if rank.rank == 1:
            submission.join(Submission(Collective.JOIN, None, name="j", runtime=rank.runtime)).wait(20)
            return
        got = rank.allreduce(rank.tensor(np.full(3, 5.0)), name="alone", op=ReduceOp.Sum, prescale=2.0)
        assert got.read().tolist() == [10] * 3
        got = rank.allreduce(rank.tensor(np.full(3, 5.0)), name="most", op=ReduceOp.Max)
        assert got.read().tolist() == [5] * 3
        submission.join(Submission(Collective.JOIN, None, name="j", runtime=rank.runtime)).wait(20)

    Ranks(way).run(body)


def test_process_sets_have_communicators_of_their_own_that_go_with_them():
    ranks = Ranks("nccl", size=3)

    def body(rank):
        from hvdlite.process_set import Members

        for number in (1, 2):
            made = submission.change_process_sets(
                Submission(Collective.ADD_PROCESS_SET, None, name=f"add{number}", runtime=rank.runtime), (0, 2)).wait(20)
            assert made == number
            members = Members(number, (0, 2), rank.rank)
            rank.runtime.process_sets[number] = members
            if rank.rank != 1:
                for _ in range(3):
                    got = rank.allreduce(rank.tensor([1.0 + rank.rank]), name="x", op=ReduceOp.Sum, process_set=members)
                    assert got.read().tolist() == [4]
            assert ranks.nccl.num_communicators - 2 * (number - 1) <= 2
            submission.change_process_sets(
                Submission(Collective.REMOVE_PROCESS_SET, None, name=f"remove{number}", runtime=rank.runtime), (number,)).wait(20)

    ranks.run(body)
    assert ranks.nccl.num_communicators == ranks.nccl.num_destroyed == 4


# -- staging ----------------------------------------------------------------------------------------------------------------

def test_segments_overlap_and_their_pinned_memory_is_not_overwritten():
    """Twenty segments through two pieces of pinned memory; a segment's copy is asked for before the one before is combined."""
    from hvdlite.collectives.workspace import Workspace
    from hvdlite.control.local import LocalGroup
    from hvdlite.dataplane.local import LocalPlane
    from hvdlite.message import Key, Request
    from hvdlite.timeline.recorder import NullTimeline

    device, workspace = FakeDevice(), Workspace(NullTimeline())
    values = np.arange(20 * 16 - 3, dtype=np.float32)
    tensor = Tensor(device, values.shape, "float32").write(values, device.stream)
    order = []

    class Plane(LocalPlane):
        def allreduce(self, source, target, op):
            order.append(("combine", sum(what == "copy" and name.startswith("wire") for what, name in device.calls)))
            target[:] = source * 2

    array = DeviceArray(tensor.memory.address, len(values), "float32", tensor)
    request = Request(Key(0, "allreduce", "x"), ("float32",), (values.shape,))
    for _ in range(2):
        staged.in_segments(device, Plane(LocalGroup(1), 0), array, request, workspace, segment_bytes=64)
    device.synchronize()
    assert np.array_equal(view(array.address, len(values), "float32"), 4 * values)
    assert [number for _, number in order[:20]] == [min(20, 2 + i) for i in range(20)]
    assert len(workspace.pinned(device, 128)) == 128 and not device.faults


def test_ranks_without_cupy_take_part_with_what_their_framework_copies(caplog):
    def body(rank):
        for count in (3, 3000):
            got = rank.allreduce(rank.tensor(np.full(count, 1.0 + rank.rank)), name=f"x{count}", op=ReduceOp.Sum)
            assert got.read().tolist() == [3] * count

    ranks = Ranks("nccl", lacks=(1,))
    ranks.run(body)
    assert not ranks.nccl.num_communicators
    said = [one for one in caplog.messages if "NCCL" in one]
    assert said == ["GPU tensors go through host memory and MPI, not over NCCL: rank 1 of the set cannot use it"]


# -- the choice -------------------------------------------------------------------------------------------------------------

def once(rank):
    for name in ("a", "b"):
        assert rank.allreduce(rank.tensor([1.0]), name=name, op=ReduceOp.Sum).read().tolist() == [rank.size]


def test_auto_says_once_what_it_took(caplog):
    caplog.set_level(logging.INFO, "hvdlite")
    Ranks("nccl").run(once)
    assert [one for one in caplog.messages if "GPU tensors" in one] == ["GPU tensors go over NCCL 22105, 2 ranks"]


def test_auto_leaves_ranks_that_share_a_gpu_to_mpi(caplog):
    ranks = Ranks("nccl", indices=[0, 0])
    ranks.run(once)
    assert [one for one in caplog.messages if "GPU tensors" in one] == [
        "GPU tensors go through host memory and MPI, not over NCCL: ranks 0-1 of the set share a GPU"]
    assert not ranks.nccl.num_communicators


def test_an_explicit_choice_lets_nccl_judge_a_shared_gpu():
    ranks = Ranks("nccl", setting="nccl", indices=[0, 0])
    ranks.run(once)
    assert ranks.nccl.num_communicators == 2


def test_an_explicit_choice_without_cupy_raises_at_init_and_names_the_extra():
    with pytest.raises(UnavailableError, match=r"HVDLITE_GPU_PLANE=nccl.*CuPy is not installed.*pip install hvdlite\[gpu\]"):
        Ranks("nccl", size=1, setting="nccl", lacks=(0,)).run(once)


def test_versions_that_differ():
    ranks = Ranks("nccl", setting="nccl", modules=[FakeNccl(22105), FakeNccl(21805)])

    def body(rank):
        with pytest.raises(HorovodInternalError, match="versions differ: rank 0 has 22105, rank 1 has 21805"):
            rank.allreduce(rank.tensor([1.0]), name="a")

    run_and_expect_the_end(ranks, body)


def run_and_expect_the_end(ranks, body):
    """What fails on the background thread ends the job; the streams still come to their end."""
    ranks.run(body)


def test_a_second_gpu_in_one_process_is_refused():
    def body(rank):
        once(rank)
        with pytest.raises(InvalidRequestError, match="a tensor is on GPU 5, but this rank works on GPU 0: use one GPU"):
            rank.allreduce(Tensor(FakeDevice(5), (1,), "float32"), name="c")
        once(rank)

    Ranks("nccl", size=1).run(body)


# -- failures ---------------------------------------------------------------------------------------------------------------

def test_a_failure_of_nccl_ends_the_job_with_its_reason_and_frees_the_streams():
    """NCCL fails behind our backs, with every handle complete: the loop polls, aborts, and later calls are told why."""
    ranks = Ranks("nccl")

    def body(rank):
        once(rank)
        if rank.rank == 0:
            ranks.nccl.inject(6)
        for _ in range(1000):
            if not rank.runtime.is_running:
                break
            rank.device.record(rank.device.user).synchronize()
            rank.runtime.background.join(0.01)
        with pytest.raises(HorovodInternalError, match=r"NCCL failed in a call that was under way.*REMOTE_ERROR"):
            rank.allreduce(rank.tensor([1.0]), name="later")

    ranks.run(body)
    assert ranks.nccl.num_aborted == 2 and not ranks.nccl.num_destroyed


def test_an_abandoned_loop_aborts_what_its_stream_waits_for():
    ranks = Ranks("nccl")

    def body(rank):
        once(rank)
        rank.runtime.background.abandon(TransportError("the job ends"), takeover_s=5)

    ranks.run(body)
    assert ranks.nccl.num_aborted == 2


# -- the quantised exchange -------------------------------------------------------------------------------------------------

SIZES = (0, 1, 513, 33, 1537)


def quantised(rank, tensor, name, compression, op=ReduceOp.Average, is_group=False, **options):
    call = Submission(Collective.ALLREDUCE, tensor, is_group=is_group, name=name, runtime=rank.runtime)
    return compressed_allreduce(call, compression, in_place=False, average=None, op=op, prescale_factor=1.0,
                                postscale_factor=2.0, **options).wait(30)


def gradients(rank, step, dtype):
    values = [np.random.default_rng([rank, step, size]).standard_normal(size).astype(np.float32) for size in SIZES]
    return [from_float(one, dtype) for one in values]


def residuals_of(rank):
    store = rank.runtime.residuals
    return {name: values.copy() for place in store.owners() for name, values, _ in store.items(*place)}


@pytest.mark.parametrize("size, dtype, options", [
    (2, "float32", dict()), (3, "float32", dict(schedule="ring")), (3, "float32", dict(schedule="two_shot")),
    (2, "float16", dict(bits=4, schedule="ring")), (3, "bfloat16", dict(bits=2, schedule="two_shot")),
    (2, "float64", dict(scale="two_means"))])
@both_ways
def test_an_exchange_on_gpus_gives_the_bits_of_the_exchange_on_hosts(way, size, dtype, options, monkeypatch):
    """Results and residuals of several steps. So CPU and GPU ranks would agree: each computes what the other kind does.

    The schedule is given where it matters: hosts measure which is faster. Through hosts messages hold one group each here."""
    monkeypatch.setattr(quantized_device, "STAGED_GROUPS", 1)
    compression = Compression.quantized(**options)

    def body(rank, make, read):
        seen = []
        for step in range(3):
            made = quantised(rank, [make(one) for one in gradients(rank.rank, step, dtype)], "g", compression, is_group=True)
            seen.append([read(one) for one in made])
        return seen, residuals_of(rank)

    ranks = Ranks(way, size=size)
    there = ranks.run(lambda rank: body(rank, lambda one: rank.tensor(one, dtype), lambda one: one.read()))
    as_torch = dtype == "bfloat16"  # which NumPy has not
    here = run_ranks(size, lambda rank: body(
        rank, (lambda one: torch.from_numpy(one.view(np.int16)).view(torch.bfloat16)) if as_torch else np.array,
        (lambda one: one.view(torch.int16).numpy().view(np.uint16)) if as_torch else np.asarray))
    assert ranks.nccl.num_communicators == (size if way == "nccl" else 0)
    for (results, kept), (expected, expected_kept) in zip(there, here, strict=True):
        for step, other in zip(results, expected, strict=True):
            for one, two in zip(step, other, strict=True):
                assert np.array_equal(one, two), (len(one), np.flatnonzero(one != two), one, two)
        assert kept.keys() == expected_kept.keys()
        assert len(kept) == len(SIZES) - 1 and any(one.any() for one in kept.values())
        for name, values in kept.items():
            assert np.array_equal(values.view(np.uint32), expected_kept[name].view(np.uint32)), name


@both_ways
def test_what_is_not_finite_costs_no_residual_on_gpus(way):
    """The step with NaN leaves the residuals as they were; they go on from there."""
    def body(rank):
        values = gradients(rank.rank, 0, "float32")[4]
        quantised(rank, rank.tensor(values), "x", Compression.onebit)
        before = residuals_of(rank)["x"]
        bad = values.copy()
        if rank.rank == 0:
            bad[7] = np.nan
        assert np.isnan(quantised(rank, rank.tensor(bad), "x", Compression.onebit).read()).sum() == 512
        assert np.array_equal(residuals_of(rank)["x"], before) and before.any()
        quantised(rank, rank.tensor(values), "x", Compression.onebit)
        assert not np.array_equal(residuals_of(rank)["x"], before)
        after = residuals_of(rank)["x"]
        rank.runtime.residuals.set_loss_scale(2.0)
        assert np.array_equal(residuals_of(rank)["x"], 2 * after)

    Ranks(way).run(body)


@pytest.mark.parametrize("hosts", [(), (0, 0, 1, 1)])
@pytest.mark.parametrize("way", ["nccl", "mpi", "lacking"])
@pytest.mark.parametrize("is_on_device", [True, False])
def test_second_moments_on_the_device_or_not(way, hosts, is_on_device):
    """In units of them: the bits of the exchange on hosts, whoever holds them where; where a rank lacks CuPy as well."""
    compressor = Compression.quantized(schedule="two_shot").preconditioned_name
    lacks = (1,) if way == "lacking" else ()
    size = max(2, len(hosts))

    def call(rank, tensors, moments):
        made = Submission(Collective.ALLREDUCE, tensors, is_group=True, name="g", runtime=rank.runtime)
        return submission.allreduce(made, in_place=False, average=None, op=ReduceOp.Average, prescale_factor=1.0,
                                    postscale_factor=1.0, compressor=compressor, moments=moments).wait(30)

    def moments_of(step):
        return [one ** 2 for one in gradients(77, step, "float32")]

    def on_device(rank):
        seen = []
        for step in range(2):
            there = [rank.tensor(one) for one in moments_of(step)]
            arrays = [DeviceArray(one.memory.address, one.count, one.dtype, one) for one in there]
            is_here = not is_on_device or rank.rank in lacks
            made = call(rank, [rank.tensor(one) for one in gradients(rank.rank, step, "float32")],
                        tuple(moments_of(step) if is_here else arrays))
            del there, arrays
            seen += [one.read() for one in made]
        assert not residuals_of(rank)
        return seen

    def on_hosts(rank):
        return [np.asarray(one) for step in range(2)
                for one in call(rank, gradients(rank.rank, step, "float32"), tuple(moments_of(step)))]

    config = Config(heartbeat_ms=5, hierarchical_quantized="on" if way == "nccl" else "off")
    ranks = Ranks("mpi" if way == "mpi" else "nccl", size=size, lacks=lacks)
    there, here = ranks.run(on_device, config, hosts), run_ranks(size, on_hosts, config, hosts=hosts)
    for one, other in zip(there, here, strict=True):
        assert all(np.array_equal(got, expected) for got, expected in zip(one, other, strict=True))
    assert ranks.nccl.num_communicators == (size * (3 if hosts else 1) if way == "nccl" else 0)


def test_a_quantised_exchange_waits_for_nothing():
    """The call is complete while the stream stands still, the verdict is asked for when the next step begins."""
    def body(rank):
        values = gradients(rank.rank, 0, "float32")[2]
        quantised(rank, rank.tensor(values), "x", Compression.onebit)
        rank.device.synchronize()
        rank.device.communication.gate.clear()
        got = quantised(rank, rank.tensor(values), "x", Compression.onebit)
        assert not rank.device.communication.is_empty()
        rank.device.communication.gate.set()
        assert np.isfinite(got.read()).all()

    Ranks("nccl").run(body)


def test_a_rank_that_has_joined_sends_its_residual():
    def body(rank):
        values = gradients(rank.rank, 0, "float32")[2]
        quantised(rank, rank.tensor(values), "x", Compression.onebit, op=ReduceOp.Sum)
        before = residuals_of(rank)["x"]
        if rank.rank == 0:
            quantised(rank, rank.tensor(values), "x", Compression.onebit, op=ReduceOp.Sum)
        submission.join(Submission(Collective.JOIN, None, name="j", runtime=rank.runtime)).wait(20)
        assert not np.array_equal(residuals_of(rank)["x"], before)

    Ranks("nccl").run(body)


@pytest.mark.parametrize("size", [1, 2])
def test_one_rank_quantises_nothing(size):
    def body(rank):
        got = quantised(rank, rank.tensor(np.full(600, 1.5)), "x", Compression.onebit, op=ReduceOp.Sum)
        if size == 1:
            assert got.read().tolist() == [3.0] * 600  # postscale 2
        assert residuals_of(rank).keys() == ({"x"} if size > 1 else set())

    Ranks("nccl", size=size).run(body)


def test_kernels_copies_and_wire_of_one_exchange_overlap_through_hosts():
    """Segment s + 1 is encoded, and its copy asked for, before the total of segment s - 1 is."""
    from hvdlite.compression.exchange import ExchangeSpec
    from hvdlite.compression.spec import CodecSpec
    from hvdlite.control.local import LocalGroup
    from hvdlite.dataplane.local import LocalPlane
    from hvdlite.dataplane.quantized import Tensors

    size, group, devices = 6 * 512 * 2, LocalGroup(2), [FakeDevice(rank) for rank in range(2)]
    tensors = [Tensor(device, (size,), "float32").write(np.ones(size), device.stream) for device in devices]

    def body(rank):
        at = np.array([tensors[rank].memory.address])
        none = np.zeros(1, np.int64)
        messages = quantized_device.StagedMessages(LocalPlane(group, rank), devices[rank])
        given = Tensors(("x",), (size,), "float32", 4, at, at, none, none, none)
        known = quantized_device.allreduce(messages, devices[rank], ExchangeSpec(CodecSpec(), "two_shot"), given, 1.0, 1, 2)
        messages.finish()
        assert known().tolist() == [True]

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    order = "".join({"launch": "k", "copy": "w"}[what] for what, stream in devices[0].calls
                    if what == "launch" or (what == "copy" and stream.startswith("wire")))
    # Steps 0 and 1 encode and send a segment; 2 and 3 total another as well; only step 4 decodes one.
    assert order.startswith("kw" * 8 + "kk") and order.count("w") == 12 and order.count("k") == 18
    assert not devices[0].faults and not any(stream.failures for device in devices for stream in device.streams)


@pytest.mark.parametrize("dtype, options, versions", [
    ("float32", dict(schedule="two_shot"), (22105,)), ("float32", dict(bits=4), (22105,)),
    ("float64", dict(schedule="ring"), (22105,)), ("float32", dict(schedule="two_shot"), (22105, 21805)),
    ("float64", dict(bits=2, schedule="ring"), (22105, 21805))])
def test_hosts_of_several_gpus_sum_inside_first(dtype, options, versions, monkeypatch):
    """Four ranks on two hosts: results and residuals are bitwise those of hosts' own; NCCL has planes within and between them, or
    within them only where its versions differ."""
    monkeypatch.setattr(quantized_device, "STAGED_GROUPS", 1)
    compression, hosts = Compression.quantized(**options), (0, 0, 1, 1)

    def body(rank, make, read):
        seen = []
        for step in range(3):
            made = quantised(rank, [make(one) for one in gradients(rank.rank, step, dtype)], "g", compression, is_group=True)
            seen += [read(one) for one in made]
        bad = gradients(rank.rank, 9, dtype)
        if rank.rank == 0:
            bad[4][7] = np.nan
        quantised(rank, [make(one) for one in bad], "g", compression, is_group=True)
        return seen, residuals_of(rank)

    modules = [FakeNccl(one) for one in versions]
    ranks = Ranks("nccl", size=4, modules=[modules[0]] * 2 + [modules[-1]] * 2)
    config = Config(heartbeat_ms=5, hierarchical_quantized="on")
    there = ranks.run(lambda rank: body(rank, lambda one: rank.tensor(one, dtype), lambda one: one.read()), config, hosts)
    here = run_ranks(4, lambda rank: body(rank, np.array, np.asarray), config, hosts=hosts)
    for (results, kept), (expected, expected_kept) in zip(there, here, strict=True):
        assert all(np.array_equal(one, two) for one, two in zip(results, expected, strict=True))
        assert kept.keys() == expected_kept.keys() and any(one.any() for one in kept.values())
        assert all(np.array_equal(values, expected_kept[name]) for name, values in kept.items())
    for one in modules:
        assert one.num_communicators == one.num_destroyed == (4 * 3 if len(modules) == 1 else 2)
