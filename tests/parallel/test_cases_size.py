"""Public bug reports as tests, on two ranks: large, many, and for long; as test_cases_np2.py.

What takes much memory or time is in tests/test_cases_size.py.
"""

import os
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch

import hvdlite.torch as hvd
from hvdlite.runtime import NUM_UNNAMED, default_runtime

RANKS = (2,)


def memory_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_g1_above_the_count_of_one_mpi_call(restart):
    """horovod/horovod#3368, #554, bytedance/byteps#302, mpi4py/mpi4py#23: counts and offsets overflowed an int.

    Single tensors: test_limits.py. Here: buckets, in place, and objects.
    """
    restart(MAX_MPI_COUNT=1000)
    r = hvd.rank()
    values = [torch.arange(count) % 11 for count in (999, 1000, 1001, 2500, 1)]
    results = hvd.grouped_allreduce([one + r for one in values], op=hvd.Sum)
    assert all(torch.equal(got, 2 * one + 1) for got, one in zip(results, values, strict=True))
    gathered = hvd.grouped_allgather([one + r for one in values])
    assert all(torch.equal(got, torch.cat([one, one + 1])) for got, one in zip(gathered, values, strict=True))
    for one in values:
        mine = one + r
        assert hvd.broadcast_(mine, root_rank=1) is mine and torch.equal(mine, one + 1)
    objects = [os.urandom(1) * 5000, {"pad": "x" * 5000}]
    known = hvd.broadcast_object(objects[r], root_rank=0)
    assert len(known) == 5000 and (r or known is objects[0])
    assert hvd.allgather_object(objects[1]) == [objects[1]] * 2
    assert hvd.allgather_object(known[: 5000 * r]) == [b"", known]


@pytest.mark.parametrize("capacity", [1024, pytest.param(0, marks=pytest.mark.slow), 20000])
def test_g2_ten_thousand_names(capacity, restart):
    """horovod/horovod#2626, #1189, #902: names evicted one another in each cycle, and everything became slow."""
    restart(CACHE_CAPACITY=capacity)
    tensors = [torch.full((1 + i % 3,), float(i + hvd.rank())) for i in range(10_000)]
    durations_s = []
    for _ in range(3):
        started_s = time.monotonic()
        handles = [hvd.allreduce_async(one, name=f"g2.{i}", op=hvd.Sum) for i, one in enumerate(tensors)]
        results = [handle.wait(30) for handle in handles]
        durations_s.append(time.monotonic() - started_s)
        assert all(got.tolist() == [2.0 * i + 1] * (1 + i % 3) for i, got in enumerate(results))
    assert max(durations_s) < 30 and durations_s[2] < 2 * durations_s[0] + 1


def test_g2_memory_of_many_calls():
    """horovod/horovod#1501, #3110, #1844, pytorch/pytorch#16144: memory grew with each call."""
    one = torch.ones(10)
    for i in range(100):
        handles = [hvd.allreduce_async(one) for _ in range(200)]
        assert all(hvd.synchronize(handle)[9] == 1 for handle in handles)
        for _ in range(5):
            assert hvd.allgather_object(i) == [i, i]
        if i == 10:
            before_bytes, num_threads = memory_bytes(), threading.active_count()
    assert memory_bytes() - before_bytes < 20 << 20
    assert threading.active_count() == num_threads
    names = [key.name for _, key in default_runtime().background.slots.assigned()]
    assert len([name for name in names if name.startswith("allreduce.noname.")]) <= NUM_UNNAMED


def test_g2_handles_that_nobody_waits_for():
    """horovod/horovod#1844: what was only polled was kept for ever."""
    inputs = weakref.WeakSet()
    for i in range(10_000):
        one = torch.ones(10)
        inputs.add(one)
        hvd.poll(hvd.allreduce_async(one, name=f"dropped.{i}"))
        if i % 1000 == 999:
            hvd.barrier()  # so that at most so many are in flight
    del one
    for _ in range(2):  # after the first the background thread may still hold what was ready together with it
        hvd.barrier()
    assert not inputs
    background = default_runtime().background
    assert not background._pending and len(background.queue._uses) <= 4_096 + 1
    assert len(background.slots) <= 1_024 + 1
