"""Quantised gradients in the torch and the plain optimizer wrapper."""

import copy
import gc
import warnings

import numpy as np
import pytest
import torch

import hvdlite
import hvdlite.torch as hvd
from hvdlite.runtime import default_runtime

RANKS = (2, 3)
SMALL = hvd.Compression.quantized(min_elements=64)


def model_of():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(40, 60), torch.nn.Tanh(), torch.nn.Linear(60, 10))


def wrap(model, compression=SMALL, optimizer=torch.optim.SGD, **settings):
    return hvd.DistributedOptimizer(
        optimizer(model.parameters(), lr=0.05, **({"momentum": 0.9} if optimizer is torch.optim.SGD else {})),
        model.named_parameters(), compression=compression, **settings)


def train(model, optimizer, steps, poison=None):
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + hvd.rank())
        x = torch.randn(16, 40, generator=generator)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), x[:, :10].argmax(1)).backward()
        if poison is not None:
            poison(model)
        optimizer.step()


def same_on_ranks(model):
    flat = torch.cat([one.detach().flatten() for one in model.parameters()])
    return bool((hvd.allgather(flat[None], name="same") == flat).all())


def residuals(optimizer):
    (state,) = optimizer.state_dict()["hvdlite"]
    return state["residuals"]


@pytest.mark.parametrize("schedule", ["ring", "two_shot"])
@pytest.mark.parametrize("threshold", [1, 1 << 20])
def test_weights_are_the_same_on_all_ranks_and_under_any_buckets(schedule, threshold, restart):
    restart(FUSION_THRESHOLD_BYTES=threshold)
    model = model_of()
    optimizer = wrap(model, hvd.Compression.quantized(min_elements=64, schedule=schedule))
    train(model, optimizer, range(12))
    assert same_on_ranks(model) and set(residuals(optimizer)) == {"0.weight", "2.weight"}
    assert all(one.any() and one.isfinite().all() for one in residuals(optimizer).values())
    weights = [one.detach().clone() for one in model.parameters()]
    restart(FUSION_THRESHOLD_BYTES=8000)
    other = model_of()
    train(other, wrap(other, hvd.Compression.quantized(min_elements=64, schedule=schedule)), range(12))
    assert all(torch.equal(one, two) for one, two in zip(weights, other.parameters(), strict=True))


def test_it_learns_nearly_as_with_dense_gradients():
    losses = []
    for compression in (hvd.Compression.none, SMALL):
        model = model_of()
        train(model, wrap(model, compression), range(60))
        x = torch.randn(512, 40, generator=torch.Generator().manual_seed(1))
        losses.append(torch.nn.functional.cross_entropy(model(x), x[:, :10].argmax(1)).item())
    assert losses[1] < losses[0] + 0.15 and losses[0] < 2


def test_a_warm_up_is_dense():
    dense, model = model_of(), model_of()
    optimizer = wrap(model, hvd.Compression.quantized(min_elements=64, warmup_steps=3))
    train(dense, wrap(dense, hvd.Compression.none), range(3))
    train(model, optimizer, range(3))
    assert all(torch.equal(one, two) for one, two in zip(dense.parameters(), model.parameters(), strict=True))
    assert not residuals(optimizer)
    train(model, optimizer, range(3, 5))
    assert residuals(optimizer) and same_on_ranks(model)


def test_what_is_small_or_excluded_stays_dense():
    model = model_of()
    optimizer = wrap(model, hvd.Compression.quantized(min_elements=1000, exclude=["0.*"]))
    train(model, optimizer, range(2))
    assert not residuals(optimizer)  # 2.weight has 600 elements, 0.weight is excluded


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_one_bad_gradient_leaves_the_residuals_of_the_whole_step(bad, restart):
    restart(FUSION_THRESHOLD_BYTES=1)  # a bucket for each
    model = model_of()
    optimizer = wrap(model)
    train(model, optimizer, range(4))
    before = {name: one.clone() for name, one in residuals(optimizer).items()}

    x = torch.ones(2, 40)
    optimizer.zero_grad()
    loss = model(x).sum()
    if hvd.rank() == hvd.size() - 1:
        loss = loss + bad * model[2].weight[0, 0]
    loss.backward()
    optimizer.synchronize()
    assert not torch.isfinite(model[2].weight.grad).all()
    after = residuals(optimizer)
    assert all(torch.equal(one, after[name]) for name, one in before.items())
    optimizer.zero_grad()
    train(model, optimizer, range(4, 6))
    assert same_on_ranks(model) and all(one.isfinite().all() for one in residuals(optimizer).values())
    assert not torch.equal(residuals(optimizer)["0.weight"], before["0.weight"])


@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, torch.optim.Adam])
def test_a_checkpoint_resumes_bitwise(tmp_path, optimizer_class):
    straight = model_of()
    train(straight, wrap(straight, optimizer=optimizer_class), range(10))
    model = model_of()
    optimizer = wrap(model, optimizer=optimizer_class)
    train(model, optimizer, range(5))
    path = tmp_path / "checkpoint.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    del optimizer
    gc.collect()
    saved = torch.load(path, weights_only=True)
    resumed = model_of()
    optimizer = wrap(resumed, optimizer=optimizer_class)
    resumed.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])  # before the first backward pass
    train(resumed, optimizer, range(5, 10))
    assert all(torch.equal(one, two) for one, two in zip(straight.parameters(), resumed.parameters(), strict=True))


def test_the_checkpoint_of_another_rank():
    model = model_of()
    optimizer = wrap(model)
    train(model, optimizer, range(5))
    state = hvd.broadcast_object(optimizer.state_dict(), 0)
    if hvd.rank() == 0:
        optimizer.load_state_dict(state)
        assert residuals(optimizer)
    else:
        with pytest.warns(UserWarning, match=r"sync_residuals\(\)"):
            optimizer.load_state_dict(state)
        assert not residuals(optimizer)


def test_synchronized_residuals_serve_all_ranks():
    model = model_of()
    optimizer = wrap(model)
    train(model, optimizer, range(5))
    before = {name: hvd.allreduce(one, op=hvd.Sum, name=f"before.{name}") for name, one in residuals(optimizer).items()}
    hvdlite.sync_residuals()
    for name, one in residuals(optimizer).items():
        torch.testing.assert_close(hvd.size() * one, before[name], rtol=1e-4, atol=1e-6)
        assert (hvd.allgather(one[None], name=f"after.{name}") == one).all()
    saved = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    saved = hvd.broadcast_object(saved, 0)
    train(model, optimizer, range(5, 8))
    resumed = model_of()
    resumed.load_state_dict(saved["model"])
    other = wrap(resumed)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other.load_state_dict(saved["optimizer"])
    train(resumed, other, range(5, 8))
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), resumed.parameters(), strict=True))
    # A job of half as many ranks: each takes over twice as much.
    saved["optimizer"]["hvdlite"][0]["size"] *= 2
    once = saved["optimizer"]["hvdlite"][0]["residuals"]
    other.load_state_dict(saved["optimizer"])
    assert all(torch.equal(2 * once[name], one) for name, one in residuals(other).items())


def test_state_from_a_root_keeps_each_rank_s_residuals():
    model = model_of()
    optimizer = wrap(model)
    train(model, optimizer, range(3))
    before = residuals(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hvd.broadcast_optimizer_state(optimizer, 0)
    assert all(torch.equal(one, residuals(optimizer)[name]) for name, one in before.items()) and before


def test_the_loss_scale_scales_what_is_left_over():
    model = model_of()
    optimizer = wrap(model)
    train(model, optimizer, range(3))
    before = residuals(optimizer)
    hvdlite.set_loss_scale(1024.0)
    assert all(torch.equal(1024 * before[name], one) for name, one in residuals(optimizer).items())
    hvdlite.set_loss_scale(1.0)
    assert all(torch.equal(before[name], one) for name, one in residuals(optimizer).items())
    for wrong in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="finite number above 0"):
            hvdlite.set_loss_scale(wrong)


def test_a_wrapper_that_is_dropped_takes_its_residuals_along():
    hvd.shutdown()
    hvd.init()
    sizes = []
    for _ in range(4):
        model = model_of()
        optimizer = wrap(model)
        train(model, optimizer, range(2))
        sizes.append(default_runtime().residuals.num_bytes)
        del model, optimizer
        gc.collect()
    assert len(set(sizes)) == 1


def test_ranks_with_fewer_batches_join():
    model = model_of()
    optimizer = wrap(model)
    train(model, optimizer, range(3))
    for step in range(3, 6 + hvd.rank()):
        train(model, optimizer, [step])
    hvd.join()
    assert all(one.isfinite().all() for one in residuals(optimizer).values())


def test_calls_with_compression():
    x = torch.full((300, 5), 0.5)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        for call in (hvd.allreduce, hvd.allreduce_, hvdlite.allreduce):
            got = call(x.to(dtype), name="x", compression=hvd.Compression.onebit)
            assert got.dtype == dtype and got.shape == x.shape and (got == 0.5).all()
    (got,) = hvd.grouped_allreduce([x], name="y", compression=hvdlite.Compression.onebit, op=hvd.Sum)
    assert (got == 0.5 * hvd.size()).all() and hvdlite.Compression is hvd.Compression
    w = torch.ones(100, requires_grad=True)
    hvd.allreduce(w, name="z", compression=hvd.Compression.onebit).sum().backward()
    assert w.grad.tolist() == [1.0] * 100
    strided = torch.full((40, 20), 2.0).t()
    assert (hvd.allreduce(strided, name="s", compression=hvd.Compression.onebit) == 2).all()


class Momentum:
    def __init__(self):
        self.weights = {"w": np.zeros((30, 40), np.float32), "b": np.zeros(40, np.float32)}

    def step(self, gradients):
        for name, one in gradients.items():
            assert one.dtype == np.float32
            self.weights[name] -= 0.1 * one


@pytest.mark.parametrize("compression", [SMALL, hvd.Compression.fp16, hvd.Compression.onebit])
def test_plain_gradients(compression):
    wrapped = hvdlite.DistributedOptimizer(Momentum(), compression=compression)
    target = np.random.default_rng(hvd.rank()).standard_normal((30, 40)).astype(np.float32)
    mean = hvd.allreduce(torch.from_numpy(target), name="target").numpy()
    for _ in range(200):
        wrapped.step({"w": wrapped.optimizer.weights["w"] - target, "b": np.full(40, hvd.rank(), np.float32)})
    error = np.abs(wrapped.optimizer.weights["w"] - mean)
    assert error.mean() < 0.2 < np.abs(mean).mean()  # ranks want different things, so each step's codes are coarse
    gathered = hvd.allgather(torch.from_numpy(wrapped.optimizer.weights["w"])[None], name="weights").numpy()
    assert (gathered == gathered[0]).all()


def test_auto_trains_and_explains_itself():
    model = model_of()
    optimizer = wrap(model, hvd.Compression.auto)
    train(model, optimizer, range(2))
    assert not [one for one in hvdlite.explain_compression() if optimizer._exchanges[0]._exchange.label in one.bucket]
    big = torch.nn.Linear(400, 200)
    optimizer = wrap(big, hvd.Compression.auto)
    for step in range(4):
        optimizer.zero_grad()
        big(torch.randn(8, 400, generator=torch.Generator().manual_seed(10 * step + hvd.rank()))).square().sum().backward()
        optimizer.step()
    assert same_on_ranks(big)
    decision = hvdlite.explain_compression()[-1]
    assert decision.num_bytes == 320_000 and set(decision.seconds) == {"fp32", "fp16", "quantized"}
    assert decision.way in decision.seconds and min(decision.seconds.values()) > 0
    assert len(set(hvd.allgather_object(str(decision)))) == 1


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_adam_is_quantised_in_units_of_its_second_moment(kind):
    """Weights and moments stay the same on all ranks; nothing is left over; it learns as with dense gradients."""
    found = []
    for compression in (hvd.Compression.none, SMALL):
        model = model_of()
        optimizer = hvd.DistributedOptimizer(
            kind(model.parameters(), lr=3e-3), model.named_parameters(), compression=compression)
        train(model, optimizer, range(20))
        weights = [one.detach().clone() for one in model.parameters()]
        train(model, optimizer, range(20, 80))
        moments = torch.cat([state["exp_avg_sq"].flatten() for state in optimizer.state.values()])
        assert same_on_ranks(model) and (hvd.allgather(moments[None], name="moments") == moments).all()
        x = torch.randn(512, 40, generator=torch.Generator().manual_seed(1))
        loss = torch.nn.functional.cross_entropy(model(x), x[:, :10].argmax(1)).item()
        found.append((weights, loss, moments.mean().item()))
    assert all(torch.equal(one, two) for one, two in zip(found[0][0], found[1][0], strict=True))  # the warm-up is dense
    assert not residuals(optimizer) and optimizer._exchanges[0]._exchange.last_preconditioned
    assert found[1][1] < found[0][1] + 0.1 and 0.7 < found[1][2] / found[0][2] < 1.4


def test_how_a_moment_is_corrected():
    """A step adds factor * (1 - beta) * gradient^2 instead of (1 - beta) * gradient^2."""
    model = model_of()
    optimizer = wrap(model, optimizer=torch.optim.Adam)
    train(model, optimizer, range(20))
    weight = model[0].weight
    before = optimizer.state[weight]["exp_avg_sq"].clone()
    train(model, optimizer, [20])
    factor = SMALL.moment_correction(hvd.size())
    assert factor == pytest.approx({2: 0.495, 3: 0.461}[hvd.size()], abs=2e-3)
    right = 0.999 * before + factor * 0.001 * weight.grad ** 2
    torch.testing.assert_close(optimizer.state[weight]["exp_avg_sq"], right, rtol=1e-5, atol=1e-12)
    bias = model[0].bias  # stays dense
    assert optimizer._exchanges[0]._exchange.last_preconditioned == {0, 2} and bias.grad is not None


@pytest.mark.parametrize("kind", [torch.optim.RMSprop, torch.optim.Adagrad])
def test_other_adaptive_optimizers_are_warned_of(kind):
    model = model_of()
    with pytest.warns(UserWarning, match=f"{kind.__name__} divides by"):
        wrap(model, optimizer=kind)
    with pytest.raises(ValueError, match="keeps no exp_avg_sq"):
        wrap(model, hvd.Compression.quantized(precondition="adam"), optimizer=kind)
    with pytest.warns(UserWarning, match="Adam divides by"):
        wrap(model, hvd.Compression.quantized(precondition="none"), optimizer=torch.optim.Adam)
    with pytest.raises(ValueError, match="op=Adasum with quantised"):
        wrap(model, op=hvd.Adasum)
    with pytest.raises(NotImplementedError, match="pass this as compression="):
        hvd.reducescatter(torch.ones(4, 4), compression=SMALL)
    with pytest.raises(ValueError, match="precondition is 'sgd'"):
        hvd.Compression.quantized(precondition="sgd")


def test_plain_arrays_with_a_second_moment():
    class Adam:
        def __init__(self):
            self.weights, self.moments, self.num_steps = np.zeros((30, 40), np.float32), None, 0

        def step(self, gradients):
            self.num_steps += 1
            square = gradients["w"] ** 2 * (SMALL.moment_correction(hvd.size()) if self.num_steps > 20 else 1)
            self.moments = square if self.moments is None else 0.99 * self.moments + 0.01 * square
            self.weights -= 0.01 * gradients["w"] / (np.sqrt(self.moments) + 1e-8)

    plain = Adam()
    wrapped = hvdlite.DistributedOptimizer(plain, compression=SMALL, second_moment=lambda name: plain.moments)
    target = np.random.default_rng(0).standard_normal((30, 40)).astype(np.float32)
    noise = np.random.default_rng(1 + hvd.rank())
    for _ in range(300):
        wrapped.step({"w": plain.weights - target + 0.1 * noise.standard_normal((30, 40)).astype(np.float32)})
    assert np.abs(plain.weights - target).mean() < 0.1
    assert (hvd.allgather(torch.from_numpy(plain.weights)[None], name="plain").numpy() == plain.weights).all()
