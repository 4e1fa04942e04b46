"""Every collective over MPI, for NumPy and torch, against closed forms."""

import numpy as np
import pytest
import torch

import hvdlite as hvd

RANKS = (1, 2, 3, 4)
DTYPES = ["float16", "bfloat16", "float32", "float64", "int8", "uint8", "int16", "int32", "int64"]


def make(kind, dtype, values):
    tensor = torch.tensor(values).to(getattr(torch, dtype))
    return tensor if kind == "torch" else tensor.numpy()


def both_kinds(test):
    pairs = [(kind, dtype) for kind in ("torch", "numpy") for dtype in DTYPES if (kind, dtype) != ("numpy", "bfloat16")]
    return pytest.mark.parametrize("kind, dtype", pairs)(test)


@both_kinds
@pytest.mark.parametrize("count", [0, 1, 5, 3000, 40000])
def test_allreduce(kind, dtype, count):
    n, r = hvd.size(), hvd.rank()
    tensor = make(kind, dtype, [(i % 7) + r for i in range(count)])
    before = tensor.tolist()
    base = [i % 7 for i in range(count)]
    for op, expected in [
        (hvd.Sum, [n * v + n * (n - 1) // 2 for v in base]), (hvd.Min, base), (hvd.Max, [v + n - 1 for v in base])]:
        got = hvd.allreduce(tensor, op=op)
        assert type(got) is type(tensor) and got.dtype == tensor.dtype and tuple(got.shape) == (count,)
        assert got.tolist() == expected
    assert tensor.tolist() == before
    product = hvd.allreduce(make(kind, dtype, [2] * count), op=hvd.Product)
    assert product.tolist() == [2**n] * count


@both_kinds
def test_allreduce_in_place_average_and_scales(kind, dtype):
    n = hvd.size()
    tensor = make(kind, dtype, [6 * (hvd.rank() + 1)] * 4)
    assert hvd.allreduce_(tensor, op=hvd.Average) is tensor
    assert tensor.tolist() == [3 * (n + 1)] * 4
    scaled = hvd.allreduce(make(kind, dtype, [2, 4]), op=hvd.Sum, prescale_factor=0.5, postscale_factor=2.0)
    assert scaled.tolist() == [2 * n, 4 * n]


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("count", [1, 5, 20000])
def test_minimum_and_maximum_let_nan_through_on_every_rank(dtype, count):
    values = np.full(count, hvd.rank(), dtype)
    values[0] = np.nan if hvd.rank() == 0 else 1
    for op, right in (hvd.Min, 0), (hvd.Max, hvd.size() - 1):
        result = hvd.allreduce(values, op=op)
        assert np.isnan(result[0]) and (result[1:] == right).all()


def test_halves_sum_in_float32():
    assert hvd.allreduce(torch.full((3,), 40000.0).half()).tolist() == [40000.0] * 3
    if hvd.size() == 2:
        tensor = torch.tensor([[256.0, 1.0], [3.0, 2.0]][hvd.rank()]).bfloat16()
        assert hvd.allreduce(tensor, op=hvd.Sum).tolist() == [260.0, 3.0]
        assert hvd.allreduce(tensor).tolist() == [130.0, 1.5]
        assert torch.isinf(hvd.allreduce(torch.tensor([40000.0]).half(), op=hvd.Sum)).all()
        assert hvd.allreduce(np.array([200, 100][hvd.rank()], np.uint8), op=hvd.Sum) == 44


def test_grouped_allreduce_of_mixed_dtypes():
    n = hvd.size()
    tensors = [torch.ones(3), torch.ones(2, 2, dtype=torch.int64), torch.ones(70000, dtype=torch.float64), torch.ones(5)]
    got = hvd.grouped_allreduce(tensors, op=hvd.Sum, name="group")
    assert all(torch.equal(one, n * tensor) for one, tensor in zip(got, tensors, strict=True))
    assert hvd.grouped_allreduce_(tensors, op=hvd.Sum)[1] is tensors[1]
    assert tensors[2][69999] == n


@both_kinds
def test_allgather_of_unequal_lengths(kind, dtype):
    r, n = hvd.rank(), hvd.size()
    got = hvd.allgather(make(kind, dtype, [[r, r + 1]] * (2 * r)) if r else make(kind, dtype, [[0, 0]])[:0])
    assert got.tolist() == [[rank, rank + 1] for rank in range(n) for _ in range(2 * rank)]


def test_bool_moves_but_does_not_add():
    mine = torch.tensor([hvd.rank() == 0, True])
    assert hvd.allgather(mine).tolist() == [True, True] + [False, True] * (hvd.size() - 1)
    assert hvd.broadcast(mine, 0).tolist() == [True, True]
    with pytest.raises(ValueError, match="bool"):
        hvd.allreduce(mine)


@both_kinds
def test_broadcast_from_every_root(kind, dtype):
    for root in range(hvd.size()):
        tensor = make(kind, dtype, [[hvd.rank() + 1] * 3] * 2)
        assert hvd.broadcast(tensor, root).tolist() == [[root + 1] * 3] * 2
        assert hvd.broadcast_(tensor, root) is tensor and tensor.tolist() == [[root + 1] * 3] * 2


@both_kinds
def test_alltoall(kind, dtype):
    r, n = hvd.rank(), hvd.size()
    even = hvd.alltoall(make(kind, dtype, [10 * r + i for i in range(n)]))
    assert even.tolist() == [10 * rank + r for rank in range(n)]
    tensor = make(kind, dtype, [[10 * r + to] * 2 for to in range(n) for _ in range(to)])
    if n == 1:
        tensor = make(kind, dtype, [[0, 0]])[:0]
    got, received = hvd.alltoall(tensor, splits=list(range(n)))
    assert received.tolist() == [r] * n
    assert got.tolist() == [[10 * rank + r] * 2 for rank in range(n) for _ in range(r)]


@both_kinds
def test_reducescatter(kind, dtype):
    r, n = hvd.rank(), hvd.size()
    got = hvd.reducescatter(make(kind, dtype, [[i, i] for i in range(5)]), op=hvd.Sum)
    begin = sum(5 // n + (k < 5 % n) for k in range(r))
    assert got.tolist() == [[n * i, n * i] for i in range(begin, begin + 5 // n + (r < 5 % n))]
    assert hvd.reducescatter(make(kind, dtype, [3, 3, 3, 3])).tolist() == [3] * (4 // n + (r < 4 % n))


def test_scalars_and_empties():
    r, n = hvd.rank(), hvd.size()
    assert hvd.allreduce(torch.tensor(3.0 + r), op=hvd.Sum).shape == ()
    assert hvd.allreduce(2.0) == 2.0
    assert hvd.allgather(torch.ones(0, 3)).shape == (0, 3)
    got, received = hvd.alltoall(torch.empty(0, 2), splits=[0] * n)
    assert got.shape == (0, 2) and received.tolist() == [0] * n
    for call in (hvd.allgather, hvd.reducescatter):
        with pytest.raises(ValueError, match="no dimension"):
            call(torch.tensor(1.0))


def test_strided_torch_tensors():
    r, n = hvd.rank(), hvd.size()
    base = torch.arange(12.0).reshape(4, 3) + 100 * r
    hvd.broadcast_(base[:, 1], root_rank=0)
    assert base[:, 1].tolist() == [1, 4, 7, 10] and base[:, 0].tolist() == [100 * r + 3 * i for i in range(4)]
    assert torch.equal(hvd.allgather(base[::2, :1]), torch.tensor([[100.0 * k + 6 * i] for k in range(n) for i in range(2)]))
    assert hvd.allreduce(torch.tensor([2.0]).expand(4), op=hvd.Sum).tolist() == [2.0 * n] * 4
    with pytest.raises(ValueError, match="overlap"):
        hvd.allreduce_(torch.tensor([2.0]).expand(4))
    image = torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last)
    assert hvd.allreduce_(image, op=hvd.Sum) is image and torch.equal(image, torch.full((2, 3, 4, 4), float(n)))


def test_anything_with_the_array_interface():
    class Wrapped:
        def __init__(self):
            self.data = np.arange(3.0)

        def __dlpack__(self, **arguments):
            return self.data.__dlpack__(**arguments)

        def __dlpack_device__(self):
            return self.data.__dlpack_device__()

    assert hvd.allreduce(Wrapped(), op=hvd.Sum).tolist() == [0, hvd.size(), 2 * hvd.size()]
    assert hvd.allgather([1, 2]).tolist() == [1, 2] * hvd.size()


def test_barrier_and_topology():
    hvd.barrier()
    assert hvd.barrier_async().wait(20) is None
    assert (hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()) == (hvd.rank(), hvd.size(), 0, 1)


def test_many_in_random_order_with_kinds_mixed():
    n, r = hvd.size(), hvd.rank()
    for round_ in range(3):
        handles = {}
        for i in np.random.default_rng([round_, r]).permutation(100):
            value = torch.full((int(i) + 1,), float(i + r))
            if i % 5 == 0:
                handles[i] = hvd.allgather_async(value, name=f"mix{i}")
            elif i % 7 == 0:
                handles[i] = hvd.broadcast_async(value, int(i) % n, name=f"mix{i}")
            else:
                handles[i] = hvd.allreduce_async(value, op=hvd.Sum, name=f"mix{i}")
            if len(handles) == 50:
                hvd.barrier()
        for i, handle in handles.items():
            got = handle.wait(30)
            expected = {0: [float(i + k) for k in range(n) for _ in range(i + 1)]}.get(i % 5)
            if expected is None:
                one = float(i + i % n) if i % 7 == 0 else float(n * i + n * (n - 1) // 2)
                expected = [one] * (int(i) + 1)
            assert got.tolist() == expected and handle.done()
