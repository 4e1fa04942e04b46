"""Distributed training equals single-process training on the same global batches."""

import random
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

import hvdlite
import hvdlite.torch as hvd

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import numpy_digits
from digits import load_digits, shard

RANKS = (2, 3)
STEPS, BATCH = 50, 48


def batches(rank, size):
    train, _ = load_digits()
    epoch = 0
    while True:
        yield from shard(train, BATCH, epoch, 0, rank, size)
        epoch += 1


def test_numpy_example_equals_a_single_process():
    def train(rank, size, distributed):
        parameters = numpy_digits.new_parameters(0)
        optimizer = numpy_digits.MomentumSGD(parameters, 0.05)
        if distributed:
            optimizer = hvdlite.DistributedOptimizer(optimizer)
        for _, (images, labels) in zip(range(STEPS), batches(rank, size), strict=False):
            optimizer.step(numpy_digits.loss_and_gradients(parameters, images, labels)[1])
        return parameters

    ours, alone = train(hvd.rank(), hvd.size(), True), train(0, 1, False)
    for name, value in ours.items():
        np.testing.assert_allclose(value, alone[name], rtol=2e-4, atol=2e-5)
        assert (hvdlite.allgather(value[None]) == value).all(), f"{name} differs between ranks"


def model():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.ReLU(), torch.nn.Linear(96, 40), torch.nn.ReLU(),
                               torch.nn.Linear(40, 10)).double()


def train(rank, size, distributed, delays=None, steps=STEPS):
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    if distributed:
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=net.named_parameters())
    if delays:
        pause = threading.Event()
        for parameter in net.parameters():
            parameter.register_hook(lambda gradient: (pause.wait(delays.random() * 2e-3), None)[1])
    for _, (images, labels) in zip(range(steps), batches(rank, size), strict=False):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(torch.from_numpy(images).double()), torch.from_numpy(labels)).backward()
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in net.parameters()])


def test_torch_equals_a_single_process():
    ours, alone = train(hvd.rank(), hvd.size(), True), train(0, 1, False)
    torch.testing.assert_close(ours, alone, rtol=1e-9, atol=1e-11)
    assert (hvd.allgather(ours[None]) == ours).all()


def test_random_delays_in_hooks_change_no_bit():
    runs = [train(hvd.rank(), hvd.size(), True, random.Random(10 * k + hvd.rank()), steps=12) for k in range(2)]
    assert torch.equal(*runs)


def test_parameters_without_gradients_on_some_ranks():
    n = hvd.size()
    a, b = (torch.nn.Parameter(torch.zeros(())) for _ in "ab")
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([a, b], lr=1.0), named_parameters=[("a", a), ("b", b)])
    (4 * a if hvd.rank() == 0 else 2 * b).backward()
    optimizer.step()
    assert (a.item(), b.item()) == pytest.approx((-4 / n, -2 * (n - 1) / n))


def test_synchronize_clip_step():
    w = torch.nn.Parameter(torch.zeros(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([w], lr=1.0), named_parameters=[("w", w)], op=hvd.Sum)
    ((hvd.rank() + 1) * torch.tensor([3.0, 4.0]) * w).sum().backward()
    if hvd.size() > 1:
        with pytest.raises(AssertionError, match="in flight"):
            optimizer.zero_grad()
    optimizer.synchronize()
    norm = torch.nn.utils.clip_grad_norm_([w], 1.0)
    with optimizer.skip_synchronize():
        optimizer.step()
    assert norm.item() == pytest.approx(5 * hvd.size() * (hvd.size() + 1) / 2)
    torch.testing.assert_close(w.detach(), -torch.tensor([0.6, 0.8]))
    optimizer.zero_grad(set_to_none=True)
    assert w.grad is None


def test_wrapping_keeps_class_groups_and_schedulers():
    w = torch.nn.Parameter(torch.zeros(1))
    plain = torch.optim.Adam([w], lr=1.0)
    wrapped = hvd.DistributedOptimizer(plain, named_parameters=[("w", w)])
    assert isinstance(wrapped, torch.optim.Adam) and wrapped.param_groups is plain.param_groups
    scheduler = torch.optim.lr_scheduler.StepLR(wrapped, 1, 0.1)
    w.sum().backward()
    wrapped.step()
    scheduler.step()
    assert wrapped.param_groups[0]["lr"] == pytest.approx(0.1)


def test_wrong_names_are_refused():
    w, v = (torch.nn.Parameter(torch.zeros(1)) for _ in "wv")
    for pairs, says in [([("a", w), ("a", v)], "'a' twice"), ([("a", w)], "leaves out 1"), ([w, v], "no .name, parameter.")]:
        with pytest.raises(ValueError, match=says):
            hvd.DistributedOptimizer(torch.optim.SGD([w, v], lr=1.0), named_parameters=pairs)


def test_state_from_a_root_reaches_all_without_a_step():
    root = hvd.size() - 1
    w = torch.nn.Parameter(torch.full((3,), float(hvd.rank())))
    optimizer = torch.optim.Adam([w], lr=0.1)
    if hvd.rank() == root:
        optimizer.param_groups[0]["lr"] = 0.123
        for _ in range(3):
            w.grad = torch.ones(3)
            optimizer.step()
    before = w.detach().clone()
    hvd.broadcast_optimizer_state(optimizer, root)
    assert torch.equal(w, before)
    state = optimizer.state_dict()
    assert state["param_groups"][0]["lr"] == 0.123 and state["state"][0]["step"] == 3
    hvd.broadcast_parameters([("w", w)], root)
    assert torch.equal(hvd.allgather(w.detach()[None]), w.detach().expand(hvd.size(), 3))


def test_plain_gradients_that_differ_between_ranks_are_told_at_the_first_step():
    class Nothing:
        def step(self, gradients):
            pass

    if hvdlite.size() == 1:
        return
    gradients = {"a": np.ones(3, np.float32)}
    if hvdlite.rank() == 1:
        gradients["b"] = np.ones(2_000_000, np.float32)  # a bucket that the others do not have
    with pytest.raises(hvdlite.MismatchError, match=r"'b .*on rank 1 only"):
        hvdlite.DistributedOptimizer(Nothing()).step(gradients)
