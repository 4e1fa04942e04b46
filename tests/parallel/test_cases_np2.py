"""Public bug reports as tests, on two ranks: what collectives return, and ranks that disagree.

Each test names the reports that seeded it and what went wrong there; its name starts with the case's letter and number.
"""

import pytest
import torch

import hvdlite.torch as hvd

RANKS = (2,)


def of_rank(*values):
    """This rank's one of two."""
    return values[hvd.rank()]


def test_a1_non_contiguous_inputs():
    """horovod/horovod#3622, pytorch/pytorch#192920: the storage under a strided view was read; results went to a copy."""
    r = hvd.rank()
    plain = torch.arange(12.0).reshape(4, 3)
    base = plain + 100 * r
    hvd.broadcast_(base[:, 1], root_rank=0)
    hvd.allreduce_(base[:, 0], op=hvd.Sum)
    assert base[:, 1].tolist() == [1, 4, 7, 10]
    assert base[:, 0].tolist() == [100, 106, 112, 118]
    assert torch.equal(base[:, 2], plain[:, 2] + 100 * r)
    base = plain + 100 * r
    assert torch.equal(hvd.allreduce(base.t(), op=hvd.Sum), 2 * plain.t() + 100)
    assert torch.equal(hvd.allgather(base[::2]), torch.cat([plain[::2], plain[::2] + 100]))
    assert torch.equal(base, plain + 100 * r)
    expanded = torch.tensor([2.0]).expand(4)
    assert hvd.allreduce(expanded, op=hvd.Sum).tolist() == [4, 4, 4, 4]
    for in_place in (hvd.allreduce_, lambda tensor: hvd.broadcast_(tensor, root_rank=0)):
        with pytest.raises(ValueError, match="overlap"):
            in_place(expanded)


@pytest.mark.parametrize("dtype, values, right", [
    (torch.int32, ([-3, 3, -4, 0], [-4, 4, -3, 1]), [-3, 3, -3, 0]),
    (torch.int64, ([-3, 3, -4, 0], [-4, 4, -3, 1]), [-3, 3, -3, 0]),
    (torch.int64, ([2**60 + 1], [2**60 + 1]), [2**60 + 1]),
    (torch.int32, ([7] * 5, [7] * 5), [7] * 5),
])
def test_a2_integer_average(dtype, values, right):
    """horovod/horovod#3570, #2054: negative averages were off by one, large ones went through floats, 1/n became 0."""
    mine = torch.tensor(of_rank(*values), dtype=dtype)
    half = (len(right) + 1) // 2
    for got, expected in [
        (hvd.allreduce(mine, op=hvd.Average), right),
        (hvd.grouped_allreduce([torch.ones(3, dtype=dtype), mine], op=hvd.Average)[1], right),
        (hvd.reducescatter(mine, op=hvd.Average), of_rank(right[:half], right[half:])),
    ]:
        assert got.dtype == dtype and got.tolist() == expected


def test_a3_large_float16():
    """horovod/horovod#1699, pytorch/pytorch#57410: the sum overflowed before it was divided."""
    large = torch.tensor([40000.0]).half()
    assert hvd.allreduce(large, op=hvd.Average).tolist() == [40000]
    assert hvd.allreduce(large, op=hvd.Sum).tolist() == [float("inf")]
    w = torch.nn.Parameter(torch.zeros(1).half())
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([w], lr=1.0), named_parameters=[("w", w)], gradient_predivide_factor=2.0)
    (w * large).sum().backward()
    optimizer.step()
    assert w.grad.dtype == torch.float16 and w.grad.tolist() == [40000] and w.tolist() == [-40000]


def test_a3_bfloat16():
    """horovod/horovod#4047, pytorch/pytorch#111131: refused, or summed as if its bits were integers."""
    mine = torch.tensor(of_rank([256.0, 1.0], [3.0, 2.0])).bfloat16()
    for op, right in ((hvd.Sum, [260.0, 3.0]), (hvd.Average, [130.0, 1.5])):
        got = hvd.allreduce(mine, op=op)
        assert got.dtype == torch.bfloat16 and got.tolist() == right


@pytest.mark.parametrize("dtype, values, right", [(torch.uint8, (200, 100), 44), (torch.int8, (100, 100), -56)])
def test_a3_small_integers_wrap(dtype, values, right):
    """horovod/horovod#3662: what an overflow gave depended on the MPI."""
    got = hvd.allreduce(torch.tensor([of_rank(*values)], dtype=dtype), op=hvd.Sum)
    assert got.dtype == dtype and got.tolist() == [right]


def test_a3_bool():
    """horovod/horovod#77: not supported at all."""
    mine = torch.tensor(of_rank([True, False, True], [False, False, True]))
    for got, right in [(hvd.broadcast(mine, root_rank=1), [False, False, True]),
                       (hvd.allgather(mine), [True, False, True, False, False, True])]:
        assert got.dtype == torch.bool and got.tolist() == right
    with pytest.raises(ValueError, match="bool"):
        hvd.allreduce(mine, name="a3", op=hvd.Sum)
    assert hvd.allreduce(mine.int(), name="a3", op=hvd.Sum).tolist() == [1, 0, 2]


def test_a4_scalars():
    """horovod/horovod#3698: a scalar given to reducescatter ended the process, to allgather it failed obscurely."""
    mine = torch.tensor(3.0 + hvd.rank())
    for got, right in ((hvd.allreduce(mine, op=hvd.Sum), 7.0), (hvd.broadcast(mine, root_rank=0), 3.0)):
        assert got.shape == () and got.item() == right
    for call, retried in ((hvd.allgather, [1] * 4), (hvd.reducescatter, [1])):
        with pytest.raises(ValueError, match="dimension"):
            call(mine, name="a4")
        assert call(torch.ones(2), name="a4").tolist() == retried


def test_a4_empty_and_uneven():
    """sands-lab/grace#2, horovod/horovod#2259: empty contributions ended the process."""
    r = hvd.rank()
    assert torch.equal(hvd.allgather(torch.ones(2 * r, 3)), torch.ones(2, 3))
    assert hvd.allgather(torch.ones(0, 3)).shape == (0, 3)
    empty, full = hvd.grouped_allreduce([torch.empty(0), torch.ones(5)], op=hvd.Sum)
    assert empty.shape == (0,) and full.tolist() == [2] * 5
    handles = [hvd.allreduce_async(one, op=hvd.Sum) for one in (torch.ones(5), torch.empty(0), torch.ones(2))]
    assert [hvd.synchronize(handle).tolist() for handle in handles] == [[2] * 5, [], [2] * 2]
    got, received = hvd.alltoall(torch.empty(0, 2), splits=torch.tensor([0, 0]))
    assert got.shape == (0, 2) and received.tolist() == [0, 0]
    assert hvd.reducescatter(torch.arange(5.0), op=hvd.Sum).tolist() == of_rank([0, 2, 4], [6, 8])
    assert hvd.reducescatter(torch.ones(1), op=hvd.Sum).tolist() == of_rank([2], [])


@pytest.mark.parametrize("collective, right", [
    (lambda x: hvd.allgather(x), (1, 1)),
    (lambda x: hvd.broadcast(x, 0), (1, 0)),
    (lambda x: hvd.allreduce(x, op=hvd.Average), (1, 1)),
    (lambda x: hvd.allreduce(x, op=hvd.Sum), (2, 2)),
], ids=["allgather", "broadcast", "average", "sum"])
def test_a5_gradients_through_collectives(collective, right):
    """horovod/horovod#2654: the gradients of allgather and broadcast were n times too large."""
    x = torch.ones(2, requires_grad=True)
    collective(x).sum().backward()
    assert x.grad.tolist() == [of_rank(*right)] * 2


@pytest.mark.parametrize("start, right", [
    (lambda x, name: hvd.allreduce_async(x, name=name, op=hvd.Sum), [3, 6]),
    (lambda x, name: hvd.allgather_async(x, name=name), [1, 2, 2, 4]),
    (lambda x, name: hvd.broadcast_async(x, 0, name=name), [1, 2]),
    (lambda x, name: hvd.alltoall_async(x, name=name), ([1, 2], [2, 4])),
    (lambda x, name: hvd.grouped_allreduce_async([x, x], name=name, op=hvd.Sum), [3, 6]),
], ids=["allreduce", "allgather", "broadcast", "alltoall", "grouped_allreduce"])
def test_b1_a_name_twice_in_flight(start, right):
    """horovod/horovod#549: the second use of a name broke the first, or the process."""
    mine = torch.tensor([1.0, 2.0]) * (hvd.rank() + 1)
    expected = of_rank(*right) if isinstance(right, tuple) else right
    if hvd.rank() == 0:
        handle = start(mine, "b1")
        with pytest.raises(ValueError, match=r"'b1'.* name is already in flight"):
            start(mine, "b1")
        assert not hvd.poll(handle)
    hvd.barrier()  # the other rank comes late
    if hvd.rank() == 1:
        handle = start(mine, "b1")
    for _ in range(2):
        result = hvd.synchronize(handle)
        assert (result[0] if isinstance(result, (list, tuple)) else result).tolist() == expected
        handle = start(mine, "b1")
    hvd.synchronize(handle)


def _reduce(*shape, dtype=torch.float32, **arguments):
    return lambda name: hvd.allreduce_async(torch.ones(shape, dtype=dtype), name=name, **{"op": hvd.Sum, **arguments})


def _gather(*shape):
    return lambda name: hvd.allgather_async(torch.ones(shape), name=name)


def _broadcast(root_rank):
    return lambda name: hvd.broadcast_async(torch.ones(2), root_rank, name=name)


@pytest.mark.parametrize("calls, facts, value", [
    ((_reduce(2), _reduce(3)), ("(2,)", "(3,)"), 2),
    ((_reduce(2, 3), _reduce(3, 2)), ("(2, 3)", "(3, 2)"), 2),
    ((_reduce(2), _reduce(2, dtype=torch.float64)), ("float32", "float64"), 2),
    ((_reduce(2), _gather(2)), ("allreduce", "allgather"), 2),
    ((_broadcast(0), _broadcast(1)), ("0", "1"), 1),
    ((_reduce(2), _reduce(2, op=hvd.Average)), ("Sum", "Average"), 2),
    ((_reduce(2), _reduce(2, prescale_factor=2.0)), ("1.0", "2.0"), 2),
    ((_gather(2, 3), _gather(2, 4)), ("(any, 3)", "(any, 4)"), 1),
], ids=["shape", "same_numel", "dtype", "operation", "root_rank", "op", "prescale", "trailing_dims"])
def test_b3_ranks_disagree(calls, facts, value, request):
    """horovod/horovod#1559, #336, apache/mxnet#20007: a hang, or numbers without a meaning."""
    name = f"b3.{request.node.callspec.id}"
    with pytest.raises(hvd.HorovodInternalError) as caught:
        of_rank(*calls)(name).wait(20)
    said = str(caught.value)
    assert repr(name) in said
    for rank, fact in enumerate(facts):
        assert f"rank {rank} has {fact}" in said or f"rank {rank} called {fact}" in said
    assert (calls[0](name).wait(20) == value).all()


DTYPES = [torch.uint8, torch.int64, torch.float16, torch.float32, torch.float64]
COUNTS = [1, 7, 8, 9, 63, 64, 65, 300]


def _tensor(i, rank):
    generator = torch.Generator().manual_seed(1000 * i + rank)
    values, dtype = torch.randint(0, 100, (COUNTS[i % len(COUNTS)],), generator=generator), DTYPES[i % len(DTYPES)]
    return values.to(dtype) / 7 if dtype.is_floating_point else values.to(dtype)


@pytest.mark.parametrize("threshold_bytes", [0, 1, 64, 1000, None])
def test_b4_fusion(threshold_bytes, restart):
    """horovod/horovod#1604, #663, #358, #1742: sizes in elements for bytes, dtypes mixed, results in the fusion buffer."""
    if threshold_bytes is not None:
        restart(FUSION_THRESHOLD=threshold_bytes)

    def batch(first):
        given = [_tensor(i, hvd.rank()) for i in range(first, first + 30)]
        handles = [hvd.allreduce_async(one, name=f"b4.{i}", op=hvd.Sum) for i, one in enumerate(given)]
        results = [hvd.synchronize(handle) for handle in handles]
        assert all(torch.equal(one, _tensor(i, hvd.rank())) for i, one in enumerate(given, first))
        return results

    def check(results, first):
        for i, result in enumerate(results, first):
            right = _tensor(i, 0) + _tensor(i, 1)
            rtol = torch.finfo(right.dtype).eps if right.dtype.is_floating_point else 0
            torch.testing.assert_close(result, right, rtol=rtol, atol=0)

    kept = batch(0)
    check(kept, 0)
    check(batch(40), 40)  # the same dtypes and sizes, other values
    check(kept, 0)
    in_place = [_tensor(i, hvd.rank()) for i in range(30)]
    handles = [hvd.allreduce_async_(one, name=f"b4.{i}", op=hvd.Sum) for i, one in enumerate(in_place)]
    assert all(hvd.synchronize(handle) is one for handle, one in zip(handles, in_place, strict=True))
    check(in_place, 0)
