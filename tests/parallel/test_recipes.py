"""What people combine the optimizer with: torch.compile, loss scaling."""

import copy

import pytest
import torch

import hvdlite
import hvdlite.torch as hvd

RANKS = (2,)


def net():
    torch.manual_seed(2)
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 2))


def batch(step):
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + hvd.rank()))


def wrap(model, **settings):
    return hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), named_parameters=model.named_parameters(), **settings)


def train(model, optimizer, steps=3):
    for step in range(steps):
        optimizer.zero_grad()
        model(batch(step)).square().mean().backward()
        optimizer.step()


def flat(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def same_on_ranks(tensor):
    return bool((hvdlite.allgather(tensor.detach()[None], name="same") == tensor).all())


@pytest.fixture(scope="module")
def uncompiled(job):
    model = net()
    train(model, wrap(model))
    return flat(model)


def test_compiled_then_wrapped(uncompiled):
    model = torch.compile(net(), backend="aot_eager")
    assert next(model.named_parameters())[0].startswith("_orig_mod.")
    train(model, wrap(model))
    torch.testing.assert_close(flat(model), uncompiled, rtol=1e-6, atol=1e-6)
    assert same_on_ranks(flat(model))


def test_wrapped_then_compiled(uncompiled):
    model = net()
    optimizer = wrap(model)
    train(torch.compile(model, backend="aot_eager"), optimizer)
    torch.testing.assert_close(flat(model), uncompiled, rtol=1e-6, atol=1e-6)
    assert same_on_ranks(flat(model))


def test_compiled_on_one_rank_only(uncompiled):
    model = net()
    if hvd.rank() == 0:
        model = torch.compile(model, backend="aot_eager")
    else:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    assert same_on_ranks(flat(model))
    hvd.broadcast_parameters(model.named_parameters(), root_rank=0)
    # The optimizer is given the names of the model inside, which are the same everywhere.
    inside = getattr(model, "_orig_mod", model)
    train(model, wrap(inside))
    torch.testing.assert_close(flat(model), uncompiled, rtol=1e-6, atol=1e-6)
    assert same_on_ranks(flat(model))


def scaled(order):
    """Three steps with a loss scale; at the second the last rank's gradient is not finite."""
    model = net()
    optimizer = wrap(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    seen = [flat(model)]
    for step in range(3):
        loss = model(batch(step)).square().mean()
        if step == 1 and hvd.rank() == hvd.size() - 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        order(scaler, optimizer)
        scaler.update()
        optimizer.zero_grad()
        seen.append(flat(model))
    return scaler.get_scale(), seen


def with_synchronize(scaler, optimizer):
    optimizer.synchronize()
    scaler.unscale_(optimizer)
    with optimizer.skip_synchronize():
        scaler.step(optimizer)


def test_loss_scaling_skips_a_step_on_all_ranks_or_none():
    scale, (_, first, second, third) = scaled(with_synchronize)
    assert scale == 512
    assert torch.equal(first, second) and not torch.equal(second, third) and torch.isfinite(third).all()
    assert same_on_ranks(third) and same_on_ranks(torch.tensor(scale))
    plain = net()
    optimizer = wrap(plain)
    for step in (0, 2):
        optimizer.zero_grad()
        plain(batch(step)).square().mean().backward()
        optimizer.step()
    torch.testing.assert_close(third, flat(plain), rtol=1e-6, atol=1e-6)


def test_loss_scaling_with_clipping_in_between():
    def order(scaler, optimizer):
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.01)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        norms.append(norm)

    norms = []
    scale, (start, first, second, third) = scaled(order)
    assert scale == 512 and torch.equal(first, second) and same_on_ranks(third)
    assert (first - start).norm().item() == pytest.approx(0.1 * min(0.01, norms[0].item()), rel=1e-3)
    assert same_on_ranks(norms[0])


def test_loss_scaling_in_the_naive_order_is_refused_on_all_ranks():
    """``scaler.step`` unscales gradients that are on their way: never one rank stepping and one not."""
    if hvd.size() == 1:
        assert scaled(lambda scaler, optimizer: scaler.step(optimizer))[0] == 512
        return
    with pytest.raises(AssertionError, match="synchronize"):
        scaled(lambda scaler, optimizer: scaler.step(optimizer))


def test_loss_scaling_with_accumulation():
    model = net()
    reference = copy.deepcopy(model)
    optimizer = wrap(model, backward_passes_per_step=2)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(2):
        for part in range(2):
            scaler.scale(model(batch(2 * step + part)).square().mean()).backward()
        with_synchronize(scaler, optimizer)
        scaler.update()
        optimizer.zero_grad()
    plain = wrap(reference, backward_passes_per_step=2)
    for step in range(2):
        for part in range(2):
            reference(batch(2 * step + part)).square().mean().backward()
        plain.step()
        plain.zero_grad()
    torch.testing.assert_close(flat(model), flat(reference), rtol=1e-6, atol=1e-6)
    assert scaler.get_scale() == 8 and same_on_ranks(flat(model))
