"""Public bug reports as tests, on three ranks; as test_cases_np2.py."""

import random
import time

import pytest
import torch

import hvdlite.torch as hvd

RANKS = (3,)


def test_a6_objects_of_different_sizes():
    """horovod/horovod#2204: from the third rank on the offsets were wrong."""
    for objects in (
        [{"r": r, "pad": "x" * 10**r} for r in range(3)],
        [{"r": 0}, None, {"r": 2}],
        [{"r": 0}, "", bytes(range(256)) * 4096],
    ):
        assert hvd.allgather_object(objects[hvd.rank()]) == objects


def test_a7_process_sets():
    """horovod/horovod#3815, #3083, #2839, #3501: averages were divided by the job's size, sets survived the shutdown."""
    r = hvd.rank()
    mine = torch.tensor([float(r)])

    def uses(process_set):
        return [lambda: hvd.allreduce(mine, process_set=process_set),
                lambda: hvd.allgather(mine, process_set=process_set),
                lambda: hvd.broadcast(mine, root_rank=2, process_set=process_set)]

    some = hvd.add_process_set([0, 2])
    for use, right in zip(uses(some), ([1.0], [0, 2], [2]), strict=True):
        if r == 1:
            with pytest.raises(ValueError, match="rank 1 is not in process set"):
                use()
        else:
            assert use().tolist() == right
    with pytest.raises(ValueError, match="ranks 0, 2 exists already"):
        hvd.add_process_set([2, 0])
    hvd.remove_process_set(some)
    for use in uses(some):
        with pytest.raises(ValueError, match="not registered"):
            use()
    hvd.shutdown()
    hvd.init()
    again = hvd.add_process_set([0, 2])
    assert r == 1 or hvd.allreduce(mine, process_set=again).tolist() == [1.0]


def test_b2_another_order_on_every_rank():
    """horovod/horovod#763, #100, #3308: other orders met other operations; a barrier in between ended the process."""
    r = hvd.rank()
    for repetition in range(20):
        shuffled, handles, right = random.Random(100 * repetition + r), {}, {}
        for i in shuffled.sample(range(100), 100):
            value = torch.full((i + 1,), float(i + r))
            if i % 5 == 0:
                handles[i] = hvd.allgather_async(value, name=f"b2.{i}")
                right[i] = [float(i + rank) for rank in range(3) for _ in range(i + 1)]
            elif i % 7 == 0:
                handles[i] = hvd.broadcast_async(value, i % 3, name=f"b2.{i}")
                right[i] = [float(i + i % 3)] * (i + 1)
            else:
                handles[i] = hvd.allreduce_async(value, name=f"b2.{i}", op=hvd.Sum)
                right[i] = [3.0 * i + 3] * (i + 1)
            if len(handles) == 50:
                hvd.barrier()
        if repetition % 2:
            deadline_s = time.monotonic() + 30
            while not all([hvd.poll(handle) for handle in handles.values()]):
                assert time.monotonic() < deadline_s, "some operation does not end"
                time.sleep(1e-3)  # more ranks than cores
        for i in shuffled.sample(range(100), 100):
            assert hvd.synchronize(handles[i]).tolist() == right[i]
            assert hvd.poll(handles[i])
