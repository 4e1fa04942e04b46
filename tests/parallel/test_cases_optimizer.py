"""Public bug reports as tests, on two ranks: the distributed optimizer, its state, the layers it meets.

Each test names the reports that seeded it and what went wrong there; its name starts with the case's letter and number.
C5 and C9 are in test_recipes.py, C11 is in test_sync_batch_norm.py. Where a test says nothing else, rank r's loss is
(r + 1) * w and the learning rate 1, so that an averaged step changes w by -1.5.
"""

import copy
import json
import subprocess
import sys
import warnings

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import hvdlite.torch as hvd

RANKS = (2,)


def scalars(count):
    return [torch.nn.Parameter(torch.zeros(())) for _ in range(count)]


def wrap(*parameters, **settings):
    return hvd.DistributedOptimizer(
        torch.optim.SGD(parameters, lr=1.0), [(f"w{i}", one) for i, one in enumerate(parameters)], **settings)


def backward(*parameters):
    sum((hvd.rank() + 1) * one for one in parameters).backward()


def same_on_ranks(*tensors):
    flat = torch.cat([one.detach().flatten() for one in tensors])
    return bool((hvd.allgather(flat[None], name="same") == flat).all())


def test_c1_passes_left_over_at_the_end_of_an_epoch():
    """horovod/horovod#2497, #1549: an accumulation that was not full made the next epoch fail."""
    (w,) = scalars(1)
    optimizer = wrap(w, backward_passes_per_step=2)
    for done in range(1, 6):
        backward(w)
        if done in (2, 4, 5):
            optimizer.step()
            optimizer.zero_grad()
    assert w.item() == -7.5
    backward(w)
    backward(w)
    optimizer.step()
    assert w.item() == -10.5 and same_on_ranks(w)


@pytest.mark.filterwarnings("error:.*skip_synchronize")
def test_c1_a_pass_too_many():
    """horovod/horovod#2466, #543: the pass was added to a gradient on its way."""
    (w,) = scalars(1)
    optimizer = wrap(w, backward_passes_per_step=2)
    backward(w)
    backward(w)
    with pytest.raises(AssertionError, match="backward_passes_per_step=2"):
        backward(w)
    for _ in range(2):
        with pytest.raises(AssertionError, match="the gradients are lost"):
            optimizer.step()
    optimizer.synchronize()
    assert w.grad is None and w.item() == 0
    optimizer.zero_grad()
    backward(w)
    backward(w)
    optimizer.step()
    assert w.item() == -3 and same_on_ranks(w)


@pytest.mark.filterwarnings("error:.*skip_synchronize")
def test_c1_zero_grad_between_backward_and_step():
    """horovod/horovod#1417, #2420, #3160, #3405: it raced with the exchange; set_to_none was not accepted."""
    (w,) = scalars(1)
    optimizer = wrap(w, backward_passes_per_step=2)
    backward(w)
    with pytest.raises(AssertionError, match="zero_grad"):
        optimizer.zero_grad()
    backward(w)
    optimizer.synchronize()
    optimizer.zero_grad()
    assert w.item() == 0
    backward(w)
    backward(w)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    assert w.grad is None
    backward(w)
    backward(w)
    optimizer.step()
    assert w.item() == -6 and same_on_ranks(w)


def test_c2_names_that_cannot_be_used():
    """horovod/horovod#1110, #784: two gradients under one name, one under none."""
    first, second = scalars(2)
    sgd = torch.optim.SGD([first, second], lr=1.0)
    with pytest.raises(ValueError, match=r"'fc.weight' twice"):
        hvd.DistributedOptimizer(sgd, [("fc.weight", first), ("fc.weight", second)])
    with pytest.raises(ValueError, match=r"leaves out 1 of .*0\.1"):
        hvd.DistributedOptimizer(sgd, [("fc.weight", first)])


def test_c2_more_names_than_parameters_and_groups_without_names():
    """horovod/horovod#1389, #2670: legal parameter groups were refused."""
    parameters, frozen = scalars(6), torch.nn.Parameter(torch.zeros(3), requires_grad=False)
    named = [("frozen", frozen), *((f"w{i}", one) for i, one in enumerate(parameters))]
    groups = [{"params": parameters[:3]}, {"params": parameters[3:], "lr": 2.0}]
    for names in (named, None):
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(groups, lr=1.0), names)
        backward(*parameters)
        optimizer.step()
        optimizer.zero_grad()
    assert [one.item() for one in parameters] == [-3] * 3 + [-6] * 3
    assert frozen.grad is None and not frozen.any()


def test_c2_two_optimizers_at_once_without_names():
    """horovod/horovod#2716, #2559: the second model's backward met the first one's names."""
    models = [torch.nn.Linear(1, 1) for _ in range(2)]
    optimizers = []
    for model in models:
        for one in model.parameters():
            torch.nn.init.zeros_(one)
        optimizers.append(hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0)))
    for index in (0, 1) if hvd.rank() == 0 else (1, 0):
        backward(*(10**index * one.sum() for one in models[index].parameters()))
    for optimizer in optimizers:
        optimizer.step()
    assert [[one.item() for one in model.parameters()] for model in models] == [[-1.5, -1.5], [-15, -15]]


def test_c2_two_models_with_equal_names():
    """horovod/horovod#1894: the second broadcast_parameters met the first one's names."""
    models = [torch.nn.Linear(2, 2) for _ in range(2)]
    for index, model in enumerate(models):
        for one in model.parameters():
            torch.nn.init.constant_(one, 10 * index + hvd.rank())
        hvd.broadcast_parameters(model.state_dict(), 0)
    for index, model in enumerate(models):
        assert all((one == 10 * index).all() for one in model.parameters())


@pytest.mark.parametrize("op, change", [(hvd.Average, -1.5), (hvd.Sum, -3)])
def test_c2_a_new_wrapper_every_epoch(op, change):
    """horovod/horovod#549: every wrapper added hooks to the same parameters."""
    w, v = scalars(2)
    sgd = torch.optim.SGD([w, v], lr=1.0)
    for epoch in range(1, 6):
        optimizer = hvd.DistributedOptimizer(sgd, [("w", w), ("v", v)], op=op)
        backward(w, v)
        optimizer.step()
        optimizer.zero_grad()
        assert w.item() == v.item() == epoch * change
    assert same_on_ranks(w)


def test_c3_gradients_on_some_ranks_only():
    """horovod/horovod#597, #1618: the rank with a gradient waited for the others."""
    a, b = scalars(2)
    optimizer = wrap(a, b)
    (4 * a if hvd.rank() == 0 else 2 * b).backward()
    optimizer.step()
    assert (a.item(), b.item()) == (-2, -1) and same_on_ranks(a, b)


def test_c3_missing_gradients_are_matched_by_name():
    """sands-lab/grace#7: they were matched in the order of a set, which differs between ranks."""
    order = range(20) if hvd.rank() == 0 else reversed(range(20))  # so that addresses, and sets, are in another order
    made = {k: torch.nn.Parameter(torch.zeros(3)) for k in order}
    parameters = [made[k] for k in range(20)]
    w = torch.nn.Parameter(torch.zeros(3))
    optimizer = wrap(*parameters, w)
    (sum(k * one.sum() for k, one in enumerate(parameters)) if hvd.rank() == 0 else 2 * w.sum()).backward()
    optimizer.step()
    assert [one.tolist() for one in parameters] == [[-k / 2] * 3 for k in range(20)]
    assert w.tolist() == [-1] * 3


def test_c3_thawed_frozen_and_added_later():
    """pytorch/pytorch#14675, Lightning-AI/pytorch-lightning#20340: what was thawed late was never averaged."""
    w, c, d = scalars(3)
    c.requires_grad_(False)
    optimizer = wrap(w, c)
    used = [w]
    expected = {w: 0.0, c: 0.0, d: 0.0}

    def two_steps():
        for _ in range(2):
            optimizer.zero_grad()
            backward(*used)
            optimizer.step()
        expected.update({one: expected[one] - 3 for one in used})
        assert {one: one.item() for one in expected} == expected and same_on_ranks(w, c, d)

    two_steps()
    c.requires_grad_(True)
    used.append(c)
    two_steps()
    optimizer.add_param_group({"params": [d]})
    used.append(d)
    two_steps()
    w.requires_grad_(False)
    used.remove(w)
    two_steps()


def test_c4_clipping_exchanges_once(tmp_path):
    """horovod/horovod#1099: step() after synchronize() reduced everything again and undid the clipping."""
    w = torch.nn.Parameter(torch.zeros(2))
    optimizer = wrap(w, op=hvd.Sum)
    hvd.start_timeline(str(tmp_path / "timeline.json"))
    ((hvd.rank() + 1) * torch.tensor([3.0, 4.0]) * w).sum().backward()
    optimizer.synchronize()
    norm = torch.nn.utils.clip_grad_norm_([w], 1.0)
    with optimizer.skip_synchronize():
        optimizer.step()
    hvd.stop_timeline()
    assert norm.item() == pytest.approx(15)
    torch.testing.assert_close(w.detach(), -torch.tensor([0.6, 0.8]), rtol=1e-6, atol=1e-6)
    assert same_on_ranks(w)
    if hvd.rank() == 0:
        events = json.loads((tmp_path / "timeline.json").read_text())
        assert [event["name"] for event in events].count("ALLREDUCE") == 1


def test_c4_synchronize_then_step():
    """horovod/horovod#1099: the second exchange is warned of; an exception leaves nothing switched off."""
    (w,) = scalars(1)
    optimizer = wrap(w)
    backward(w)
    optimizer.synchronize()
    with pytest.warns(UserWarning, match="skip_synchronize"):
        optimizer.step()
    assert w.item() == -1.5
    optimizer.zero_grad()
    with pytest.raises(ZeroDivisionError), optimizer.skip_synchronize():
        raise ZeroDivisionError
    backward(w)
    optimizer.step()
    assert w.item() == -3


@pytest.mark.parametrize("made_before_wrapping", [True, False])
@pytest.mark.parametrize("kind, settings, change", [
    (torch.optim.SGD, {}, -1.665), (torch.optim.Adam, {}, -1.11), (torch.optim.AdamW, {"weight_decay": 0}, -1.11)])
def test_c6_classes_and_schedulers(kind, settings, change, made_before_wrapping):
    """horovod/horovod#2632, #1888: a scheduler warned, or drove another optimizer than the one that steps."""
    (w,) = scalars(1)
    plain = kind([w], lr=1.0, **settings)
    scheduler = torch.optim.lr_scheduler.StepLR(plain, 1, 0.1) if made_before_wrapping else None
    optimizer = hvd.DistributedOptimizer(plain, [("w", w)])
    scheduler = scheduler or torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)
    assert isinstance(optimizer, kind) and optimizer.param_groups is plain.param_groups
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(3):
            assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1**step)
            optimizer.zero_grad()
            backward(w)
            optimizer.step()
            scheduler.step()
    assert w.item() == pytest.approx(change, rel=1e-5)


def test_c6_a_scheduler_drives_what_is_loaded_later():
    """horovod/horovod#1888: loading, which all but the root do, left the scheduler with the groups of before."""
    (w,) = scalars(1)
    plain = torch.optim.SGD([w], lr=1.0, momentum=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(plain, 1, 0.1)
    optimizer = hvd.DistributedOptimizer(plain, [("w", w)])
    backward(w)
    optimizer.step()
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert optimizer.param_groups is plain.param_groups and optimizer.state is plain.state
    scheduler.step()
    optimizer.zero_grad()
    backward(w)
    optimizer.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)
    assert w.item() == pytest.approx(-1.5 - 0.1 * (0.5 * 1.5 + 1.5)) and same_on_ranks(w)


LOADS = """
import sys, torch
loaded = torch.load(sys.argv[1])
w = torch.nn.Parameter(torch.zeros(()))
optimizer = torch.optim.Adam([w], lr=1.0)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)
optimizer.load_state_dict(loaded["o"])
scheduler.load_state_dict(loaded["s"])
print(optimizer.state[w]["step"].item(), scheduler.last_epoch, [m for m in sys.modules if m.startswith("hvdlite")])
"""


def test_c6_saved_state_needs_torch_only(tmp_path):
    """pytorch/pytorch#58127, lucidrains/DALLE-pytorch#268: PicklingError, or a checkpoint that wants the library."""
    (w,) = scalars(1)
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam([w], lr=1.0), [("w", w)])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)
    for _ in range(2):
        backward(w)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    copied = copy.deepcopy(optimizer.state_dict())
    assert copied["state"][0]["step"] == 2 and copied["param_groups"][0]["lr"] == pytest.approx(0.01)
    if hvd.rank() == 0:
        torch.save({"o": optimizer.state_dict(), "s": scheduler.state_dict()}, tmp_path / "state.pt")
        done = subprocess.run([sys.executable, "-c", LOADS, tmp_path / "state.pt"], capture_output=True, text=True, timeout=60)
        assert done.stdout == "2.0 2 []\n", done.stderr


def test_c6_loading_between_backward_and_step():
    """pytorch/pytorch#58127: gradients on their way belong to a step that will not come."""
    (w,) = scalars(1)
    optimizer = wrap(w)
    state = copy.deepcopy(optimizer.state_dict())
    backward(w)
    optimizer.load_state_dict(state)
    optimizer.zero_grad()
    backward(w)
    optimizer.step()
    assert w.item() == -1.5 and same_on_ranks(w)


def twice(linear, input, use_reentrant):
    return linear(checkpoint(linear, input, use_reentrant=use_reentrant).tanh()).square().mean()


@pytest.mark.parametrize("use_reentrant, passes", [(False, 1), (True, 2)])
def test_c7_a_weight_used_twice_under_checkpointing(use_reentrant, passes):
    """pytorch/pytorch#81296, deepspeedai/DeepSpeed#2103: the hook fired for a part of the gradient."""
    torch.manual_seed(7)
    linear, batches = torch.nn.Linear(4, 4), torch.randn(2, 3, 4, requires_grad=True)
    alone = copy.deepcopy(linear)
    twice(alone, batches.flatten(0, 1), False).backward()
    optimizer = wrap(*linear.parameters(), backward_passes_per_step=passes)
    twice(linear, batches[hvd.rank()], use_reentrant).backward()
    optimizer.synchronize()
    for one, other in zip(linear.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-6, atol=1e-6)
    assert same_on_ranks(linear.weight.grad, linear.bias.grad)


def test_c7_a_hook_that_fires_twice_is_told():
    """microsoft/FocalNet#4: reentrant checkpointing adds to a gradient that has left already."""
    torch.manual_seed(7)
    linear, batches = torch.nn.Linear(4, 4), torch.randn(2, 3, 4, requires_grad=True)
    optimizer = wrap(*linear.parameters())
    with pytest.raises(AssertionError, match="backward_passes_per_step"):
        twice(linear, batches[hvd.rank()], True).backward()
    optimizer.synchronize()
    assert linear.weight.grad is None or same_on_ranks(linear.weight.grad)


def embedding(indices, sparse_as_dense, kind=torch.optim.SGD):
    """One step of a (4, 2) embedding of zeros that this rank uses at ``indices``; its rows' changes, and the gradient."""
    table = torch.nn.Embedding(4, 2, sparse=True)
    torch.nn.init.zeros_(table.weight)
    optimizer = hvd.DistributedOptimizer(
        kind(list(table.parameters()), lr=1.0), table.named_parameters(), sparse_as_dense=sparse_as_dense)
    table(torch.tensor(indices, dtype=torch.int64)).sum().backward()
    optimizer.step()
    assert same_on_ranks(table.weight) and torch.equal(table.weight[:, 0], table.weight[:, 1])
    return table.weight[:, 0].tolist(), table.weight.grad


@pytest.mark.parametrize("sparse_as_dense", [False, True])
def test_c8_sparse_gradients(sparse_as_dense):
    """horovod/horovod#3529, #1230, #2580, #2965: they became dense, or ranks disagreed about rows."""
    mine = [[0, 1, 1], [1, 3]][hvd.rank()]
    assert embedding(mine, sparse_as_dense)[0] == [-0.5, -1.5, 0, -0.5]
    assert embedding(mine if hvd.rank() == 0 else [], sparse_as_dense)[0] == [-0.5, -1, 0, 0]
    changes, gradient = embedding(mine, sparse_as_dense, torch.optim.SparseAdam)
    assert changes == pytest.approx([-1, -1, 0, -1], rel=1e-5)
    assert gradient.is_sparse and gradient.to_dense()[:, 0].tolist() == [0.5, 1.5, 0, 0.5]


def optimizer_on(kind, parameters):
    settings = {"sgd": {}, "momentum": {"momentum": 0.9}, "none": {"momentum": 0.9}, "amsgrad": {"amsgrad": True}}.get(kind, {})
    chosen = {"amsgrad": torch.optim.AdamW, "adam": torch.optim.Adam, "groups": torch.optim.Adam}.get(kind, torch.optim.SGD)
    if kind == "groups":
        parameters = [{"params": parameters[:1]}, {"params": parameters[1:], "lr": 0.5}]
    return chosen(parameters, lr=0.1, **settings)


def facts(value):
    """What two states have to agree about, as plain objects."""
    if isinstance(value, torch.Tensor):
        return "tensor", value.dtype, tuple(value.shape), value.numpy().tobytes()
    if isinstance(value, dict):
        return {key: facts(one) for key, one in value.items()}
    return (type(value).__name__, [facts(one) for one in value]) if isinstance(value, (list, tuple)) else value


@pytest.mark.parametrize("is_wrapped", [False, True])
@pytest.mark.parametrize("root", [0, 1])
@pytest.mark.parametrize("kind", ["sgd", "momentum", "none", "adam", "amsgrad", "groups"])
def test_c10_state_from_a_root(kind, root, is_wrapped):
    """horovod/horovod#548, #392, #526, #1725, #2624, #2685, #1774: lr, scalars, None or what is frozen stayed behind."""
    parameters = [torch.nn.Parameter(torch.full((2,), float(hvd.rank()))) for _ in range(3)]
    parameters[2].requires_grad_(kind != "groups")
    optimizer = optimizer_on(kind, parameters)

    def give_gradients():
        for k, one in enumerate(parameters):
            one.grad = torch.full((2,), k + 1.0) if one.requires_grad else None

    if hvd.rank() == root:
        for group in optimizer.param_groups:
            group["lr"] += 0.023
        for _ in range(3):
            give_gradients()
            optimizer.step()
        if kind == "none":
            for one in parameters:
                optimizer.state[one]["momentum_buffer"] = None
    right = hvd.broadcast_object(facts(optimizer.state_dict()), root)
    if is_wrapped:
        optimizer = hvd.DistributedOptimizer(optimizer, [(f"w{i}", one) for i, one in enumerate(parameters)])
    hvd.broadcast_optimizer_state(optimizer, root)
    state = optimizer.state_dict()
    assert facts(state) == right
    assert [group["lr"] for group in state["param_groups"]] == pytest.approx([0.123, 0.523][: len(state["param_groups"])])
    if kind in ("adam", "amsgrad", "groups"):
        assert state["state"][0]["step"] == 3 and state["state"][0]["step"].shape == ()
        assert state["param_groups"][0]["betas"] == (0.9, 0.999)
    if kind == "none":
        assert state["state"][1] == {"momentum_buffer": None}
    hvd.broadcast_parameters([(f"w{i}", one) for i, one in enumerate(parameters)], root)
    give_gradients()
    optimizer.step()
    assert same_on_ranks(*parameters)


def test_c10_lbfgs_is_refused():
    """horovod/horovod#392: its state cannot be loaded."""
    with pytest.raises(ValueError, match="LBFGS"):
        hvd.broadcast_optimizer_state(torch.optim.LBFGS(scalars(1)), 0)
