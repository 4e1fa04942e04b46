"""Allreduces over stand-ins of NCCL within hosts, and over the host's plane between them; hosts are played."""

import logging
import threading

import numpy as np
import pytest
from fake_gpu import FakeNccl, NcclError, from_float, to_float
from gpu_ranks import Ranks

from hvdlite import submission
from hvdlite.config import Config
from hvdlite.errors import HorovodInternalError, TransportError
from hvdlite.message import Collective, ReduceOp
from hvdlite.process_set import Members
from hvdlite.submission import Submission

HOSTS = (0, 0, 1, 1)
OPS = (ReduceOp.Sum, ReduceOp.Average, ReduceOp.Min, ReduceOp.Max, ReduceOp.Product)
SIZES = (0, 1, 5, 64, 333)
FUSING = Config(heartbeat_ms=5, cycle_time_ms=20)


class Apart(FakeNccl):
    """NCCL that joins no more than ``most`` ranks: those of a host."""

    def __init__(self, most=2):
        super().__init__()
        within = self.NcclCommunicator

        def connect(size, *arguments):
            if size > most:
                raise NcclError(2)
            return within(size, *arguments)

        self.NcclCommunicator = connect


def values_of(rank, size, dtype, op):
    """Integers that overflow, floats around 1."""
    random = np.random.default_rng([rank, size, int(op)])
    if "float" not in dtype:
        limits = np.iinfo(dtype)
        return random.integers(limits.min, limits.max, size, dtype, endpoint=True)
    return from_float(random.uniform(0.5, 1.5, size).astype(np.float32), dtype)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "int8", "uint8", "int32", "int64"])
def test_every_dtype_and_op_as_over_nccl_alone(dtype):
    """Fused, then each tensor alone; bitwise equal on all ranks, and of integers equal to what NCCL alone makes."""
    is_float = "float" in dtype

    def body(rank):
        seen = {}
        for op in OPS:
            made = [values_of(rank.rank, size, dtype, op) for size in SIZES]
            handles = [rank.allreduce_async(rank.tensor(one, dtype), name=f"{op.name}{len(one)}", op=op) for one in made]
            seen.update({(op, "fused", len(one)): handle.wait(20).read() for one, handle in zip(made, handles, strict=True)})
            factors = dict(prescale=0.5, postscale=3.0) if is_float else {}
            tensor = rank.tensor(made[-1], dtype)
            assert rank.allreduce(tensor, name=f"{op.name} alone", op=op, in_place=True, **factors) is tensor
            seen[op, "alone", 0] = tensor.read()
        return seen

    ranks = Ranks(size=4, hierarchical=True)
    there, flat = ranks.run(body, FUSING, HOSTS), Ranks(size=4).run(body, FUSING, HOSTS)
    assert {"reduceScatter", "reduce", "allGather", "broadcast"} == {kind for _, kind in ranks.nccl.calls}
    error = {"float16": 4e-3, "bfloat16": 3e-2, "float32": 1e-6, "float64": 1e-14}.get(dtype)
    for key, expected in flat[0].items():
        assert all(np.array_equal(one[key], there[0][key]) for one in there), key
        if is_float:
            got, expected = (one.astype(np.float64) if dtype == "float64" else to_float(one, dtype)
                             for one in (there[0][key], expected))
            np.testing.assert_allclose(got, expected, rtol=error, err_msg=str(key))
        else:
            assert np.array_equal(there[0][key], expected), key


def test_many_segments_and_the_calls_of_nccl():
    """More than two pieces of pinned memory; equal shares are one call each way, and a rest of the last rank's two more."""
    sizes = (2 * 2_500_000, 2 * 2_500_000 + 3)

    def body(rank):
        for size in sizes:
            got = rank.allreduce(rank.tensor(np.arange(size) % 1000 + rank.rank), name=str(size), op=ReduceOp.Average)
            assert np.array_equal(got.read(), np.arange(size) % 1000 + 1.5)

    ranks = Ranks(size=4, hierarchical=True)
    ranks.run(body, hosts=HOSTS)
    for place in range(2):
        kinds = [kind for rank, kind in ranks.nccl.calls if rank == place]  # of the ranks of this place in either host
        both = ["reduceScatter", "allGather", "reduceScatter", "reduce", "allGather", "broadcast"]
        assert sorted(kinds) == sorted(2 * both)
    assert ranks.nccl.num_communicators == ranks.nccl.num_destroyed == 4 + 4


def test_what_nccl_does_not_combine_goes_through_host_memory():
    def body(rank):
        assert rank.allreduce(rank.tensor([3, -3], "int32"), name="i", op=ReduceOp.Sum, prescale=2.0).read().tolist() == [24, -24]
        assert rank.allreduce(rank.tensor([3, -3], "int16"), name="s", op=ReduceOp.Average).read().tolist() == [3, -3]
        got = rank.allgather_async(rank.tensor([rank.rank]), name="g").wait(20)
        assert got.read().tolist() == [0, 1, 2, 3]

    for nccl in (FakeNccl(), Apart()):
        Ranks(size=4, hierarchical=True, nccl=nccl).run(body, hosts=HOSTS)


def test_a_rank_that_has_joined_stands_in():
    def body(rank):
        if rank.rank != 1:
            for op, expected in ((ReduceOp.Sum, 30), (ReduceOp.Max, 10), (ReduceOp.Min, 10), (ReduceOp.Product, 1000)):
                for size in (3, 64):
                    got = rank.allreduce(rank.tensor(np.full(size, 5.0)), name=f"{op.name}{size}", op=op, prescale=2.0)
                    assert got.read().tolist() == [expected] * size, op
        submission.join(Submission(Collective.JOIN, None, name="j", runtime=rank.runtime)).wait(20)

    Ranks(size=4, hierarchical=True).run(body, hosts=HOSTS)


def test_process_sets_find_their_own_hosts():
    """Two ranks each of two hosts of three; and one each, which NCCL alone joins."""
    ranks = Ranks(size=6, hierarchical=True)

    def body(rank):
        for number, members in ((1, (0, 1, 3, 4)), (2, (2, 5))):
            call = Submission(Collective.ADD_PROCESS_SET, None, name=f"add{number}", runtime=rank.runtime)
            assert submission.change_process_sets(call, members).wait(20) == number
            made = rank.runtime.process_sets[number] = Members(number, members, rank.rank)
            if rank.rank in members:
                got = rank.allreduce(rank.tensor(np.full(40, 1.0 + rank.rank)), name="x", op=ReduceOp.Sum, process_set=made)
                assert got.read().tolist() == [sum(members) + len(members)] * 40
        for number in (1, 2):
            call = Submission(Collective.REMOVE_PROCESS_SET, None, name=f"remove{number}", runtime=rank.runtime)
            submission.change_process_sets(call, (number,)).wait(20)
        assert rank.allreduce(rank.tensor(np.ones(40)), name="all", op=ReduceOp.Sum).read().tolist() == [6] * 40

    ranks.run(body, hosts=(0, 0, 0, 1, 1, 1))
    assert ranks.nccl.num_communicators == ranks.nccl.num_destroyed == (4 + 4) + 2 + (6 + 6)


# -- the choice -------------------------------------------------------------------------------------------------------------

def once(rank):
    for name in ("a", "b"):
        assert rank.allreduce(rank.tensor(np.ones(40)), name=name, op=ReduceOp.Sum).read().tolist() == [rank.size] * 40


def said(caplog):
    return [one for one in caplog.messages if "GPU tensors" in one]


def test_nccl_joins_hosts_by_itself_unless_asked_otherwise(caplog):
    caplog.set_level(logging.INFO, "hvdlite")
    for hierarchical in (False, True):
        ranks = Ranks(size=4, hierarchical=hierarchical)
        ranks.run(once, hosts=HOSTS)
        assert {kind for _, kind in ranks.nccl.calls} == ({"reduceScatter", "allGather"} if hierarchical else {"allReduce"})
    assert said(caplog) == ["GPU tensors go over NCCL 22105, 4 ranks",
                            "GPU tensors go over NCCL 22105, 4 ranks, dense allreduces over MPI between hosts"]


@pytest.mark.parametrize("size, hosts", [(3, (0, 0, 1)), (2, (0, 1)), (2, ())])
def test_other_hosts_leave_it_to_nccl_alone_and_one_rank_says_so_once(size, hosts, caplog):
    ranks = Ranks(size=size, hierarchical=True)
    ranks.run(once, hosts=hosts)
    assert said(caplog) == [
        f"{size} ranks' allreduces of GPU tensors are not hierarchical, which was asked for: it takes several hosts with equally "
        "many ranks, more than one, and one NCCL in each"]
    assert {kind for _, kind in ranks.nccl.calls} == {"allReduce"}


def test_without_nccl_there_is_no_such_way(caplog):
    Ranks("mpi", size=4, hierarchical=True).run(once, hosts=HOSTS)
    assert said(caplog) == ["4 ranks' allreduces of GPU tensors are not hierarchical, which was asked for: it is switched off"]


def test_hosts_that_nccl_does_not_connect(caplog):
    """It is tried, given up on every rank, and taken within hosts."""
    ranks = Ranks(size=4, nccl=Apart())
    ranks.run(once, hosts=HOSTS)
    (one,) = said(caplog)
    assert "NCCL within hosts and MPI between them, all else through host memory: NCCL does not join the hosts: " in one
    assert "NCCL failed in connecting on GPU 0, rank 0 of 4: NCCL_ERROR_SYSTEM_ERROR" in one
    assert {kind for _, kind in ranks.nccl.calls} == {"reduceScatter", "allGather"}
    assert ranks.nccl.num_communicators == ranks.nccl.num_destroyed == 4


@pytest.mark.parametrize("hosts", [HOSTS, (0, 0, 0, 1), (0, 1, 0, 1)])
def test_versions_that_differ_from_host_to_host(hosts, caplog):
    """A host with two versions, or with another number of ranks, leaves all to host memory."""
    modules = [FakeNccl(22105), FakeNccl(21805)]
    Ranks(size=4, modules=[modules[0]] * 2 + [modules[1]] * 2).run(once, hosts=hosts)
    (one,) = said(caplog)
    assert "versions differ: rank 0 has 22105, rank 1 has 22105, rank 2 has 21805, rank 3 has 21805" in one
    assert ("within hosts" in one) == (hosts == HOSTS) == bool(modules[0].num_communicators)


def test_nccl_that_was_asked_for_and_does_not_connect_is_an_error_on_every_rank():
    def body(rank):
        with pytest.raises(HorovodInternalError, match="NCCL failed in connecting"):
            once(rank)

    Ranks(size=4, nccl=Apart(), setting="nccl", hierarchical=True).run(body, hosts=HOSTS)


def test_a_host_that_does_not_connect_within_is_told_on_every_rank():
    """Only the second host's ranks see NCCL fail; the others would wait for them."""
    modules = [FakeNccl(22105), Apart(most=1)]
    modules[1].version = 21805

    def body(rank):
        with pytest.raises(HorovodInternalError, match=r"NCCL failed in connecting|NCCL does not connect ranks 2-3 of the set"):
            once(rank)

    Ranks(size=4, modules=[modules[0]] * 2 + [modules[1]] * 2).run(body, hosts=HOSTS)
    assert modules[0].num_aborted == 2


# -- failures ---------------------------------------------------------------------------------------------------------------

def watched(rank):
    """An event: the rank waits for NCCL."""
    gpus, waiting = rank.runtime.gpus, threading.Event()
    wait = gpus.wait

    def noted(event):
        waiting.set()
        wait(event)

    gpus.wait = noted
    return waiting


def test_a_failure_of_nccl_ends_the_wait_and_is_told_on_every_rank():
    """Rank 1's stream stands still, so rank 0 waits for NCCL when it fails. What then ends the other host's wait for these two
    is, in a job, hvdrun's word, or MPI's."""
    ranks = Ranks(size=4, hierarchical=True)

    def body(rank):
        once(rank)
        waiting = watched(rank)
        if rank.rank == 1:
            rank.device.communication.gate.clear()
        tensor = rank.tensor(np.ones(40))  # lives until its stream has come to an end
        handle = rank.allreduce_async(tensor, name="x", op=ReduceOp.Sum, in_place=True)
        if rank.rank == 0:
            assert waiting.wait(20)
            ranks.nccl.inject(6)
        with pytest.raises(HorovodInternalError, match=r"NCCL failed in a call that was under way.*REMOTE_ERROR|rank . failed"):
            handle.wait(20)
        if rank.rank < 2:
            rank.device.communication.gate.set()
            rank.runtime._plane.levels()[1]._group.abort(f"rank {rank.rank} failed")

    ranks.run(body, hosts=HOSTS)
    assert ranks.nccl.num_aborted == 8 and not ranks.nccl.num_destroyed


def test_an_abandoned_loop_stops_waiting_for_nccl():
    """Rank 1's stream never goes on: the loops of its host, which wait for NCCL, end with the reason that they are given."""
    ranks, both = Ranks(size=4, hierarchical=True), threading.Barrier(2)

    def body(rank):
        once(rank)
        waiting = watched(rank)
        if rank.rank == 1:
            rank.device.communication.gate.clear()
        tensor = rank.tensor(np.ones(40))  # lives until its stream has come to an end
        handle = rank.allreduce_async(tensor, name="x", op=ReduceOp.Sum, in_place=True)
        if rank.rank < 2:
            assert waiting.wait(20)
            both.wait(20)
            rank.runtime.background.abandon(TransportError("the job ends"), takeover_s=0.2)
            rank.runtime._plane.levels()[1]._group.abort("the job ends")
        with pytest.raises(HorovodInternalError, match="the job ends"):
            handle.wait(20)
        rank.device.communication.gate.set()

    ranks.run(body, hosts=HOSTS)
    assert ranks.nccl.num_aborted == 8
