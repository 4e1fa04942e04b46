"""Adasum of two ranks, against its definition: collectives and the optimizer wrapper."""

import pytest
import torch

import hvdlite.torch as hvd

RANKS = (2,)
R = 0


@pytest.fixture(autouse=True)
def place(job):
    global R
    R = hvd.rank()


def same_on_ranks(*tensors):
    flat = torch.cat([one.detach().flatten() for one in tensors])
    return bool((hvd.allgather(flat[None], name="same") == flat).all())


def adasum(a, b):
    """The definition: a + b, less the half of what each has along the other."""
    dot = (a * b).sum()
    along_a, along_b = dot / (a * a).sum() * a, dot / (b * b).sum() * b
    return a + b - (along_a + along_b) / 2


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.float16, 2e-3)])
def test_adasum_of_two(dtype, tolerance):
    for shape in [(1,), (5,), (40, 30)]:
        a, b = (torch.randn(shape, generator=torch.Generator().manual_seed(k)).to(dtype) for k in range(2))
        right = adasum(a.double(), b.double()).to(dtype)
        torch.testing.assert_close(hvd.allreduce((a, b)[R], op=hvd.Adasum), right, rtol=tolerance, atol=tolerance)
        # Each tensor of a group for itself.
        got = hvd.grouped_allreduce([(a, b)[R], 3 * (b, a)[R][:1]], op=hvd.Adasum)
        torch.testing.assert_close(got[0], right, rtol=tolerance, atol=tolerance)
        second = adasum(3 * a[:1].double(), 3 * b[:1].double()).to(dtype)
        torch.testing.assert_close(got[1], second, rtol=tolerance, atol=3 * tolerance)
        assert same_on_ranks(*got)


def test_adasum_adds_what_is_orthogonal_and_averages_what_is_parallel():
    for mine, right in [
        (torch.tensor([[3.0, 0.0], [0.0, 4.0]][R]), [3, 4]), (torch.tensor([1.0, 2.0]) * (R + 1), [1.5, 3]),
        (torch.tensor([[0.0, 0.0], [5.0, 0.0]][R]), [5, 0]), (torch.zeros(2), [0, 0]),
        (torch.tensor([2.0**70, 0.0]) * (2 * R + 1), [2.0**71, 0]),  # squares that overflow float32
        (torch.tensor([2.0**-80, 0.0]) * (2 * R + 1), [2.0**-79, 0])]:  # and that underflow
        assert hvd.allreduce(mine, op=hvd.Adasum).tolist() == right
    x = torch.tensor([[3.0, 0.0], [0.0, 4.0]][R], requires_grad=True)
    hvd.allreduce(x, op=hvd.Adasum).sum().backward()
    assert x.grad.tolist() == [1, 1]


@pytest.mark.parametrize("compression", [hvd.Compression.none, hvd.Compression.fp16], ids=["none", "fp16"])
def test_an_optimizer_with_adasum_combines_the_steps(compression):
    torch.manual_seed(2)
    starts, gradients = torch.randn(2, 6), torch.randn(3, 2, 2, 6)
    parameters = [torch.nn.Parameter(one.clone()) for one in starts]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(parameters, lr=0.1, momentum=0.9), op=hvd.Adasum, compression=compression, backward_passes_per_step=2)
    alone = [[torch.nn.Parameter(one.clone()) for one in starts] for _ in range(2)]
    plain = [torch.optim.SGD(one, lr=0.1, momentum=0.9) for one in alone]
    for gradient in gradients:
        for half in range(2):
            sum((gradient[R, i] * one).sum() * (half + 1) for i, one in enumerate(parameters)).backward()
        optimizer.synchronize()
        optimizer.step()
        optimizer.zero_grad()
        before = [one.detach().clone() for one in alone[0]]
        for rank in range(2):
            for i, one in enumerate(alone[rank]):
                one.grad = 3 * gradient[rank, i]
            plain[rank].step()
        with torch.no_grad():
            for old, a, b in zip(before, *alone, strict=True):
                change = adasum((a - old).double(), (b - old).double()).float()
                for one in (a, b):
                    one.copy_(old + change)
        tolerance = 1e-5 if compression is hvd.Compression.none else 1e-2
        for one, right in zip(parameters, alone[0], strict=True):
            torch.testing.assert_close(one, right, rtol=tolerance, atol=tolerance)
    assert same_on_ranks(*parameters)
    with pytest.raises(AssertionError, match="Adasum"), optimizer.skip_synchronize():
        pass
