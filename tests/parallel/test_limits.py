"""Transfers larger than what one MPI call may carry are cut: the limit is lowered to 1000 elements."""

import os

os.environ["HVDLITE_MAX_MPI_COUNT"] = "1000"

import numpy as np
import pytest

import hvdlite as hvd

RANKS = (2, 3)
ALONE = True


@pytest.mark.parametrize("count", [999, 1000, 1001, 2500])
@pytest.mark.parametrize("dtype", ["float16", "float32", "int64"])
def test_all_collectives_at_the_limit(count, dtype):
    r, n = hvd.rank(), hvd.size()
    values = (np.arange(count) % 11).astype(dtype)
    assert np.array_equal(hvd.allreduce(values, op=hvd.Sum), n * values)
    assert np.array_equal(hvd.allgather(values + r), np.concatenate([values + k for k in range(n)]))
    assert np.array_equal(hvd.broadcast(values + r, n - 1), values + n - 1)
    begin = sum(count // n + (k < count % n) for k in range(r))
    own = slice(begin, begin + count // n + (r < count % n))
    assert np.array_equal(hvd.reducescatter(values, op=hvd.Sum), n * values[own])
    splits = [count - (n - 1) * 10] + [10] * (n - 1)
    got, received = hvd.alltoall(values + r, splits=splits)
    assert received.tolist() == [splits[r]] * n
    begin = sum(splits[:r])
    assert np.array_equal(got, np.concatenate([(values + k)[begin : begin + splits[r]] for k in range(n)]))


@pytest.mark.parametrize("schedule", ["ring", "two_shot"])
@pytest.mark.parametrize("count", [999, 1000, 1001, 2500, 300_000])
def test_quantized_messages_at_the_limit(count, schedule):
    """A message of 300 000 elements and two ranks is 19 KB: cut into pieces of 1000 bytes."""
    compression = hvd.Compression.quantized(schedule=schedule)
    for _ in range(2):
        assert (hvd.allreduce(np.full(count, 0.5, np.float32), name=f"c{count}.{schedule}", compression=compression) == 0.5).all()
    mine = np.random.default_rng(hvd.rank()).standard_normal(count).astype(np.float32)
    got = hvd.allreduce(mine, name=f"g{count}.{schedule}", compression=compression)
    assert (hvd.allgather(got[None], name="same") == got).all() and np.isfinite(got).all()
    right = hvd.allreduce(mine, name=f"r{count}.{schedule}")
    assert got @ right > 0.5 * np.linalg.norm(got) * np.linalg.norm(right)
