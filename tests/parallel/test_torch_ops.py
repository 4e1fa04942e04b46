"""The torch collectives: values in several dimensions and process sets, gradients, compression, sparse tensors, handles."""

import pytest
import torch
from mpi4py import MPI

import hvdlite.torch as hvd

RANKS = (2, 3)
R = N = 0


@pytest.fixture(autouse=True)
def place(job):
    global R, N
    R, N = hvd.rank(), hvd.size()


@pytest.fixture(scope="module")
def sets(job):
    """Ranks 0, 2, ... and ranks 1, 3, ...: every rank is in one of them."""
    made = [hvd.add_process_set(range(first, hvd.size(), 2)) for first in (0, 1)]
    yield made
    assert [hvd.remove_process_set(one) for one in made] == [True, True]


@pytest.fixture(params=["all", "set"])
def where(request):
    """The global set, or this rank's one of the two; every test with it runs in both."""
    return hvd.global_process_set if request.param == "all" else request.getfixturevalue("sets")[hvd.rank() % 2]


def leaf(rank, *shape):
    return values(rank, *shape).requires_grad_()


def values(rank, *shape, dtype=torch.float32):
    return torch.randint(-50, 50, shape, generator=torch.Generator().manual_seed(rank + 1)).to(dtype)


def everyones(process_set, *shape, dtype=torch.float32):
    return torch.stack([values(rank, *shape, dtype=dtype) for rank in process_set.ranks])


# -- values -----------------------------------------------------------------------------------------------------------

SHAPES = [(7,), (4, 3), (2, 3, 4)]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float16, torch.float32, torch.float64])
def test_reductions_of_several_dimensions(where, dtype):
    for shape in SHAPES:
        mine, all_ = values(R, *shape, dtype=dtype), everyones(where, *shape, dtype=dtype)
        for op, right in [(hvd.Sum, all_.sum(0)), (hvd.Min, all_.amin(0)), (hvd.Max, all_.amax(0)), (hvd.Product, all_.prod(0))]:
            got = hvd.allreduce(mine, op=op, process_set=where)
            assert got.dtype == dtype and torch.equal(got, right.to(dtype)), op
        pair = hvd.grouped_allreduce([mine, mine + 1], op=hvd.Sum, process_set=where)
        assert torch.equal(pair[0], all_.sum(0).to(dtype)) and torch.equal(pair[1], (all_ + 1).sum(0).to(dtype))
        in_place = [mine.clone(), mine + 1]
        assert hvd.grouped_allreduce_(in_place, op=hvd.Sum, process_set=where)[0] is in_place[0]
        assert torch.equal(in_place[0], pair[0]) and torch.equal(in_place[1], pair[1])
        right = (all_.sum(0).double() / where.size()).trunc() if not dtype.is_floating_point else all_.double().mean(0)
        torch.testing.assert_close(hvd.allreduce(mine, process_set=where), right.to(dtype))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("prescale, postscale", [(0.3, 1.0), (1.0, 0.3)])
def test_scales_truncate_integers_on_their_side_of_the_sum(where, dtype, prescale, postscale):
    mine, all_ = values(R, 3 * N, 2, dtype=dtype), everyones(where, 3 * N, 2, dtype=dtype)
    if dtype.is_floating_point:
        right = 0.3 * all_.double().sum(0)
    else:
        right = (0.3 * all_.double()).trunc().sum(0) if prescale != 1 else (0.3 * all_.double().sum(0)).trunc()
    settings = {"op": hvd.Sum, "prescale_factor": prescale, "postscale_factor": postscale, "process_set": where}
    own = right.tensor_split(where.size())[where.rank()]
    for got, expected in [
        (hvd.allreduce(mine, **settings), right), (hvd.grouped_allreduce([mine], **settings)[0], right),
        (hvd.allreduce_(mine.clone(), **settings), right), (hvd.reducescatter(mine, **settings), own),
        (hvd.grouped_reducescatter([mine], **settings)[0], own)]:
        assert got.dtype == dtype
        torch.testing.assert_close(got, expected.to(dtype))


def test_gathers_of_unequal_rows(where):
    for rest in [(), (3,), (2, 2)]:
        right = torch.cat([values(rank, rank + 1, *rest) for rank in where.ranks])
        mine = values(R, R + 1, *rest)
        assert torch.equal(hvd.allgather(mine, process_set=where), right)
        got = hvd.grouped_allgather([mine, 2 * mine, mine.long()], name="gathers", process_set=where)
        assert torch.equal(got[0], right) and torch.equal(got[1], 2 * right) and torch.equal(got[2], right.long())
        assert torch.equal(hvd.synchronize(hvd.grouped_allgather_async([mine], process_set=where))[0], right)


def test_broadcasts_name_the_root_by_its_global_rank(where):
    for root in where.ranks:
        mine = values(R, 2, 3)
        assert torch.equal(hvd.broadcast(mine, root, process_set=where), values(root, 2, 3))
        assert torch.equal(mine, values(R, 2, 3))
        assert hvd.broadcast_(mine, root, process_set=where) is mine and torch.equal(mine, values(root, 2, 3))
    outside = N if where is hvd.global_process_set else (R + 1) % 2
    with pytest.raises(ValueError, match=f"root_rank {outside} is not in the process set"):
        hvd.broadcast(torch.ones(1), outside, process_set=where)


def test_alltoall_with_and_without_splits(where):
    ranks, place = where.ranks, where.rank()
    splits = list(range(1, len(ranks) + 1))  # member k receives k + 1 rows from each
    mine = values(R, sum(splits) + 1, 2)  # the last row stays
    pieces = [values(rank, sum(splits) + 1, 2)[sum(splits[:place]) : sum(splits[: place + 1])] for rank in ranks]
    for given in (splits, torch.tensor(splits, dtype=torch.int32)):
        got, received = hvd.alltoall(mine, given, process_set=where)
        assert torch.equal(got, torch.cat(pieces))
        assert received.dtype == torch.int32 and received.tolist() == [place + 1] * len(ranks)
    even = values(R, 2 * len(ranks))
    right = torch.cat([values(rank, 2 * len(ranks))[2 * place : 2 * place + 2] for rank in ranks])
    assert torch.equal(hvd.alltoall(even, process_set=where), right)
    got, received = hvd.synchronize(hvd.alltoall_async(even, process_set=where))
    assert torch.equal(got, right) and received.tolist() == [2] * len(ranks)


def test_alltoall_refuses_splits_that_do_not_fit():
    for rows, splits, says in [
        (N + 1, None, "cut evenly"), (N - 1, [1] * N, "do not fit"), (N, [1] * (N + 1), "entries for"),
        (N, torch.ones(N), "integers"), (N, [[1] * N], "1-D"), (N, [N + 1, *[-1] * (N - 1)], ">= 0")]:
        with pytest.raises(ValueError, match=says):
            hvd.alltoall(torch.ones(rows), splits)


def test_reducescatter_cuts_rows(where):
    all_ = everyones(where, 5, 2)
    for op, right in [(hvd.Sum, all_.sum(0)), (hvd.Average, all_.mean(0))]:
        own = right.tensor_split(where.size())[where.rank()]
        torch.testing.assert_close(hvd.reducescatter(values(R, 5, 2), op=op, process_set=where), own)
        pair = hvd.grouped_reducescatter([values(R, 5, 2), 2 * values(R, 5, 2)], op=op, process_set=where)
        torch.testing.assert_close(pair[0], own)
        torch.testing.assert_close(pair[1], 2 * own)
    with pytest.raises(ValueError, match="no dimension"):
        hvd.grouped_reducescatter([torch.ones(2), torch.tensor(1.0)], process_set=where)
    for kind in (ValueError, hvd.HorovodInternalError):
        with pytest.raises(kind, match="use one of Average, Sum"):
            hvd.reducescatter(torch.ones(2), op=hvd.Adasum, process_set=where)


MISMATCHES = {
    "reducescatter shape": lambda: hvd.reducescatter(torch.ones(4 + R)),
    "reducescatter dtype": lambda: hvd.reducescatter(torch.ones(4).to([torch.float32, torch.int32][R > 0])),
    "alltoall trailing": lambda: hvd.alltoall(torch.ones(N, 2 + R)),
    "alltoall dtype": lambda: hvd.alltoall(torch.ones(N).to([torch.float32, torch.int32][R > 0])),
    "broadcast shape": lambda: hvd.broadcast(torch.ones(2, 2 + R), 0),
    "broadcast dtype": lambda: hvd.broadcast(torch.ones(2).to([torch.float32, torch.int32][R > 0]), 0),
    "allgather dtype": lambda: hvd.allgather(torch.ones(2).to([torch.float32, torch.int32][R > 0])),
    "allgather dimensions": lambda: hvd.allgather(torch.ones(2, *[1] * R)),
    "group length": lambda: hvd.grouped_allreduce([torch.ones(2)] * (R + 1)),
}


@pytest.mark.parametrize("call", MISMATCHES.values(), ids=MISMATCHES)
def test_ranks_that_disagree_are_told_on_every_rank(call):
    with pytest.raises(RuntimeError, match="rank 0 has"):
        call()


def test_barriers():
    handles = [hvd.allgather_async(torch.eye(3)), hvd.allreduce_async(torch.eye(5)), hvd.broadcast_async(torch.eye(2), 0)]
    hvd.barrier()
    assert [torch.equal(hvd.synchronize(one)[: size], torch.eye(size)) for one, size in zip(handles, (3, 5, 2), strict=True)]


def test_a_sets_barrier_waits_for_nobody_else(sets):
    if R % 2 == 0:
        MPI.COMM_WORLD.Barrier()
    hvd.barrier(process_set=sets[R % 2])
    if R % 2 == 1:
        MPI.COMM_WORLD.Barrier()
    with pytest.raises(ValueError, match=f"rank {R} is not in process set"):
        hvd.barrier(process_set=sets[(R + 1) % 2])


@pytest.mark.parametrize("is_cached", [False, True])
def test_join(is_cached):
    def pair():
        handles = [hvd.allreduce_async(torch.full((3, 2), 3.0), name="joined.a"),
                   hvd.allreduce_async(torch.full((17,), 7, dtype=torch.int64), name="joined.b")]
        return [hvd.synchronize(one) for one in handles]

    if is_cached:
        assert [one.flatten()[0].item() for one in pair()] == [3, 7]
    for first in range(N):
        if first != R:
            a, b = pair()
            torch.testing.assert_close(a, torch.full((3, 2), 3.0 * (N - 1) / N))
            assert b.tolist() == [7 * (N - 1) // N] * 17
            for call in (lambda: hvd.allgather(torch.ones(2)), lambda: hvd.broadcast(torch.ones(2), R, name="joined.c")):
                with pytest.raises(RuntimeError, match=rf"rank {first} called join\(\)"):
                    call()
        last = hvd.join()
        assert last != first and hvd.allgather_object(last) == [last] * N


# -- gradients --------------------------------------------------------------------------------------------------------

SCALED = {"op": hvd.Sum, "prescale_factor": 0.5, "postscale_factor": 3.0}


@pytest.mark.parametrize("settings, factor", [({"op": hvd.Average}, None), ({"op": hvd.Sum}, 1), (SCALED, 1.5)],
                         ids=["average", "sum", "scaled"])
def test_gradient_of_allreduce(where, settings, factor):
    """With loss weight * result on each rank, x gets the same operation on everyone's weights."""
    for shape in SHAPES:
        weights = everyones(where, *shape)
        right = weights.mean(0) if factor is None else factor * weights.sum(0)
        x, first, second = (leaf(R, *shape) for _ in range(3))
        (values(R, *shape) * hvd.allreduce(x, name="gradient", process_set=where, **settings)).sum().backward()
        torch.testing.assert_close(x.grad, right)
        one, two = hvd.grouped_allreduce([first, second], process_set=where, **settings)
        (values(R, *shape) * (one + 2 * two)).sum().backward()
        torch.testing.assert_close(first.grad, right)
        torch.testing.assert_close(second.grad, 2 * right)


def test_reductions_without_a_gradient_say_so():
    for op in (hvd.Min, hvd.Max, hvd.Product):
        result = hvd.allreduce(leaf(0, 2), name="reduced", op=op)
        with pytest.raises(ValueError, match=f"'reduced': op {op.name} has no gradient"):
            result.sum().backward()


def test_gradient_of_allgather(where):
    for rest in [(), (3,)]:
        total = sum(rank + 1 for rank in where.ranks)
        begin = sum(rank + 1 for rank in where.ranks if rank < R)
        right = everyones(where, total, *rest).mean(0)[begin : begin + R + 1]
        x, first, second = (leaf(R, R + 1, *rest) for _ in range(3))
        (values(R, total, *rest) * hvd.allgather(x, name="gradient", process_set=where)).sum().backward()
        torch.testing.assert_close(x.grad, right)
        one, two = hvd.grouped_allgather([first, second], process_set=where)
        (values(R, total, *rest) * (one + 2 * two)).sum().backward()
        torch.testing.assert_close(first.grad, right)
        torch.testing.assert_close(second.grad, 2 * right)


def test_gradient_of_broadcast(where):
    for root in where.ranks:
        x = leaf(R, 2, 3)
        (values(R, 2, 3) * hvd.broadcast(x, root, name="gradient", process_set=where)).sum().backward()
        torch.testing.assert_close(x.grad, everyones(where, 2, 3).mean(0) if root == R else torch.zeros(2, 3))


def test_gradient_of_alltoall(where):
    """A row's gradient is the weight it meets where it went; a row that stayed has none."""
    size, place = where.size(), where.rank()
    x = leaf(R, size * (place + 1) + 1, 2)
    result, _ = hvd.alltoall(x, [place + 1] * size, name="gradient", process_set=where)
    (10.0**place * result).sum().backward()
    right = [[10.0**to] * 2 for to in range(size) for _ in range(place + 1)] + [[0, 0]]
    assert x.grad.tolist() == right
    x = leaf(R, size, 2)
    (10.0**place * hvd.alltoall(x, process_set=where)).sum().backward()
    assert x.grad.tolist() == [[10.0**to] * 2 for to in range(size)]


@pytest.mark.parametrize("settings, factor", [({"op": hvd.Average}, None), ({"op": hvd.Sum}, 1), (SCALED, 1.5)],
                         ids=["average", "sum", "scaled"])
def test_gradient_of_reducescatter(where, settings, factor):
    factor = 1 if factor is None else factor * where.size()
    weights = values(0, 5, 2)
    own = weights.tensor_split(where.size())[where.rank()]
    x, first, second = (leaf(R, 5, 2) for _ in range(3))
    (own * hvd.reducescatter(x, name="gradient", process_set=where, **settings)).sum().backward()
    torch.testing.assert_close(x.grad, factor * weights)
    one, two = hvd.grouped_reducescatter([first, second], process_set=where, **settings)
    (own * (one + 2 * two)).sum().backward()
    torch.testing.assert_close(first.grad, factor * weights)
    torch.testing.assert_close(second.grad, 2 * factor * weights)


def test_no_graph_is_made_where_none_is_wanted():
    with torch.no_grad():
        assert not hvd.allreduce(leaf(0, 2)).requires_grad
    assert not hvd.allgather(torch.ones(2)).requires_grad
    assert hvd.allreduce(leaf(0, 2)).grad_fn is not None


# -- compression and sparse tensors -----------------------------------------------------------------------------------

@pytest.mark.parametrize("compression, dtype", [(hvd.Compression.fp16, torch.float16), (hvd.Compression.bf16, torch.bfloat16)])
def test_compression_to_sixteen_bits(where, compression, dtype):
    for given in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        sent, context = compression.compress(torch.full((3,), 0.1, dtype=given))
        assert sent.dtype == dtype and compression.decompress(sent, context).dtype == given
    for given in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool):
        whole = torch.ones(3, dtype=given)
        assert compression.compress(whole)[0] is whole
    mine = torch.tensor([0.1 + R, 2.0], requires_grad=True)
    got = hvd.allreduce(mine, compression=compression, op=hvd.Sum, process_set=where)
    right = sum(torch.tensor([0.1 + rank, 2.0]).to(dtype).float() for rank in where.ranks).to(dtype).float()
    assert got.dtype == torch.float32 and torch.equal(got, right)
    got.sum().backward()
    assert mine.grad.dtype == torch.float32 and mine.grad.tolist() == [where.size()] * 2
    exact = torch.tensor([2**40 + 1])
    assert hvd.grouped_allreduce([exact], compression=compression, process_set=where)[0].tolist() == [2**40 + 1]
    rows = torch.full((where.size(),), 0.1)
    assert hvd.reducescatter(rows, compression=compression, process_set=where).tolist() == [rows.to(dtype)[0].item()]
    if compression is hvd.Compression.fp16:
        assert torch.isinf(hvd.allreduce(torch.tensor([70000.0]), compression=compression, process_set=where)).all()


class Doubled:
    """A user's own: sends the tensor flat, in float64, doubled."""

    @staticmethod
    def compress(tensor):
        return 2 * tensor.double().flatten(), tensor

    @staticmethod
    def decompress(tensor, ctx):
        return (tensor / 2).view(ctx.shape).to(ctx.dtype)


def test_a_users_own_compressor(where):
    right = everyones(where, 2, 3).sum(0)
    got = hvd.allreduce(values(R, 2, 3), compression=Doubled, op=hvd.Sum, process_set=where)
    assert got.dtype == torch.float32 and torch.equal(got, right)
    pair = hvd.grouped_allreduce([values(R, 2, 3), values(R, 4)], compression=Doubled, op=hvd.Sum, process_set=where)
    assert torch.equal(pair[0], right) and torch.equal(pair[1], everyones(where, 4).sum(0))
    for call in (hvd.allreduce, hvd.reducescatter):
        for what in (None, "fp16", hvd.Compression, object()):
            with pytest.raises(TypeError, match="is no compressor"):
                call(torch.ones(2), compression=what)


@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
def test_sparse_allreduce(where, op):
    def sparse(rank, rows):
        generator = torch.Generator().manual_seed(100 * rows + rank)
        dense = torch.rand(rows, 4, generator=generator)
        return torch.where(torch.rand(rows, 1, generator=generator) < 0.3, dense, 0.0).to_sparse(1 + rows % 2)

    sizes = [17, 32, 5, 12]
    waits = [hvd.sparse_allreduce_async(sparse(R, rows), name=f"sparse.{rows}", op=op, process_set=where) for rows in sizes]
    for rows, wait in zip(sizes, waits, strict=True):
        got = wait()
        right = sum(sparse(rank, rows).to_dense() for rank in where.ranks) / (where.size() if op == hvd.Average else 1)
        assert got.is_sparse and got.shape == (rows, 4)
        torch.testing.assert_close(got.to_dense(), right)


def test_sparse_allreduce_adds_rows_that_occur_twice():
    twice = torch.sparse_coo_tensor([[1, 1]], [1.0, 2.0], (3,), check_invariants=True)
    assert hvd.sparse_allreduce_async(twice, "twice", hvd.Sum)().to_dense().tolist() == [0, 3 * N, 0]
    for tensor, op in [(torch.ones(2), hvd.Sum), (twice, hvd.Max)]:
        with pytest.raises(ValueError, match="sparse COO tensor and op Average or Sum"):
            hvd.sparse_allreduce_async(tensor, "wrong", op)


# -- handles and objects ----------------------------------------------------------------------------------------------

def test_poll_tells_whether_an_operation_has_ended():
    if R == 0:
        handles = [hvd.allreduce_async(torch.ones(2), name=f"polled.{i}", op=hvd.Sum) for i in range(3)]
        assert not any(map(hvd.poll, handles))
        MPI.COMM_WORLD.Barrier()
    else:
        MPI.COMM_WORLD.Barrier()
        handles = [hvd.allreduce_async(torch.ones(2), name=f"polled.{i}", op=hvd.Sum) for i in range(3)]
    assert [hvd.synchronize(one).tolist() for one in handles] == [[N, N]] * 3
    assert all(map(hvd.poll, handles))
    for nothing in (None, 7, "handle"):
        assert hvd.synchronize(nothing) is None
        with pytest.raises(ValueError, match="no handle"):
            hvd.poll(nothing)


def test_an_error_comes_with_synchronize_each_time():
    handle = hvd.allreduce_async_(torch.ones(R + 1), name="different")
    for _ in range(2):
        with pytest.raises(hvd.HorovodInternalError, match="'different': shapes differ"):
            hvd.synchronize(handle)
    assert hvd.poll(handle)
    assert hvd.allreduce(torch.ones(1), name="different", op=hvd.Sum).tolist() == [N]


def test_average_is_the_older_spelling_of_op():
    for call in (hvd.allreduce, hvd.allreduce_, hvd.grouped_allreduce, hvd.grouped_allreduce_):
        for average, right in [(True, R), (False, None)]:
            tensor = torch.tensor([float(R)])
            with pytest.warns(DeprecationWarning, match="op=Average or op=Sum") as caught:
                got = call([tensor] if "grouped" in call.__name__ else tensor, average=average)
            assert caught[0].filename == __file__
            right = sum(range(N)) / (N if average else 1)
            assert (got[0] if isinstance(got, list) else got).item() == pytest.approx(right)
        with pytest.raises(ValueError, match="both given"):
            call([torch.ones(1)] if "grouped" in call.__name__ else torch.ones(1), average=True, op=hvd.Sum)


def test_ops_by_their_numbers():
    mine = torch.tensor([R + 1.0])
    numbers = {0: (N + 1) / 2, 1: N * (N + 1) / 2, 3: 1, 4: N, 5: [1, 2, 6][N - 1]}
    assert {op: hvd.allreduce(mine, op=op).item() for op in numbers} == pytest.approx(numbers)
    for call in (hvd.allreduce, hvd.allreduce_):
        with pytest.raises(ValueError, match="op 6 is"):
            call(mine, op=6)


def test_objects(where):
    mine = {"rank": R, 0: [1, 2], "tensor": torch.arange(R + 1)}
    for name in (None, "object"):
        got = hvd.broadcast_object(mine, where.ranks[-1], name, where)
        assert got["rank"] == where.ranks[-1] and torch.equal(got["tensor"], torch.arange(where.ranks[-1] + 1))
    assert hvd.broadcast_object(R) == 0
    everyone = hvd.allgather_object({"a": R, **({"b": 42} if R == 1 else {})}, name="objects", process_set=where)
    assert everyone == [{"a": rank, **({"b": 42} if rank == 1 else {})} for rank in where.ranks]
