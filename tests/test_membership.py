"""Process sets and join, with ranks as threads."""

import threading
import time

import numpy as np
import pytest
from ranks import run_ranks

from hvdlite.config import Config
from hvdlite.errors import InvalidRequestError, MismatchError, NotAMemberError, ProcessSetRemovedError
from hvdlite.membership import add_process_set, join, remove_process_set
from hvdlite.message import ReduceOp
from hvdlite.objects import allgather_object, broadcast_object
from hvdlite.process_set import ProcessSet

Sum, Average, Min, Max, Product = ReduceOp.Sum, ReduceOp.Average, ReduceOp.Min, ReduceOp.Max, ReduceOp.Product


def test_a_set_averages_over_its_own_ranks_and_refuses_others():
    def body(rank):
        r, runtime = rank.rank, rank.runtime
        some = add_process_set([2, 0], runtime)
        assert (some.ranks, some.size(), some.included()) == ([0, 2], 2, r != 1)
        if r == 1:
            with pytest.raises(NotAMemberError, match=r"rank 1 is not in process set 1 \(ranks 0, 2\)"):
                rank.allreduce(np.ones(1), process_set=some)
            with pytest.raises(InvalidRequestError, match="not in it"):
                some.rank()
        else:
            assert some.rank() == r // 2
            for _ in range(3):
                assert rank.allreduce(np.array([float(r)]), name="x", process_set=some) == 1.0
                assert rank.allgather_async(np.array([r]), process_set=some).wait(20).tolist() == [0, 2]
                assert rank.broadcast_async(np.array([r]), 2, process_set=some).wait(20).tolist() == [2]
            with pytest.raises(InvalidRequestError, match="root_rank 1 is not in the process set"):
                rank.broadcast_async(np.array([r]), 1, process_set=some)
            assert allgather_object({"r": r}, process_set=some, runtime=runtime) == [{"r": 0}, {"r": 2}]
        with pytest.raises(InvalidRequestError, match=r"ranks 0, 2 exists already \(id 1\)"):
            add_process_set([0, 2], runtime)
        with pytest.raises(InvalidRequestError, match="ranks 0-2 exists already"):
            add_process_set([0, 1, 2], runtime)
        assert rank.allreduce(np.ones(2), name="x", op=Sum).tolist() == [3, 3]
        assert remove_process_set(some, runtime) and some.size() is None and not remove_process_set(some, runtime)
        with pytest.raises(InvalidRequestError, match="not registered"):
            rank.allreduce(np.ones(1), process_set=some)
        again = add_process_set([0, 2], runtime)
        assert again.process_set_id == 2 and (r == 1 or rank.allreduce(np.ones(1), name="x", op=Sum, process_set=again) == 2)

    run_ranks(3, body)


def test_overlapping_sets_in_different_orders():
    def body(rank):
        sets = [add_process_set(ranks, rank.runtime) for ranks in ([0, 1], [1, 2], [0, 2])]
        for _ in range(5):
            order = np.random.default_rng(rank.rank).permutation(3)
            handles = {int(i): rank.allreduce_async(np.full(3, 10.0**i), name="x", op=Sum, process_set=sets[i])
                       for i in order if rank.rank in sets[i].ranks}
            whole = rank.allreduce_async(np.ones(1), name="x", op=Sum)
            assert all(handle.wait(20).tolist() == [2 * 10.0**i] * 3 for i, handle in handles.items())
            assert whole.wait(20) == 3

    run_ranks(3, body)


def test_a_set_works_while_the_others_do_nothing():
    done = threading.Event()

    def body(rank):
        some = add_process_set([0, 1], rank.runtime)
        if rank.rank == 2:
            assert done.wait(20)
        else:
            started = time.perf_counter()
            for _ in range(100):
                assert rank.allreduce(np.ones(1), name="x", op=Sum, process_set=some) == 2
            assert time.perf_counter() - started < 5
            done.set()
        assert rank.allreduce(np.ones(1), op=Sum) == 3

    run_ranks(3, body)


def test_ranks_that_disagree_about_sets_are_told():
    def body(rank):
        with pytest.raises(MismatchError, match=r"ranks of the process set differ: rank 0 has \(0,\), rank 1 has \(0, 1\)"):
            add_process_set([0] if rank.rank == 0 else [0, 1], rank.runtime)
        some = add_process_set([0], rank.runtime)
        with pytest.raises(MismatchError, match="operations differ: rank 0 called remove_process_set"):
            remove_process_set(some, rank.runtime) if rank.rank == 0 else add_process_set([1], rank.runtime)
        with pytest.raises(InvalidRequestError, match="this job has ranks 0 to 1 only"):
            add_process_set([0, 2], rank.runtime)
        assert rank.allreduce(np.ones(1), op=Sum) == 2

    run_ranks(2, body)


@pytest.mark.parametrize("ranks", [[], [0, 0], [-1], 3, ["a"], [True]])
def test_what_is_no_set(ranks):
    with pytest.raises(InvalidRequestError):
        ProcessSet(ranks)


def test_what_is_in_flight_when_its_set_goes_fails():
    def body(rank):
        some = add_process_set([0, 1], rank.runtime)
        handle = rank.allreduce_async(np.ones(1), name="x", process_set=some) if rank.rank == 0 else None
        remove_process_set(some, rank.runtime)
        if handle:
            with pytest.raises(ProcessSetRemovedError, match="allreduce 'x': its process set was removed"):
                handle.wait(20)
        assert rank.allreduce(np.ones(1), name="x", op=Sum) == 3

    run_ranks(3, body)


DTYPES = [np.float32, np.float64, np.float16, np.int32, np.int64, np.uint8, np.int8]


@pytest.mark.parametrize("op, right", [(Sum, 2 * 3), (Min, 3), (Max, 3), (Product, 9)])
@pytest.mark.parametrize("cached", [False, True])
def test_who_has_joined_changes_no_result(op, right, cached):
    def body(rank):
        if cached:
            for dtype in DTYPES:
                rank.allreduce(np.full(3, 3, dtype), name=dtype.__name__, op=op)
        if rank.rank == 1:
            last = join(rank.runtime)
        else:
            for _ in range(2):
                handles = [rank.allreduce_async(np.full(3, 3, dtype), name=dtype.__name__, op=op) for dtype in DTYPES]
                for handle, dtype in zip(handles, DTYPES, strict=True):
                    result = handle.wait(20)
                    assert result.dtype == dtype and result.tolist() == [right] * 3, (dtype, result)
            time.sleep(0.05 * rank.rank)
            last = join(rank.runtime)
        assert last == 2
        assert rank.allreduce(np.ones(1), name="after", op=Sum) == 3

    run_ranks(3, body)


def test_average_divides_by_all_and_scales_are_not_applied_to_who_has_joined():
    def body(rank):
        if rank.rank == 0:
            assert join(rank.runtime) == 1
        else:
            assert rank.allreduce(np.full(2, 3.0), name="a").tolist() == [1.5, 1.5]
            assert rank.allreduce(np.full(2, 3.0), name="p", op=Product, prescale=-2.0).tolist() == [-6, -6]
            assert rank.allreduce(np.full(2, 3, np.float16), name="m", op=Min, prescale=-2.0).tolist() == [-6, -6]
            group = rank.allreduce([np.ones(2), np.ones((2, 2), np.int32)], name="g", op=Sum, is_group=True)
            assert [one.tolist() for one in group] == [[1, 1], [[1, 1], [1, 1]]]
            assert join(rank.runtime) == 1

    run_ranks(2, body)


@pytest.mark.parametrize("rounds", [1, 2])
def test_a_joined_rank_s_own_call_is_scaled_where_it_travels_with_one_it_lacks(rounds):
    def body(rank):
        for _ in range(rounds):  # agreed by reports the first time, then from the cache
            names = ("b",) if rank.rank else ("a", "b")
            handles = [rank.allreduce_async(np.ones(3), name=name, op=Sum, prescale=10.0) for name in names]
            if rank.rank:
                join(runtime=rank.runtime)
            right = [20] if rank.rank else [10, 20]
            assert [handle.wait(20)[0] for handle in handles] == right
            if not rank.rank:
                join(runtime=rank.runtime)

    run_ranks(2, body, Config(heartbeat_ms=5, cycle_time_ms=50))


def test_a_set_that_is_removed_while_a_thread_uses_it():
    def body(rank):
        for _ in range(20):
            some, wrong = add_process_set([0], rank.runtime), []

            def use(some=some, wrong=wrong):
                try:
                    for index in range(10_000):
                        rank.allreduce_async(np.ones(2), name=f"x{index}", process_set=some)
                except InvalidRequestError as error:
                    if "not registered" not in str(error):
                        wrong.append(error)

            thread = threading.Thread(target=use)
            if rank.rank == 0:
                thread.start()
            assert remove_process_set(some, rank.runtime)
            if rank.rank == 0:
                thread.join(20)
            assert not wrong

    run_ranks(2, body)


@pytest.mark.parametrize("cached", [False, True])
def test_other_operations_fail_at_once_when_a_rank_has_joined(cached):
    def body(rank):
        if cached:
            rank.allgather_async(np.ones(2)).wait(20)
        if rank.rank == 1:
            join(rank.runtime)
        else:
            started = time.perf_counter()
            with pytest.raises(MismatchError, match=r"allgather .*rank 1 called join\(\)"):
                rank.allgather_async(np.ones(2)).wait(20)
            with pytest.raises(MismatchError, match=r"broadcast 'b': rank 1 called join\(\)"):
                rank.broadcast_async(np.ones(2), 0, name="b").wait(20)
            assert time.perf_counter() - started < 1
            join(rank.runtime)
        assert rank.allgather_async(np.array([rank.rank])).wait(20).tolist() == [0, 1, 2]

    run_ranks(3, body)


def test_objects():
    def body(rank):
        for name in (None, "o"):
            for pad in (lambda r: "x" * 10**r, lambda r: None, lambda r: lambda: r):
                got = allgather_object({"r": rank.rank, "pad": pad(rank.rank)}, name, runtime=rank.runtime)
                assert [one["r"] for one in got] == [0, 1, 2] and len(got) == 3
            root = 2 if name else 0
            assert broadcast_object([rank.rank, "y" * 5000], root, name, runtime=rank.runtime) == [root, "y" * 5000]
        with pytest.raises(TypeError):
            broadcast_object(threading.Lock(), rank.rank, runtime=rank.runtime)

    run_ranks(3, body)
