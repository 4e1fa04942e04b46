"""DistributedDataParallel with hvdlite's hook trains as without it."""

import os
import tempfile

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import hvdlite
from hvdlite.runtime import default_runtime
from hvdlite.torch.ddp import ddp_hook

RANKS = (2,)


@pytest.fixture(autouse=True, scope="module")
def process_group(job):
    store = os.path.join(tempfile.gettempdir(), f"ddp-{os.environ['HVDLITE_JOB']}")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=hvdlite.rank(), world_size=hvdlite.size())
    yield
    dist.destroy_process_group()
    if hvdlite.rank() == 0 and os.path.exists(store):
        os.unlink(store)


class Branches(torch.nn.Module):
    """Uses its parameters in another order than it makes them, and one branch on some steps only."""

    def __init__(self):
        super().__init__()
        self.last, self.side, self.first = torch.nn.Linear(40, 3), torch.nn.Linear(20, 40), torch.nn.Linear(20, 40)

    def forward(self, input, uses_side=True):
        hidden = self.first(input) + (self.side(input) if uses_side else 0)
        return self.last(hidden.tanh())


def model_of(with_hook, make=Branches, **settings):
    torch.manual_seed(3)
    # Buckets of 1 kB: several of them, and others after the first step, when torch knows the order.
    model = DistributedDataParallel(make(), bucket_cap_mb=0.001, **settings)
    if with_hook:
        model.register_comm_hook(state=None, hook=ddp_hook)
    return model


def data(step, rows=6):
    generator = torch.Generator().manual_seed(10 * step + hvdlite.rank())
    return torch.randn(rows, 20, generator=generator)


def flat(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def check_same(train):
    """``train(with_hook)`` returns trained parameters."""
    with_hook, without = train(True), train(False)
    torch.testing.assert_close(with_hook, without, rtol=1e-6, atol=1e-6)
    ranks = hvdlite.allgather(with_hook[None], name="check")
    assert (ranks == ranks[0]).all()


@pytest.mark.parametrize("settings", [{}, {"gradient_as_bucket_view": True}, {"static_graph": True}], ids=str)
def test_trains_as_without(settings):
    def train(with_hook):
        model = model_of(with_hook, **settings)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(10):
            optimizer.zero_grad()
            model(data(step)).square().mean().backward()
            optimizer.step()
        return flat(model)

    check_same(train)


def test_with_unused_parameters_and_accumulation():
    def train(with_hook):
        model = model_of(with_hook, find_unused_parameters=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(6):
            with model.no_sync():
                model(data(step)).square().mean().backward()
            model(data(step + 50), uses_side=step % 2 == hvdlite.rank()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return flat(model)

    check_same(train)


def test_two_models_in_one_backward():
    def train(with_hook):
        first, second = model_of(with_hook, lambda: torch.nn.Linear(20, 20)), model_of(with_hook, lambda: torch.nn.Linear(20, 20))
        optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
        for step in range(5):
            optimizer.zero_grad()
            second(first(data(step)).tanh()).square().mean().backward()
            optimizer.step()
        return torch.cat([flat(first), flat(second)])

    check_same(train)


def test_ranks_with_fewer_batches_join():
    def train(with_hook):
        model = model_of(with_hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with model.join():
            for step in range(4 + 2 * hvdlite.rank()):
                optimizer.zero_grad()
                model(data(step)).square().mean().backward()
                optimizer.step()
        return flat(model)

    check_same(train)


def test_names_do_not_grow_in_number():
    model = model_of(True)
    for step in range(8):
        model(data(step)).sum().backward()
    before = str(default_runtime()._labels["ddp"])  # as count(7)
    for step in range(8):
        model(data(step)).sum().backward()
    assert str(default_runtime()._labels["ddp"]) == before


def test_half_precision_gradients_are_summed_in_float32():
    model = model_of(True, lambda: torch.nn.Linear(4, 1, bias=False).half())
    model(torch.full((1, 4), 40000.0).half()).sum().backward()
    assert model.module.weight.grad.tolist() == [[40000.0] * 4]


def test_backward_raises_the_error_of_the_exchange():
    number = int(default_runtime().label("ddp").removeprefix("ddp."))
    name = f"ddp.{number + 1}"
    model = model_of(True, lambda: torch.nn.Linear(4, 1))
    if hvdlite.rank() == 0:
        with pytest.raises(hvdlite.MismatchError, match=name):
            model(torch.ones(2, 4)).sum().backward()
    else:
        default_runtime().label("ddp")
        with pytest.raises(hvdlite.MismatchError, match=name):
            hvdlite.allreduce(torch.ones(7), name=name)
