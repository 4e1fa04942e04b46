"""SyncBatchNorm equals BatchNorm over all ranks' batches joined, which every rank can make by itself."""

import copy
import io
import threading

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import hvdlite
from hvdlite.torch.sync_batch_norm import SyncBatchNorm, convert_sync_batchnorm

RANKS = (2, 3)
R = N = 0


@pytest.fixture(autouse=True)
def place(job):
    global R, N
    R, N = hvdlite.rank(), hvdlite.size()


def plain(layer):
    """A BatchNorm with a layer's settings, of its dtype."""
    made = torch.nn.BatchNorm1d(layer.num_features, layer.eps, layer.momentum, layer.affine, layer.track_running_stats)
    made._check_input_dim = lambda _: None
    made.load_state_dict(copy.deepcopy(layer.state_dict()))
    return made.to(layer.weight.dtype if layer.affine else torch.float32)


def uneven(rank, *rest, seed=0):
    """Rank's batch: 1, 3, 5 ... samples, off centre."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return 2 * torch.randn(1 + 2 * rank, *rest, generator=generator) + rank + 1


def averaged_gradients(layer):
    return [hvdlite.allreduce(p.grad, name=f"check.{name}") for name, p in layer.named_parameters()]


def check_against_joined(layer, batches, weights, tolerance=1e-5):
    """Forward and backward of this rank's share against the joined batch, whose loss is the sum of the ranks'."""
    reference = plain(layer)
    joined = torch.cat([batch.detach().contiguous() for batch in batches]).to(torch.float32).requires_grad_()
    expected = reference(joined)
    (expected * torch.cat(weights)).sum().backward()
    begin = sum(len(batch) for batch in batches[:R])
    own = slice(begin, begin + len(batches[R]))
    input = batches[R].detach().requires_grad_()
    got = layer(input)
    assert got.dtype == input.dtype and got.shape == input.shape
    (got * weights[R].to(got.dtype)).sum().backward()
    torch.testing.assert_close(got.float(), expected[own], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(input.grad.float(), joined.grad[own], rtol=tolerance, atol=tolerance)
    for one, other in zip(averaged_gradients(layer), reference.parameters(), strict=True):
        torch.testing.assert_close(one * N, other.grad, rtol=tolerance, atol=10 * tolerance)
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(layer.state_dict()[name], value, rtol=tolerance, atol=tolerance)
        ranks = hvdlite.allgather(layer.state_dict()[name].reshape(1, -1), name=f"check.{name}")
        assert (ranks == ranks[0]).all(), f"{name} differs between ranks"
    return got


def layer_of(num_features, **settings):
    torch.manual_seed(5)
    layer = SyncBatchNorm(num_features, **settings)
    if layer.affine:
        torch.nn.init.uniform_(layer.weight, 0.5, 2)
        torch.nn.init.normal_(layer.bias)
    return layer


def test_the_case_worked_by_hand():
    parts = {1: [[0, 2, 4, 6, 8, 10]], 2: [[0, 2], [4, 6, 8, 10]], 3: [[0, 2], [4, 6, 8], [10]]}[N]
    layer = SyncBatchNorm(1)
    own = torch.tensor(parts[R], dtype=torch.float32).view(-1, 1)
    expected = (own - 5) / (35 / 3 + 1e-5) ** 0.5
    torch.testing.assert_close(layer(own), expected, rtol=1e-6, atol=1e-6)
    assert layer.running_mean.item() == pytest.approx(0.5) and layer.running_var.item() == pytest.approx(2.3)
    assert layer.num_batches_tracked == 1
    weights = [torch.arange(len(part), dtype=torch.float32).view(-1, 1) + rank for rank, part in enumerate(parts)]
    check_against_joined(layer_of(1), [torch.tensor(part, dtype=torch.float32).view(-1, 1) for part in parts], weights)


@pytest.mark.parametrize("rest", [(4,), (4, 5), (3, 4, 6), (2, 3, 2, 2)])
@pytest.mark.parametrize("settings", [{}, {"affine": False}, {"momentum": None}, {"momentum": 0.7, "eps": 0.1}])
def test_equals_the_joined_batch(rest, settings):
    layer = layer_of(rest[0], **settings)
    for seed in range(3):  # several steps: running statistics accumulate
        layer.zero_grad()
        batches = [uneven(rank + (N == 1), *rest, seed=seed) for rank in range(N)]
        check_against_joined(layer, batches, [uneven(rank + (N == 1), *rest, seed=50 + seed) for rank in range(N)])


def test_strided_inputs():
    batches = [uneven(rank, 4, 6, 3) for rank in range(N)]
    weights = [uneven(rank, 3, 4, 6, seed=1) for rank in range(N)]
    check_against_joined(layer_of(3), [batch.permute(0, 3, 1, 2) for batch in batches], weights)
    batches = [uneven(rank, 3, 4, 6) for rank in range(N)]
    channels_last = [batch.to(memory_format=torch.channels_last) for batch in batches]
    got = check_against_joined(layer_of(3), channels_last, weights)
    assert got.is_contiguous(memory_format=torch.channels_last)
    check_against_joined(layer_of(3), [torch.cat([batch, batch])[::2] for batch in batches],
                         [torch.cat([one, one])[::2] for one in weights])


@pytest.mark.parametrize("dtype, tolerance", [(torch.float16, 4e-3), (torch.bfloat16, 3e-2)])
def test_half_precision_inputs_have_float32_statistics(dtype, tolerance):
    batches = [uneven(rank, 4, 8, 8).to(dtype) for rank in range(N)]
    layer = layer_of(4)
    check_against_joined(layer, batches, [uneven(rank, 4, 8, 8, seed=1) for rank in range(N)], tolerance)
    joined = torch.cat(batches).float()
    torch.testing.assert_close(layer.running_mean, 0.1 * joined.mean([0, 2, 3]), rtol=1e-5, atol=1e-5)
    whole = layer_of(4).to(dtype)
    assert whole(batches[R]).dtype == dtype and whole.running_mean.dtype == dtype


def test_float64_stays_exact():
    batches = [uneven(rank, 2).double() for rank in range(N)]
    joined = torch.cat(batches)
    layer = layer_of(2).double()
    expected = (joined - joined.mean(0)) / (joined.var(0, correction=0) + 1e-5).sqrt() * layer.weight + layer.bias
    if len(joined) > 1:
        begin = sum(map(len, batches[:R]))
        torch.testing.assert_close(layer(batches[R]), expected[begin : begin + len(batches[R])], rtol=1e-13, atol=1e-13)
    small = SyncBatchNorm(1, process_set=None).double()
    input = (uneven(R, 1).double() + 3).requires_grad_()
    if N > 1:
        # Numerical gradients: all ranks step together, each in its own first element in turn.
        weight = torch.arange(1.0, 1 + len(input), dtype=torch.float64).view(-1, 1)
        (small(input).square() * weight).sum().backward()
        for rank in range(N):
            losses = []
            for step in (1e-6, -1e-6):
                moved = input.detach().clone()
                moved[0] += step * (rank == R)
                losses.append(hvdlite.allreduce((small(moved).square() * weight).sum().detach(), op=hvdlite.Sum))
            if rank == R:
                assert input.grad[0].item() == pytest.approx((losses[0] - losses[1]).item() / 2e-6, rel=1e-5, abs=1e-7)


def test_a_large_mean_does_not_cancel():
    batches = [uneven(rank, 2, 50) * 1e-2 + 1000 for rank in range(N)]
    layer = SyncBatchNorm(2, momentum=1.0)
    layer(batches[R])
    expected = torch.cat(batches).double().var([0, 2])
    torch.testing.assert_close(layer.running_var.double(), expected, rtol=1e-5, atol=0)


def test_an_empty_batch_on_some_rank():
    if N == 1:
        return
    batches = [uneven(rank, 3, 4) if rank != 1 else torch.empty(0, 3, 4) for rank in range(N)]
    weights = [uneven(rank, 3, 4, seed=1) if rank != 1 else torch.empty(0, 3, 4) for rank in range(N)]
    if N == 2:
        batches[0], weights[0] = uneven(2, 3, 4), uneven(2, 3, 4, seed=1)
    check_against_joined(layer_of(3), batches, weights)


def test_used_twice_in_one_forward_and_by_a_checkpoint():
    for use_reentrant in (None, True, False):
        layer = layer_of(3, track_running_stats=False)
        reference = plain(layer)
        batches = [uneven(rank, 3) + 1 for rank in range(N)]
        joined = torch.cat([*batches, uneven(7, 3)] if N == 1 else batches).requires_grad_()
        input = (joined if N == 1 else batches[R]).detach().requires_grad_()
        loss = (reference(reference(joined).tanh() + joined) ** 3).sum()
        loss.backward()

        def once(tensor, layer=layer, use_reentrant=use_reentrant):
            return layer(tensor) if use_reentrant is None else checkpoint(layer, tensor, use_reentrant=use_reentrant)

        (once(once(input).tanh() + input) ** 3).sum().backward()
        begin = 0 if N == 1 else sum(map(len, batches[:R]))
        torch.testing.assert_close(input.grad, joined.grad[begin : begin + len(input)], rtol=1e-4, atol=1e-4)


def test_layers_that_run_at_once_do_not_meet():
    layers = [layer_of(3, momentum=1.0) for _ in range(4)]
    batches = [[uneven(rank, 3, 20, seed=k) for rank in range(N)] for k in range(4)]
    for k in range(4):
        layers[k](batches[k][R])  # names are given at the first use, in one order

    def run(k):
        for _ in range(20):
            layers[k](batches[k][R].clone().requires_grad_()).square().sum().backward()

    order = list(range(4)) if R == 0 else [3, 1, 2, 0]
    threads = [threading.Thread(target=run, args=(k,)) for k in order]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    for k in range(4):
        torch.testing.assert_close(layers[k].running_mean, torch.cat(batches[k]).mean([0, 2]), rtol=1e-5, atol=1e-5)


def test_evaluation_is_plain_and_local():
    layer = layer_of(3)
    layer(uneven(R, 3, 4))
    layer.eval()
    reference = plain(layer).eval()
    if R == 0:  # the others take no part
        input = uneven(R, 3, 4)
        assert torch.equal(layer(input), reference(input))


def test_wrong_shapes_are_refused_at_the_call_and_too_few_values_everywhere():
    layer = SyncBatchNorm(3)
    for shape in [(3,), (4, 2), (), (2, 2, 3)]:
        with pytest.raises(ValueError, match="features"):
            layer(torch.ones(shape))
    with pytest.raises(ValueError, match="1 value"):
        layer(torch.ones(int(R == 0), 3))
    before = layer.num_batches_tracked.item()
    layer(torch.ones(2, 3))
    assert layer.num_batches_tracked == before + 1 and (N == 1 or before == 0)


def test_copies_and_pickles_are_layers_of_their_own():
    layer = layer_of(3)
    layer(uneven(R, 3, 4))
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    for other in (copy.deepcopy(layer), torch.load(file, weights_only=False)):
        other(uneven(R, 3, 4))
        if N > 1:
            assert other._label() != layer._label()


def test_a_process_set_of_some_ranks():
    if N < 3:
        return
    some = hvdlite.add_process_set([0, 2])
    layer = SyncBatchNorm(1, process_set=some)
    if R != 1:
        layer(torch.tensor([[0.0], [2.0]]) if R == 0 else torch.tensor([[4.0], [6.0], [8.0], [10.0]]))
        assert layer.running_mean.item() == pytest.approx(0.5)
    everyone = SyncBatchNorm(1)
    everyone(torch.tensor([[0.0], [float(R)]]))
    assert everyone.running_mean.item() == pytest.approx(0.1 * N * (N - 1) / 2 / (2 * N))
    hvdlite.barrier()
    hvdlite.remove_process_set(some)


def test_conversion_keeps_what_the_layers_had():
    shared = torch.nn.BatchNorm2d(4, eps=0.25, momentum=None)
    inner = torch.nn.Sequential(torch.nn.Conv2d(4, 4, 1), shared, torch.nn.BatchNorm2d(4, affine=False))
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), shared, inner,
        torch.nn.Flatten(), torch.nn.LazyLinear(5), torch.nn.BatchNorm1d(5).eval())
    model[1].bias.requires_grad_(False)
    seen = []
    model[1].register_forward_hook(lambda *_: seen.append(1))
    weights, keys = [*model.parameters()], list(model.state_dict())
    converted = convert_sync_batchnorm(model)
    assert converted is model and converted[1] is converted[2][1] and isinstance(converted[1], SyncBatchNorm)
    assert isinstance(converted[2][2], SyncBatchNorm) and converted[2][2].weight is None
    assert converted[1].eps == 0.25 and converted[1].momentum is None and not converted[1].bias.requires_grad
    assert not converted[5].training and converted[1].training
    assert all(one is other for one, other in zip(weights, converted.parameters(), strict=True))
    assert list(converted.state_dict()) == keys
    converted(uneven(R, 3, 6, 6)).sum().backward()
    assert seen and converted[5].num_batches_tracked == 0
    assert isinstance(convert_sync_batchnorm(torch.nn.BatchNorm1d(2)), SyncBatchNorm)
    with pytest.raises(ValueError, match="one batch"):
        convert_sync_batchnorm(torch.nn.LazyBatchNorm1d())


def test_compiled():
    layer = layer_of(3)
    reference = copy.deepcopy(layer)
    compiled = torch.compile(torch.nn.Sequential(torch.nn.Linear(3, 3), layer, torch.nn.ReLU()), backend="aot_eager")
    eager = torch.nn.Sequential(copy.deepcopy(compiled._orig_mod[0]), reference, torch.nn.ReLU())
    for seed in range(2):
        input = uneven(R, 3, seed=seed) if N > 1 else uneven(2, 3, seed=seed)
        compiled(input).square().sum().backward()
        eager(input).square().sum().backward()
    torch.testing.assert_close(layer.running_var, reference.running_var)
    torch.testing.assert_close(layer.weight.grad, reference.weight.grad)


def test_after_shutdown_and_init():
    first, second = layer_of(2, momentum=1.0), layer_of(2, momentum=1.0)
    first(uneven(R, 2, 5))
    second(uneven(R, 2, 5))
    hvdlite.shutdown()
    with pytest.raises(ValueError, match="init"):
        first(uneven(R, 2, 5))
    hvdlite.init()
    for layer in (second, first):  # names are given anew
        layer(uneven(R, 2, 5))
    if N > 1:
        assert second._label().endswith(".0") and first._label().endswith(".1")
    expected = torch.cat([uneven(rank, 2, 5) for rank in range(N)]).mean([0, 2])
    torch.testing.assert_close(first.running_mean, expected, rtol=1e-5, atol=1e-5)
