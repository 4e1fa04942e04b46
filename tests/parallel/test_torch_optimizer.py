"""What the torch DistributedOptimizer can be told: groups, scales, compression, process sets, closures."""

import copy
import gc
import inspect
import json
import weakref

import pytest
import torch

import hvdlite.torch as hvd

RANKS = (2, 3)
R = N = 0


@pytest.fixture(autouse=True)
def place(job):
    global R, N
    R, N = hvd.rank(), hvd.size()


def vectors(count, size=3, dtype=torch.float32):
    return [torch.nn.Parameter(torch.zeros(size, dtype=dtype)) for _ in range(count)]


def wrap(parameters, **settings):
    named = [(f"w{i}", one) for i, one in enumerate(parameters)]
    return hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0), named, **settings)


def backward(parameters):
    """Gradients (r + 1) * (i + 1), whose sum over the ranks is N (N + 1) / 2 * (i + 1)."""
    sum((R + 1) * (i + 1) * one.sum() for i, one in enumerate(parameters)).backward()


def same_on_ranks(*tensors, process_set=None):
    flat = torch.cat([one.detach().flatten() for one in tensors])
    return bool((hvd.allgather(flat[None], name="same", process_set=process_set) == flat).all())


# -- what travels together, and how -----------------------------------------------------------------------------------

@pytest.mark.parametrize("settings, num_requests", [
    ({}, 1), ({"groups": 1}, 1), ({"groups": 3}, 3), ({"groups": 10}, 6), ({"groups": [[0, 1], [4]]}, 3),
    ({"groups": [[5, 0, 3], [1], [2, 4]]}, 3), ({"num_groups": 2}, 2)],
    ids=["none", "one", "three", "too many", "lists", "all in lists", "num_groups"])
def test_groups(settings, num_requests, tmp_path):
    parameters = vectors(6)
    if isinstance(settings.get("groups"), list):
        settings = {"groups": [[parameters[index] for index in group] for group in settings["groups"]]}
    if "num_groups" in settings:
        with pytest.warns(DeprecationWarning, match="use groups="):
            optimizer = wrap(parameters, **settings)
    else:
        optimizer = wrap(parameters, **settings)
    hvd.start_timeline(str(tmp_path / "timeline.json"))
    for _ in range(2):
        backward(parameters)
        optimizer.step()
        optimizer.zero_grad()
    hvd.stop_timeline()
    assert [one.tolist() for one in parameters] == [[-(N + 1.0) * (i + 1)] * 3 for i in range(6)]
    if R == 0:
        events = json.loads((tmp_path / "timeline.json").read_text())
        requests = [event["pid"] for event in events if event["name"] == "ALLREDUCE"]
        assert len(requests) == 2 * num_requests and len(set(requests)) == num_requests


@pytest.mark.parametrize("make, says", [
    (lambda p: 0, "number above 0"), (lambda p: -1, "number above 0"), (lambda p: True, "number above 0"),
    (lambda p: "ab", "list of lists"), (lambda p: p, "list of lists"), (lambda p: [["w0"]], "no parameter"),
    (lambda p: [[p[0]], [p[1], p[0]]], "twice")])
def test_what_is_no_groups(make, says):
    parameters = vectors(2)
    with pytest.raises(ValueError, match=says):
        wrap(parameters, groups=make(parameters))


@pytest.mark.parametrize("factor", [0.5, 2.0, 7.0])
@pytest.mark.parametrize("groups", [None, 2])
def test_predivide_changes_no_value(factor, groups):
    parameters = vectors(4, dtype=torch.float64)
    optimizer = wrap(parameters, gradient_predivide_factor=factor, groups=groups)
    backward(parameters)
    optimizer.step()
    for i, one in enumerate(parameters):
        torch.testing.assert_close(one.detach(), torch.full((3,), -(N + 1) / 2 * (i + 1), dtype=torch.float64))


class Halves:
    """A user's own: sends a tensor flat and halved."""

    @staticmethod
    def compress(tensor):
        return tensor.flatten() / 2, tensor.shape

    @staticmethod
    def decompress(tensor, ctx):
        return 2 * tensor.view(ctx)


@pytest.mark.parametrize("compression, rounded", [
    (hvd.Compression.none, lambda x: x), (hvd.Compression.fp16, lambda x: x.half().float()),
    (hvd.Compression.bf16, lambda x: x.bfloat16().float()), (Halves, lambda x: x)], ids=["none", "fp16", "bf16", "own"])
@pytest.mark.parametrize("groups", [None, 2])
def test_compression(compression, rounded, groups):
    torch.manual_seed(1)
    gradients = torch.randn(N, 2, 5, 3)
    parameters = vectors(2, (5, 3))
    optimizer = wrap(parameters, compression=compression, op=hvd.Sum, groups=groups)
    sum((gradients[R, i] * one).sum() for i, one in enumerate(parameters)).backward()
    optimizer.step()
    for i, one in enumerate(parameters):
        torch.testing.assert_close(-one.detach(), rounded(rounded(gradients[:, i]).sum(0)))
    assert same_on_ranks(*parameters)


def test_arguments_that_make_no_sense():
    parameters = vectors(1)
    for settings, says in [
        ({"op": hvd.Sum, "gradient_predivide_factor": 2.0}, "op=Average only"), ({"op": hvd.Max}, "makes no sense"),
        ({"backward_passes_per_step": 0}, "above 0"), ({"backward_passes_per_step": 1.5}, "above 0")]:
        with pytest.raises(ValueError, match=says):
            wrap(parameters, **settings)
    for what in ("fp16", None, hvd.Compression):
        with pytest.raises(TypeError, match="is no compressor"):
            wrap(parameters, compression=what)
    optimizer = wrap(parameters)
    with pytest.raises(ValueError, match="above 0"):
        optimizer.set_backward_passes_per_step(-1)
    optimizer.set_backward_passes_per_step(2)
    backward(parameters)
    backward(parameters)
    optimizer.step()
    assert parameters[0].tolist() == [-(N + 1.0)] * 3


# -- who takes part ---------------------------------------------------------------------------------------------------

def test_a_process_set_averages_over_its_members_and_leaves_others_alone():
    evens = hvd.add_process_set(range(0, N, 2))
    members = [rank + 1 for rank in range(0, N, 2)]
    for settings in (
            {}, {"groups": 2}, {"compression": hvd.Compression.fp16}, {"op": hvd.Sum}, {"gradient_predivide_factor": 2.0}):
        parameters = vectors(2)
        optimizer = wrap(parameters, process_set=evens, **settings)
        for _ in range(2):
            backward(parameters)
            optimizer.step()
            optimizer.zero_grad()
        change = R + 1 if R % 2 else sum(members) / (1 if "op" in settings else len(members))
        assert [one.tolist() for one in parameters] == [[-2.0 * change * (i + 1)] * 3 for i in range(2)]
    assert hvd.remove_process_set(evens)


def test_parts_of_a_model_in_sets_of_their_own():
    sets = [hvd.add_process_set(range(first, N, 2)) for first in (0, 1)]
    common, own = vectors(1), vectors(1)
    everywhere, within = wrap(common), wrap(own, process_set=sets[R % 2])
    for _ in range(3):
        backward(common + own)
        within.step()
        everywhere.step()
        within.zero_grad()
        everywhere.zero_grad()
    members = [rank + 1 for rank in range(R % 2, N, 2)]
    assert common[0].tolist() == [-1.5 * (N + 1)] * 3
    assert own[0].tolist() == [-6.0 * sum(members) / len(members)] * 3
    assert all(map(hvd.remove_process_set, sets))


def test_state_goes_to_the_members_of_a_set():
    evens = hvd.add_process_set(range(0, N, 2))
    w = torch.nn.Parameter(torch.full((2,), float(R)))
    optimizer = torch.optim.SGD([w], lr=R + 1.0)
    if R % 2 == 0:
        hvd.broadcast_parameters([("w", w)], 0, process_set=evens)
        hvd.broadcast_optimizer_state(optimizer, 0, process_set=evens)
    assert w.tolist() == [R % 2] * 2 and optimizer.param_groups[0]["lr"] == R % 2 + 1
    assert hvd.remove_process_set(evens)


# -- training loops ---------------------------------------------------------------------------------------------------

def test_two_models_that_are_frozen_in_turn():
    torch.manual_seed(0)
    generator, critic = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)
    models = {generator: wrap(list(generator.parameters())), critic: wrap(list(critic.parameters()))}
    for step in range(6):
        trained, other = (generator, critic) if step % 2 == 0 else (critic, generator)
        for model, optimizer in models.items():
            model.requires_grad_(model is trained)
            optimizer.zero_grad()
        before = copy.deepcopy(other.state_dict())
        critic(generator(torch.ones(1, 2) + R)).tanh().sum().backward()
        models[trained].step()
        assert all(torch.equal(before[name], value) for name, value in other.state_dict().items())
        assert same_on_ranks(*generator.parameters(), *critic.parameters())


@pytest.mark.parametrize("kind, settings", [
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.LBFGS, {"max_iter": 5}),
    (torch.optim.LBFGS, {"max_iter": 5, "line_search_fn": "strong_wolfe"}),  # decides by the loss, which ranks differ in
])
def test_a_closure_is_synchronised_each_time(kind, settings):
    torch.manual_seed(0)
    targets = torch.randn(N, 4)
    w, alone = (torch.nn.Parameter(torch.zeros(4)) for _ in range(2))
    optimizer, plain = hvd.DistributedOptimizer(kind([w], **settings), [("w", w)]), kind([alone], **settings)

    def closure():
        optimizer.zero_grad()
        loss = ((w - targets[R]) ** 4).sum()
        loss.backward()
        return loss.detach()

    def joined():
        plain.zero_grad()
        loss = ((alone - targets) ** 4).sum(1).mean()
        loss.backward()
        return loss.detach()

    for _ in range(3):
        loss, expected = optimizer.step(closure), plain.step(joined)
        torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(w, alone, rtol=1e-4, atol=1e-5)
    assert same_on_ranks(w)


CLASSES = sorted(
    (one for one in vars(torch.optim).values() if inspect.isclass(one) and issubclass(one, torch.optim.Optimizer)
     and one not in (torch.optim.Optimizer, torch.optim.LBFGS, torch.optim.SparseAdam)), key=lambda one: one.__name__)


@pytest.mark.parametrize("kind", CLASSES, ids=lambda one: one.__name__)
def test_every_optimizer_of_torch(kind):
    """It steps as the plain one does with averaged gradients, and its options and state can be taken from a root."""
    torch.manual_seed(3)
    gradients = torch.randn(4, N, 3, 2)
    w, alone = (torch.nn.Parameter(torch.ones(3, 2)) for _ in range(2))
    plain = kind([alone], lr=0.1)
    optimizer = hvd.DistributedOptimizer(kind([w], lr=0.1 * (R + 1)), [("w", w)])
    assert type(optimizer).__name__ == kind.__name__ and isinstance(optimizer, kind)
    hvd.broadcast_optimizer_state(optimizer, 0)
    for step, gradient in enumerate(gradients):
        (gradient[R] * w).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        alone.grad = gradient.mean(0)
        plain.step()
        torch.testing.assert_close(w, alone)
        if step == 1:
            if R != N - 1:
                for state in optimizer.state.values():
                    for value in state.values():
                        value.add_(1) if isinstance(value, torch.Tensor) else None
            hvd.broadcast_optimizer_state(optimizer, N - 1)
    assert same_on_ranks(w)


def test_parameters_of_integers_and_gradients_of_zeros():
    """What scripts written for Horovod find after broadcast_optimizer_state."""
    counts = torch.nn.Parameter(torch.tensor([1, 3]) + R, requires_grad=False)
    w = torch.nn.Parameter(torch.rand(4))
    optimizer = wrap([counts, w])
    hvd.broadcast_parameters({"counts": counts, "w": w}, root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert counts.tolist() == [1, 3] and counts.grad is None and w.grad.tolist() == [0] * 4


def test_parameters_are_taken_from_a_root_in_every_form():
    def model():
        made = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
        with torch.no_grad():
            for value in made.state_dict().values():
                value.fill_(R)
        return made

    for root in range(N):
        for given in (lambda m: m.state_dict(), lambda m: m.named_parameters(), lambda m: list(m.parameters()),
                      lambda m: list(m.named_parameters()), lambda m: dict(m.named_buffers())):
            net = model()
            hvd.broadcast_parameters(given(net), root_rank=root)
            values = given(net)
            for one in values.values() if isinstance(values, dict) else values:
                assert ((one[1] if isinstance(one, tuple) else one) == root).all()
    for nonsense in (7, "abc", torch.ones(2), {"lr": 0.1}, [1, 2]):
        with pytest.raises(ValueError, match="broadcast_parameters"):
            hvd.broadcast_parameters(nonsense, root_rank=0)
    with pytest.raises(RuntimeError, match=r"extra \(1,\) torch.float32 on rank 1 only"):
        hvd.broadcast_parameters({"w": torch.ones(2), **({"extra": torch.ones(1)} if R == 1 else {})}, root_rank=0)


def test_where_adasum_is_refused():
    some = hvd.add_process_set([0])
    with pytest.raises(NotImplementedError, match="process_set"):
        wrap(vectors(1), op=hvd.Adasum, process_set=some)
    if R == 0:
        with pytest.raises(NotImplementedError, match="process_set"):
            hvd.allreduce(torch.ones(2), op=hvd.Adasum, process_set=some)
    assert hvd.remove_process_set(some)
    if N == 3:
        parameters = vectors(1)
        optimizer = wrap(parameters, op=hvd.Adasum)
        backward(parameters)
        for call in (optimizer.step, lambda: hvd.allreduce(torch.ones(2), op=hvd.Adasum)):
            with pytest.raises(NotImplementedError, match="power of two"):
                call()
    else:
        with pytest.raises(ValueError, match="floating-point"):
            hvd.allreduce(torch.ones(2, dtype=torch.int32), op=hvd.Adasum)


def test_a_model_that_is_dropped_is_freed():
    model = torch.nn.Linear(4, 4)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    alive = [weakref.ref(one) for one in (model, optimizer, model.weight)]
    del model, optimizer
    gc.collect()
    assert [one() for one in alive] == [None] * 3


def test_a_sparse_gradient_on_one_rank_only_is_an_error_on_all():
    embedding, layer = torch.nn.Embedding(5, 2, sparse=True), torch.nn.Linear(2, 1)
    named = [*embedding.named_parameters("embedding"), *layer.named_parameters("layer")]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([one for _, one in named], lr=0.1), named)

    def step(uses):
        optimizer.zero_grad()
        layer(embedding(torch.tensor([1])) if uses else torch.ones(1, 2)).sum().backward()
        optimizer.step()

    with pytest.raises(hvd.HorovodInternalError, match="differ"):
        step(R == 0)
    step(True)
    assert same_on_ranks(*(one for _, one in named))
