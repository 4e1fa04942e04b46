"""What hvdlite.torch offers, its start and end, process sets given at the start, and the timeline a script switches on."""

import json

import pytest
import torch
from mpi4py import MPI

import hvdlite.torch as hvd

RANKS = (3,)

#: What horovod.torch of Horovod 0.28 exports.
EXPORTED = [
    "elastic", "Compression", "allgather_object", "broadcast_object", "broadcast_optimizer_state",
    "broadcast_parameters", "allreduce", "allreduce_", "allreduce_async", "allreduce_async_", "grouped_allreduce",
    "grouped_allreduce_", "grouped_allreduce_async", "grouped_allreduce_async_", "sparse_allreduce_async", "allgather",
    "allgather_async", "grouped_allgather", "grouped_allgather_async", "broadcast", "broadcast_", "broadcast_async",
    "broadcast_async_", "alltoall", "alltoall_async", "reducescatter", "reducescatter_async", "grouped_reducescatter",
    "grouped_reducescatter_async", "join", "barrier", "poll", "synchronize", "init", "shutdown", "is_initialized",
    "start_timeline", "stop_timeline", "size", "local_size", "cross_size", "rank", "local_rank", "cross_rank",
    "mpi_threads_supported", "mpi_enabled", "mpi_built", "gloo_enabled", "gloo_built", "nccl_built", "ddl_built",
    "ccl_built", "cuda_built", "rocm_built", "ProcessSet", "global_process_set", "add_process_set",
    "remove_process_set", "Average", "Sum", "Adasum", "Min", "Max", "Product", "HorovodInternalError",
    "DistributedOptimizer", "SyncBatchNorm"]


@pytest.fixture
def stopped(job):
    """The runtime is down; whatever the test starts is ended, and the file's job started again."""
    hvd.shutdown()
    yield
    MPI.COMM_WORLD.Barrier()  # who is outside of a set must not end the job while others use it
    hvd.shutdown()
    hvd.init()


def total(**settings):
    return hvd.allreduce(torch.tensor([hvd.rank() + 1.0]), op=hvd.Sum, **settings).item()


def test_every_name_that_horovod_exports_is_there():
    assert not [name for name in EXPORTED if getattr(hvd, name, None) is None]
    assert set(EXPORTED) <= set(hvd.__all__) and hvd.__all__ == sorted(hvd.__all__)
    assert [int(op) for op in (hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product)] == list(range(6))
    for name in ("is_homogeneous", "handle_average_backwards_compatibility", "synchronize", "poll", "allreduce"):
        assert callable(getattr(hvd.mpi_ops, name))


def check_probes():
    assert hvd.mpi_built() is True and hvd.mpi_enabled() is True
    assert [probe() for probe in (hvd.gloo_built, hvd.gloo_enabled, hvd.ddl_built, hvd.ccl_built)] == [False] * 4
    assert type(hvd.nccl_built()) is int and type(hvd.cuda_built()) is bool and type(hvd.rocm_built()) is bool


def test_questions_before_init(stopped):
    assert not hvd.is_initialized()
    check_probes()
    for ask in (hvd.rank, hvd.size, hvd.local_rank, hvd.local_size, hvd.cross_rank, hvd.cross_size, hvd.mpi_threads_supported,
                hvd.is_homogeneous, hvd.stop_timeline, hvd.join, hvd.barrier, lambda: hvd.start_timeline("none"),
                lambda: hvd.add_process_set([0]), lambda: hvd.allreduce(torch.ones(1)), lambda: hvd.broadcast_object(1)):
        for kind in (ValueError, hvd.HorovodInternalError):
            with pytest.raises(kind, match=r"init\(\)"):
                ask()
    assert hvd.global_process_set.size() is None
    hvd.init()
    check_probes()
    assert hvd.is_initialized() and isinstance(hvd.mpi_threads_supported(), bool) and hvd.is_homogeneous()
    assert hvd.global_process_set.process_set_id == 0 and hvd.global_process_set.ranks == [0, 1, 2]
    assert (hvd.rank(), hvd.size()) == (MPI.COMM_WORLD.Get_rank(), 3)


def test_init_and_shutdown_again_and_again(stopped):
    w = torch.nn.Parameter(torch.zeros(2))
    optimizer = None
    for round_ in range(1, 4):
        hvd.init()
        hvd.init()
        assert total(name="x") == 6
        optimizer = optimizer or hvd.DistributedOptimizer(torch.optim.SGD([w], lr=1.0), [("w", w)])
        ((hvd.rank() + 1) * w).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert w.tolist() == [-2 * round_] * 2
        hvd.shutdown()
        hvd.shutdown()
        with pytest.raises(ValueError, match=r"init\(\)"):
            hvd.allreduce(torch.ones(1))
        assert MPI.COMM_WORLD.allreduce(1) == 3


def test_process_sets_given_to_init(stopped):
    r = MPI.COMM_WORLD.Get_rank()
    split = MPI.COMM_WORLD.Split(color=r % 2, key=r)
    by_comm, by_ranks = hvd.ProcessSet(split), hvd.ProcessSet([2, 1])
    assert by_comm.process_set_id is None and by_comm.size() is None and by_ranks.rank() is None
    hvd.init(process_sets=[by_comm, by_ranks])
    assert by_comm.ranks == ([0, 2], [1])[r % 2] and by_comm.mpi_comm is split and by_comm.included()
    assert by_ranks.ranks == [1, 2] and by_ranks.included() is (r > 0) and by_ranks.size() == 2
    ids = hvd.allgather_object((by_comm.process_set_id, by_ranks.process_set_id))
    assert ids[0] == ids[2] and ids[0][0] != ids[1][0] and len({one for _, one in ids}) == 1
    assert total(name="x", process_set=by_comm) == (4, 2)[r % 2]
    if r:
        assert total(name="x", process_set=by_ranks) == 5 and by_ranks.rank() == r - 1
    with pytest.raises(ValueError, match="exists already"):
        hvd.add_process_set([0, 2])
    with pytest.raises(NotImplementedError, match="communicator"):
        hvd.add_process_set(hvd.ProcessSet(split))
    assert hvd.remove_process_set(by_ranks) and by_ranks.size() is None and total(process_set=by_comm) == (4, 2)[r % 2]


def duplicates():
    r = MPI.COMM_WORLD.Get_rank()
    split, world = MPI.COMM_WORLD.Split(color=r % 2, key=r), MPI.COMM_WORLD.Dup()
    return {
        "ranks": [[0, 1], [1, 0]], "communicators": [split, split.Dup()], "a communicator and ranks": [split, [0, 2]],
        "all ranks": [[0, 1, 2]], "a communicator of all": [[0], world]}


def test_sets_given_to_init_twice_are_refused_on_every_rank(stopped):
    for what, given in duplicates().items():
        with pytest.raises(ValueError, match="listed twice, or the set of all"):
            hvd.init(process_sets=[hvd.ProcessSet(one) for one in given])
        assert hvd.is_initialized() and total(name="x") == 6, what
    good = hvd.ProcessSet([0, 1])
    hvd.init(process_sets=[good])
    assert good.size() == 2 and (hvd.rank() == 2 or total(name="x", process_set=good) == 3)
    for wrong in ([[0, 1]], "static"):
        with pytest.raises(ValueError, match=r"init\(process_sets="):
            hvd.init(process_sets=wrong)
    hvd.init(process_sets="dynamic")


def test_init_again_with_the_same_sets_keeps_them(stopped):
    some = hvd.ProcessSet([0, 1])
    hvd.init(process_sets=[some])
    number = some.process_set_id
    hvd.init(process_sets=[some])
    assert some.process_set_id == number and (hvd.rank() == 2 or total(name="x", process_set=some) == 3)
    hvd.barrier()
    hvd.shutdown()
    hvd.init()
    assert hvd.add_process_set(some) is some and (hvd.rank() == 2 or total(name="x", process_set=some) == 3)


def test_sets_end_with_the_runtime(stopped):
    hvd.init()
    old = hvd.add_process_set([0, 1])
    hvd.shutdown()
    hvd.init()
    with pytest.raises(ValueError, match="not registered"):
        hvd.allreduce(torch.ones(1), process_set=old)
    new = hvd.add_process_set([0, 1])
    assert hvd.rank() == 2 or total(process_set=new) == 3
    again = hvd.ProcessSet([1, 2])
    for _ in range(2):
        hvd.barrier()
        hvd.shutdown()
        hvd.init(process_sets=[again])
        assert hvd.rank() == 0 or total(process_set=again) == 5


def test_a_job_of_some_ranks(stopped):
    r = MPI.COMM_WORLD.Get_rank()
    pair, alone = MPI.COMM_WORLD.Split(color=r == 2, key=-r), [[0, 1], [0, 1], [2]][r]
    for comm, right in [(pair, [1, 0, 0][r]), (alone, [0, 1, 0][r])]:
        hvd.init(comm)
        assert (hvd.rank(), hvd.size()) == (right, 2 if r < 2 else 1)
        assert hvd.allgather_object(r) == ([2] if r == 2 else [1, 0] if comm is pair else [0, 1])
        hvd.shutdown()
    for wrong in ([r, r], [9], "all", [(r + 1) % 3]):
        with pytest.raises(ValueError, match=r"init\(comm="):
            hvd.init(wrong)
    assert not hvd.is_initialized()


@pytest.mark.parametrize("mark_cycles", [True, False])
def test_a_timeline_of_a_part_of_the_run(mark_cycles, tmp_path):
    paths = [tmp_path / name for name in ("first.json", "second.json")]
    for path in paths:
        hvd.start_timeline(str(path), mark_cycles=mark_cycles)
        hvd.start_timeline(str(path), mark_cycles=mark_cycles)
        for _ in range(2):
            hvd.allreduce(torch.arange(3.0), name=f"during.{path.stem}")
        if hvd.rank() == 0:
            json.loads(path.read_text())
        hvd.stop_timeline()
        hvd.stop_timeline()
        hvd.allreduce(torch.ones(2), name="afterwards")
    assert hvd.rank() == 0 or not any(path.exists() for path in paths)
    for path in paths if hvd.rank() == 0 else ():
        events = json.loads(path.read_text())
        names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name" and event["pid"]}
        assert f"allreduce.during.{path.stem}" in names.values() and "allreduce.afterwards" not in names.values()
        own = [event["name"] for event in events if names.get(event["pid"]) == f"allreduce.during.{path.stem}"]
        assert own.count("ALLREDUCE") == own.count("NEGOTIATE_ALLREDUCE") == 2
        assert any(event["name"] == "CYCLE_START" for event in events) is mark_cycles
        assert "start_time_since_epoch_in_micros" in events[0]["args"]
