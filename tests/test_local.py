"""The runtime above the transport, with ranks as threads: results, errors, order, steady state, the end."""

import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from ranks import Rank, run_ranks

from hvdlite import adapters, background
from hvdlite.collectives import allreduce
from hvdlite.config import Config
from hvdlite.control import base as control
from hvdlite.control.local import LocalGroup
from hvdlite.dataplane.halves import SEGMENT_ELEMENTS
from hvdlite.errors import (
    DuplicateNameError,
    InternalError,
    InvalidRequestError,
    MismatchError,
    NotInitializedError,
    PeerFailedError,
    StalledError,
    TransportError,
    WaitTimeoutError,
)
from hvdlite.handle import Handle
from hvdlite.message import Key, ReduceOp, Request
from hvdlite.optimizer import GradientExchange, GradientSpec
from hvdlite.runtime import Runtime
from hvdlite.tensor_queue import TensorEntry

FAST = Config(heartbeat_ms=5)


def works(rank):
    """The runtime still does its job."""
    assert rank.allreduce(np.ones(3, np.float32), name="after", op=ReduceOp.Sum).tolist() == [rank.size] * 3


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_many_tensors_of_all_dtypes_fuse_to_the_right_values(size):
    dtypes = [np.uint8, np.int64, np.float16, np.float32, np.float64, np.int8, np.int16, np.int32]
    counts = [1, 7, 8, 9, 63, 64, 65, 300, 0]

    def value(i, rank):
        # Halves of halves: their sum would show if bits were taken for values.
        scale = 0.5 if dtypes[i % len(dtypes)] is np.float16 else 1
        return (np.random.default_rng([i, rank]).integers(0, 9, counts[i % len(counts)]) * scale).astype(dtypes[i % len(dtypes)])

    def body(rank):
        handles = [rank.allreduce_async(value(i, rank.rank), name=f"t{i}", op=ReduceOp.Sum) for i in range(40)]
        for i, handle in enumerate(handles):
            expected = sum(value(i, other).astype(np.float64) for other in range(size)).astype(dtypes[i % len(dtypes)])
            assert np.array_equal(handle.wait(20), expected), i

    for threshold in (0, 64, 1000, 1 << 22):
        run_ranks(size, body, Config(heartbeat_ms=5, fusion_threshold_bytes=threshold))


@pytest.mark.parametrize(
    "size, count", [(2, 2 * SEGMENT_ELEMENTS + 1), (3, 10 * SEGMENT_ELEMENTS - 1), (4, 28 * SEGMENT_ELEMENTS)])
@pytest.mark.parametrize("in_place", [False, True])
def test_long_float16_sums_are_float32_sums_in_the_order_of_ranks(size, count, in_place):
    values = [np.random.default_rng([rank, count]).standard_normal(count).astype(np.float16) for rank in range(size)]
    expected = np.zeros(count, np.float32)
    for one in values:
        expected += one

    def body(rank):
        return rank.allreduce_async(values[rank.rank].copy(), name="long", op=ReduceOp.Sum, in_place=in_place).wait(20)

    for result in run_ranks(size, body, FAST):
        assert np.array_equal(result.view(np.uint16), expected.astype(np.float16).view(np.uint16))


def test_different_orders_and_threads():
    names = [f"n{i}" for i in range(50)]

    def body(rank):
        order = np.random.default_rng(rank.rank).permutation(50)
        results = {}

        def submit(part):
            handles = [(i, rank.allreduce_async(np.full(i + 1, i + rank.rank, np.float64), name=names[i], op=ReduceOp.Sum))
                       for i in part]
            results.update({i: handle.wait(20) for i, handle in handles})

        threads = [threading.Thread(target=submit, args=(part,)) for part in np.array_split(order, 3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert all(np.array_equal(results[i], np.full(i + 1, 3 * i + 3)) for i in range(50))

    run_ranks(3, body)


def test_steady_state_is_one_collective_a_cycle_and_no_planning():
    def body(rank):
        def once():
            handles = [rank.allreduce_async([np.ones(5, np.float32)] * 3, name=f"g{i}", is_group=True) for i in range(4)]
            for handle in handles:
                handle.wait(20)

        for _ in range(30):
            once()
        background = rank.runtime.background
        before = background._control.num_collectives, background.num_cycles, background.slots.compilations, len(background.slots)
        for _ in range(100):
            once()
        after = background._control.num_collectives, background.num_cycles, background.slots.compilations, len(background.slots)
        assert after[0] - before[0] == after[1] - before[1]  # nothing but one agreement per cycle
        assert after[3] == before[3] == 4
        # At most the subsets of four slots that timing can make ready together: none is compiled twice.
        assert after[2] <= 15

    run_ranks(2, body)


def test_alternating_shapes_after_caching():
    def body(rank):
        for shape in (3, 3, 5, 3, 5, 5, 3):
            assert rank.allreduce(np.ones(shape), name="x", op=ReduceOp.Sum).tolist() == [2.0] * shape
        started = time.monotonic()
        for _ in range(3):
            with pytest.raises(MismatchError, match=r"allreduce 'x': shapes differ: rank 0 has \(1,\), rank 1 has \(2,\)"):
                rank.allreduce(np.ones(1 + rank.rank), name="x")
        assert time.monotonic() - started < 1.0
        works(rank)

    run_ranks(2, body)


@pytest.mark.parametrize("calls", [
    [dict(op=ReduceOp.Sum), dict(op=ReduceOp.Max)], [dict(prescale=1.0), dict(prescale=2.0)],
    [dict(tensor=np.ones(2, np.float32)), dict(tensor=np.ones(2, np.float64))],
    [dict(tensor=np.ones((2, 3))), dict(tensor=np.ones((3, 2)))],
])
def test_disagreement_is_the_same_error_on_every_rank(calls):
    def body(rank):
        arguments = {"tensor": np.ones(2), **calls[rank.rank]}
        with pytest.raises(MismatchError) as caught:
            rank.allreduce(arguments.pop("tensor"), name="same", **arguments)
        works(rank)
        return str(caught.value)

    texts = run_ranks(2, body)
    assert texts[0] == texts[1] and "'same'" in texts[0]


def test_one_name_for_two_collectives():
    def body(rank):
        call = rank.allreduce_async if rank.rank else rank.allgather_async
        with pytest.raises(MismatchError, match="operations differ"):
            call(np.ones(2), name="x").wait(10)
        works(rank)

    run_ranks(2, body)


def test_wrong_calls_raise_at_the_call_and_submit_nothing():
    def body(rank):
        one = np.ones(2)
        for says, call in [
            ("op and average", lambda: rank.allreduce(one, name="a", op=ReduceOp.Sum, average=True)),
            ("bool", lambda: rank.allreduce(np.ones(2, bool), name="a")),
            ("complex128", lambda: rank.allreduce(np.ones(2, complex), name="a")),
            ("object", lambda: rank.allreduce(np.array([object()]), name="a")),
            ("is no tensor", lambda: rank.allreduce(object(), name="a")),
            ("root_rank 9", lambda: rank.broadcast_async(one, 9, name="a")),
            ("no dimension", lambda: rank.allgather_async(np.float32(1), name="a")),
            ("group is empty", lambda: rank.allreduce([], name="a", is_group=True)),
            ("read-only", lambda: rank.allreduce(np.broadcast_to(one, (2, 2)), name="a", in_place=True)),
            ("op 9", lambda: rank.allreduce(one, name="a", op=9)),
        ]:
            with pytest.raises(InvalidRequestError, match=says) as caught:
                call()
            assert "'a'" in str(caught.value), caught.value
        assert rank.allreduce(one, name="a").tolist() == [1.0, 1.0]

    run_ranks(2, body)


def test_a_name_twice_in_flight_is_refused_and_the_first_call_goes_on():
    gate = threading.Event()

    def body(rank):
        if rank.rank == 0:
            first = rank.allreduce_async(np.ones(2), name="x", op=ReduceOp.Sum)
            with pytest.raises(DuplicateNameError, match=r"allreduce 'x'.*in flight"):
                rank.allreduce_async(np.ones(2), name="x")
            with pytest.raises(WaitTimeoutError):
                first.wait(0.01)
            assert not first.done()
            gate.set()
        else:
            gate.wait(20)
            first = rank.allreduce_async(np.ones(2), name="x", op=ReduceOp.Sum)
        assert first.wait(20).tolist() == [2.0, 2.0] and first.done()
        assert rank.allreduce(np.ones(1), name="x", op=ReduceOp.Sum).tolist() == [2.0]

    run_ranks(2, body)


def test_unnamed_calls_keep_few_names():
    def body(rank):
        handles = [rank.allreduce_async(np.full(2, i, np.float32), op=ReduceOp.Sum) for i in range(700)]
        for i, handle in enumerate(handles):
            assert handle.wait(20).tolist() == [2.0 * i] * 2
        assert len(rank.runtime.background.slots) <= 256

    run_ranks(2, body)


def test_many_names_with_a_small_cache_stay_bounded():
    def body(rank):
        for i in range(600):
            assert rank.allreduce(np.ones(1), name=f"n{i}", op=ReduceOp.Sum) == 2.0
        assert len(rank.runtime.background.slots) <= 16 + 2
        assert len(rank.runtime.background.slots.requests) <= 16 + 2

    run_ranks(2, body, Config(heartbeat_ms=5, cache_capacity=16))


@pytest.mark.parametrize("name", [lambda i: None, lambda i: f"n{i % 100}", lambda i: f"n{i}"],
                         ids=["unnamed", "named", "ever new"])
def test_memory_and_slots_stay_flat_over_100_000_calls(name):
    def memory():
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def body(rank):
        one = np.ones(1, np.float32)
        for i in range(100_000):
            rank.allreduce(one, name=name(i))
            if i == 30_000:
                before = memory()
        assert memory() - before < 2 << 20
        background = rank.runtime.background
        assert len(background.slots) <= 1025 and len(background.slots.requests) <= 1026
        assert len(rank.runtime._requests) <= 4096 and not background._pending

    run_ranks(1, body, timeout_s=120)


class Elsewhere(np.ndarray):
    """Pretends to be on a GPU."""


class ElsewhereAdapter:
    gpu_of = None

    @staticmethod
    def small_copy(tensor):
        return None

    @staticmethod
    def buffer(tensor, writable):
        made = adapters.numpy.buffer(np.asarray(tensor), writable)
        made.device = "cuda"
        return made

    @staticmethod
    def empty(shape, dtype, like):
        return ElsewhereAdapter.buffer(np.empty(shape, dtype), True)


def test_mixed_devices(monkeypatch):
    monkeypatch.setitem(adapters._known, Elsewhere, ElsewhereAdapter)

    def body(rank):
        here, there = np.ones(3), np.ones(3).view(Elsewhere)
        with pytest.raises(InvalidRequestError, match="'a': its tensors are on cpu and cuda: put them all on one device"):
            rank.allreduce([here, there], name="a", is_group=True)
        with pytest.raises(MismatchError, match="'b': devices differ: rank 0 has cpu, rank 1 has cuda"):
            rank.allreduce([here, there][rank.rank], name="b")
        assert rank.allreduce(here, name="a").tolist() == [1, 1, 1]

    run_ranks(2, body)


@pytest.mark.parametrize("capacity", [0, 50, 5000])
def test_a_thousand_names_at_once(capacity):
    def body(rank):
        for _ in range(3):
            handles = [rank.allreduce_async(np.full(1 + i % 3, i), name=f"n{i}", op=ReduceOp.Sum) for i in range(1000)]
            assert all(handle.wait(30)[0] == 2 * i for i, handle in enumerate(handles))

    run_ranks(2, body, Config(heartbeat_ms=5, cache_capacity=capacity))


def test_a_rank_that_leaves_fails_what_others_wait_for():
    def body(rank):
        works(rank)
        if rank.rank == 1:
            rank.runtime.background.leave("RuntimeError: boom", failed=True)
            rank.runtime.background.join(10)
        else:
            with pytest.raises(PeerFailedError, match="rank 1 failed: RuntimeError: boom"):
                rank.allreduce(np.ones(1), name="waits")
        with pytest.raises(NotInitializedError, match=r"rank 1 failed: RuntimeError: boom\n.*init"):
            rank.allreduce(np.ones(1), name="later")

    run_ranks(3, body)


def test_shutdown_with_a_call_outstanding():
    def body(rank):
        works(rank)
        if rank.rank == 0:
            handle = rank.allreduce_async(np.ones(1), name="never")
            with pytest.raises(PeerFailedError, match=r"rank 1 left"):
                handle.wait(20)
        else:
            rank.runtime.background.leave("shutdown() was called", failed=False)

    run_ranks(2, body)


def test_stall_ends_the_job_and_names_tensor_and_rank(caplog):
    release = threading.Event()

    def body(rank):
        for _ in range(3):
            rank.allreduce(np.ones(1), name="a")
        if rank.rank == 2:
            release.wait(30)
            return
        with pytest.raises(StalledError, match=r"rank 2 did not submit allreduce 'a'"):
            rank.allreduce(np.ones(1), name="a")
        release.set()

    run_ranks(3, body, Config(heartbeat_ms=5, stall_warning_s=0.5, stall_shutdown_s=1.5))
    warnings = [record.getMessage() for record in caplog.records if "did not submit" in record.getMessage()]
    assert warnings and "rank 2" in warnings[0] and "'a'" in warnings[0]


def test_a_late_rank_still_gets_the_right_sum():
    def body(rank):
        rank.allreduce(np.ones(1), name="a")
        if rank.rank == 1:
            threading.Event().wait(1.0)
        assert rank.allreduce(np.ones(1), name="a", op=ReduceOp.Sum)[0] == 2.0

    run_ranks(2, body, Config(heartbeat_ms=5, stall_warning_s=0.3))


@pytest.mark.parametrize("value", [np.array([-3, 3, -4, 0]), np.array([2**60 + 1] * 4)])
def test_integer_average_truncates_toward_zero_exactly(value):
    other = np.array([-4, 4, -3, 1]) if value[0] == -3 else value

    def body(rank):
        for dtype in (np.int64, np.int32) if value[0] == -3 else (np.int64,):
            got = rank.allreduce((value if rank.rank == 0 else other).astype(dtype), name=f"i{dtype}")
            assert got.dtype == dtype
            assert got.tolist() == ([-3, 3, -3, 0] if value[0] == -3 else [2**60 + 1] * 4)

    run_ranks(2, body)


def test_strided_arrays_in_and_in_place():
    def body(rank):
        base = np.arange(12.0).reshape(4, 3) + 100 * rank.rank
        assert np.array_equal(rank.allreduce(base.T, name="t", op=ReduceOp.Sum), 2 * np.arange(12.0).reshape(4, 3).T + 100)
        column = base[:, 0]
        assert rank.allreduce(column, name="c", op=ReduceOp.Sum, in_place=True) is column
        assert base[:, 0].tolist() == [100, 106, 112, 118]
        assert base[:, 1].tolist() == [1 + 100 * rank.rank + 3 * i for i in range(4)]

    run_ranks(2, body)


def test_results_do_not_change_later_and_inputs_stay():
    def body(rank):
        inputs = [np.full(10, i, np.float32) for i in range(20)]
        handles = [rank.allreduce_async(x, name=f"{i}", op=ReduceOp.Sum) for i, x in enumerate(inputs)]
        first = [handle.wait(20) for handle in handles]
        for i in range(20):
            rank.allreduce(np.full(10, 99, np.float32), name=f"{i}", op=ReduceOp.Sum)
        assert all(np.array_equal(one, np.full(10, 2 * i)) for i, one in enumerate(first))
        assert all(np.array_equal(one, np.full(10, i)) for i, one in enumerate(inputs))

    run_ranks(2, body)


def test_stepping_cycles_by_hand():
    """No thread, no time: one rank, one call, one cycle."""
    runtime = Runtime.local(LocalGroup(1), 0, FAST)
    handle = Rank(runtime).allreduce_async(np.arange(3.0), name="x")
    assert not handle.done()
    assert runtime.background.run_cycle()
    assert handle.done() and handle.wait().tolist() == [0.0, 1.0, 2.0]
    assert not runtime.background.run_cycle()


@pytest.mark.parametrize("op", [ReduceOp.Min, ReduceOp.Max])
def test_minimum_and_maximum_let_nan_through(op):
    def body(rank):
        values = np.array([rank.rank, -rank.rank, 5.0])
        if rank.rank == 1:
            values[2] = np.nan
        result = rank.allreduce(values, op=op)
        assert result[:2].tolist() == ([0, -2] if op is ReduceOp.Min else [2, 0]) and np.isnan(result[2])

    run_ranks(3, body)


def test_a_result_that_cannot_be_handed_over_fails_its_own_call_only():
    def body(rank):
        target = np.ones((4, 4))[:, ::2]
        handle = rank.allreduce_async(target, name="x", op=ReduceOp.Sum, in_place=True)
        target.flags.writeable = rank.rank == 0
        together.wait(20)
        if rank.rank == 0:
            assert handle.wait(20).tolist() == [[2, 2]] * 4
        else:
            with pytest.raises(InternalError, match=r"'x'.*handed over"):
                handle.wait(20)
        works(rank)

    together = threading.Barrier(2)
    run_ranks(2, body, Config(heartbeat_ms=5, cycle_time_ms=200))


def test_an_error_in_negotiation_reaches_every_rank(monkeypatch):
    def broken(*_, **__):
        raise KeyError("no such thing")

    def body(rank):
        works(rank)
        together.wait(20)
        monkeypatch.setattr(background, "negotiate", broken)
        together.wait(20)
        with pytest.raises(StalledError, match=r"negotiation on rank 0 failed: KeyError: 'no such thing'"):
            rank.allreduce(np.ones(2), name="new")

    together = threading.Barrier(2)
    run_ranks(2, body)


def test_a_bucket_never_spans_kinds_of_devices():
    def body(rank):
        specs = [GradientSpec(f"w{index}", 8, kind) for index, kind in enumerate(["cpu", "cuda", "cuda", "cpu"])]
        exchange = GradientExchange(specs, label="g", in_place=True, runtime=rank.runtime)
        assert sorted(map(sorted, exchange._buckets)) == [[0, 3], [1, 2]]

    run_ranks(1, body)


def test_a_call_that_was_handed_over_fails_with_the_job():
    """Its caller waits; until it is taken over it is in no list of the background thread's."""
    class Begun:
        begun = control.Begun.AGREEING

        def take_over(self, queue):
            return queue.adopt(7)

    for is_adopted in (False, True):
        loop = Runtime.local(LocalGroup(1), 0).background
        loop._fast_path, loop._thread = Begun(), threading.current_thread()
        key = Key(0, "allreduce", "left")
        entry = TensorEntry(Request(key, ("float32",), ((1,),)), (), (), Handle(key), lambda entry: None)
        assert loop.queue.offer(7, entry)
        if is_adopted:
            loop._pending[key] = loop.queue.adopt(7)
        loop._end(TransportError("the link is gone"))
        with pytest.raises(TransportError, match="link is gone"):
            entry.handle.wait(1)
        assert not loop.queue._offers and not loop._pending


def test_what_a_user_wants_to_hear_of_from_numpy_is_not_heard_from_an_allreduce():
    halves = np.array([5e-324])
    with np.errstate(all="raise"):
        allreduce.finish(halves, Request(Key(0, "allreduce", "a"), ("float64",), ((1,),), ReduceOp.Average.value), 2)
    assert halves[0] == 0.0
