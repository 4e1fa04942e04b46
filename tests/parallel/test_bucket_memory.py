"""Small gradients lie side by side in the memory of their bucket, and nobody sees anything of it."""

import pytest
import torch

import hvdlite.torch as hvd
from hvdlite import kernels

RANKS = (2, 3)


def model_of(dtype=torch.float32):
    torch.manual_seed(4)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 200), torch.nn.Tanh(),
                               torch.nn.Linear(200, 100)).to(dtype)


def wrap(model, **settings):
    return hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model.named_parameters(), **settings)


def batch(step, rank=None):
    generator = torch.Generator().manual_seed(10 * step + (hvd.rank() if rank is None else rank))
    return torch.randn(4, 6, generator=generator)


def backward(model, step, rank=None):
    dtype = next(model.parameters()).dtype
    model(batch(step, rank).to(dtype)).square().mean().backward()


def right(step, weights):
    """The mean of all ranks' gradients, computed here."""
    gradients = []
    for rank in range(hvd.size()):
        model = model_of()
        with torch.no_grad():
            for one, value in zip(model.parameters(), weights, strict=True):
                one.copy_(value)
        backward(model, step, rank)
        gradients.append([one.grad for one in model.parameters()])
    return [sum(some) / hvd.size() for some in zip(*gradients, strict=True)]


def weights_of(model):
    return [one.detach().clone() for one in model.parameters()]


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_are_the_mean_and_packed_never(set_to_none, monkeypatch):
    model = model_of()
    optimizer = wrap(model)
    packed = []
    monkeypatch.setattr(kernels, "pack", lambda *arguments: packed.append(arguments))
    small = [one for one in model.parameters() if one.numel() < 8000]
    assert len(small) == 5
    at = None
    for step in range(4):
        before = weights_of(model)
        backward(model, step)
        optimizer.synchronize()
        for got, one in zip(model.parameters(), right(step, before), strict=True):
            torch.testing.assert_close(got.grad, one, rtol=1e-5, atol=1e-7)
        addresses = [one.grad.data_ptr() for one in small]
        assert at in (None, addresses)
        at = addresses
        assert len({one.grad.untyped_storage().data_ptr() for one in small}) == 1
        with optimizer.skip_synchronize():
            optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
    assert not packed


def test_gradients_of_an_earlier_step_that_somebody_keeps():
    """As gradient surgery does: what ``grad`` was stays what it was."""
    model = model_of()
    optimizer = wrap(model)
    kept = []
    for step in range(4):
        before = weights_of(model)
        optimizer.zero_grad()
        backward(model, step)
        optimizer.synchronize()
        for got, one in zip(model.parameters(), right(step, before), strict=True):
            torch.testing.assert_close(got.grad, one, rtol=1e-5, atol=1e-7)
        # The tensors, views of them, and in other steps nothing.
        now = [[one.grad for one in model.parameters()], [one.grad.view(-1)[1:] for one in model.parameters()], [], []][step]
        kept.append((now, [one.clone() for one in now]))
        with optimizer.skip_synchronize():
            optimizer.step()
        for tensors, values in kept:
            assert all(torch.equal(one, value) for one, value in zip(tensors, values, strict=True))


def test_gradients_that_are_put_there_by_the_user():
    model = model_of()
    optimizer = wrap(model)
    for step in range(3):
        for index, one in enumerate(model.parameters()):
            values = torch.full_like(one, float(hvd.rank() + index + step))
            if step == 2 and index % 2:
                one.grad.data = values  # other memory under the same tensor
            else:
                one.grad = values
        optimizer.synchronize()
        for index, one in enumerate(model.parameters()):
            assert (one.grad == (hvd.size() - 1) / 2 + index + step).all()
    assert isinstance(model[0].weight.grad, torch.Tensor)


def test_other_layouts_and_graphs():
    model = torch.nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last)
    optimizer = wrap(model)
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(torch.full((1, 2, 5, 5), float(hvd.rank() + 1))).square().sum()
        loss.backward(create_graph=True)
        optimizer.synchronize()
        assert (hvd.allgather(model.weight.grad.detach().reshape(1, -1), name="w") == model.weight.grad.reshape(1, -1)).all()
        optimizer.zero_grad(set_to_none=True)


def test_bfloat16_and_several_dtypes_in_a_bucket():
    model = torch.nn.ModuleList([torch.nn.Linear(5, 5).to(dtype) for dtype in (torch.bfloat16, torch.float32, torch.float64)])
    optimizer = wrap(model)
    for step in range(3):
        for one in model.parameters():
            one.grad = None if step == 1 else torch.full_like(one, float(hvd.rank() + step))
        optimizer.synchronize()
        want = 0 if step == 1 else (hvd.size() - 1) / 2 + step
        assert all((one.grad == want).all() and one.grad.dtype == one.dtype for one in model.parameters())


def test_accumulated_passes():
    model = model_of()
    optimizer = wrap(model, backward_passes_per_step=2)
    for step in range(3):
        before = weights_of(model)
        backward(model, 2 * step)
        backward(model, 2 * step + 1)
        optimizer.synchronize()
        both = zip(right(2 * step, before), right(2 * step + 1, before), strict=True)
        for got, (one, two) in zip(model.parameters(), both, strict=True):
            torch.testing.assert_close(got.grad, one + two, rtol=1e-5, atol=1e-6)
        with optimizer.skip_synchronize():
            optimizer.step()
        optimizer.zero_grad(set_to_none=step == 1)
