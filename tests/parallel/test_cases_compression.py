"""Public bug reports as tests, on two and three ranks: compressed gradients; as test_cases_np2.py.

What one quantiser promises is in tests/test_quantized.py and tests/test_codec.py; here is what users of torch see.
"""

import copy

import pytest
import torch

import hvdlite
import hvdlite.torch as hvd
from hvdlite.runtime import default_runtime

RANKS = (2, 3)
ONEBIT = hvd.Compression.onebit


def same_on_ranks(tensor):
    return bool((hvd.allgather(tensor.detach().reshape(1, -1), name="same") == tensor.detach().reshape(1, -1)).all())


def residual_of(name):
    return {key: torch.from_numpy(values.copy()) for key, values, _ in default_runtime().residuals.items(0, name)}


def test_b3_compression_on_one_rank_only():
    """apache/mxnet#20007: parties with other settings of compression summed codes and values."""
    x = torch.ones(600)
    quantized = hvd.Compression.quantized
    settings = {"without": None, "bits": quantized(bits=2), "schedule": quantized(schedule="ring")}
    for name, other in settings.items():
        mine = (other or hvd.Compression.none) if hvd.rank() else ONEBIT
        with pytest.raises(hvd.HorovodInternalError) as caught:
            hvd.allreduce(x, name=f"b3.{name}", compression=mine)
        said = str(caught.value)
        assert f"'b3.{name}'" in said and "compressors differ" in said and "rank 0 has quantized(bits=1" in said, said
        assert (hvd.allreduce(x, name=f"b3.{name}", compression=ONEBIT) == 1).all()


def test_f1_fp16():
    """horovod/horovod#2108: a changed dtype, integers that were rounded, an exception at what float16 cannot hold."""
    for dtype in (torch.float16, torch.float32, torch.float64):
        got = hvd.allreduce(torch.tensor([0.1, 70000.0], dtype=dtype), name="f1", compression=hvd.Compression.fp16)
        assert got.dtype == dtype and abs(got[0].item() - 0.1) < 1e-3 and got[1].item() == float("inf")
    large = 2**53 + 1
    got = hvd.allreduce(torch.tensor([large]), name="f1", compression=hvd.Compression.fp16, op=hvd.Sum)
    assert got.dtype == torch.int64 and got.item() == large * hvd.size()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_f1_onebit_of_halves(dtype):
    """bytedance/byteps#299, apache/mxnet#15252: a 16-bit index, or the scale as a sum in float16, overflowed."""
    for count, value in ((70_000, 1.0), (40_000, 0.5)):
        got = hvd.allreduce(torch.full((count,), value, dtype=dtype), name=f"f1.{count}", compression=ONEBIT)
        assert got.dtype == dtype and got.shape == (count,) and (got == value).all()


SHAPES = [*[(n,) for n in (0, 1, 2, 3, 7, 8, 9, 31, 32, 33, 255, 1023)], (), (3, 5)]


@pytest.mark.parametrize("schedule", ["ring", "two_shot"])
def test_f2_sizes_and_zeros(schedule):
    """deepspeedai/DeepSpeed#5054, #6974, #1380, #817: lengths that the packing or the ranks do not divide; constant zeros."""
    compression = hvd.Compression.quantized(schedule=schedule)

    def reduce(tensors, name):
        results = hvd.grouped_allreduce(tensors, name=name, compression=compression)
        for tensor, got in zip(tensors, results, strict=True):
            assert got.shape == tensor.shape and got.dtype == tensor.dtype and got.isfinite().all()
        assert same_on_ranks(torch.cat([one.flatten() for one in results]))
        return results

    assert all((one == 1).all() for one in reduce([torch.ones(shape) for shape in SHAPES], "ones"))
    for _ in range(2):
        assert not any(one.any() for one in reduce([torch.zeros(shape) for shape in SHAPES], "zeros"))
    assert not any(one.any() for one in residual_of("zeros").values())
    # Zeros on rank 0 only.
    some = [torch.full(shape, float(hvd.rank() > 0)) for shape in SHAPES]
    for total in map(sum, zip(*[reduce(some, "some") for _ in range(40)], strict=True)):
        assert not total.numel() or (total / 40 - (1 - 1 / hvd.size())).abs().max() < 0.1
    # A single element: what it is behind is bounded by half of the elements that share its scale at each of two quantisers.
    single = [torch.zeros(shape) for shape in SHAPES]
    for one in single:
        if one.numel():
            one.view(-1)[one.numel() // 2] = 1.0
    for one, total in zip(single, map(sum, zip(*[reduce(single, "single") for _ in range(80)], strict=True)), strict=True):
        assert not one.numel() or (total - 80 * one).abs().max() <= min(80, one.numel() + 1)


def test_f2_running_mean():
    """A residual that is lost, or decays, would leave an error that does not fall with 1 / T."""
    mine = torch.randn(3000, generator=torch.Generator().manual_seed(hvd.rank()))
    right, total, error = hvd.allreduce(mine, name="f2.right"), torch.zeros(3000), {}
    for step in range(1, 401):
        total += hvd.allreduce(mine, name="f2.mean", compression=ONEBIT)
        error[step] = (total / step - right).norm()
    assert error[400] <= error[100] / 2


def test_f3_what_is_not_finite():
    """deepspeedai/DeepSpeed#753, pytorch/pytorch#49374: after one overflow the memory of errors stayed infinite."""
    results = []
    for step, (rank, value) in enumerate(((1, float("inf")), (0, float("nan")), (0, 1.0))):
        x = torch.ones(2000)
        if hvd.rank() == rank:
            x[1234] = value
        results.append(hvd.allreduce(x, name="f3", compression=ONEBIT))
        assert all(one.isfinite().all() for one in residual_of("f3").values()), step
    assert not results[0].isfinite().all() and not results[1].isfinite().all() and (results[2] == 1).all()


def model_of():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(40, 60), torch.nn.Tanh(), torch.nn.Linear(60, 10))


def wrap(model):
    # A schedule that is measured may be another one after the next init().
    return hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), model.named_parameters(),
                                    compression=hvd.Compression.quantized(min_elements=64, schedule="two_shot"))


def train(model, optimizer, steps):
    for step in steps:
        x = torch.randn(8, 40, generator=torch.Generator().manual_seed(100 * step + hvd.rank()))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def flat(model):
    return torch.cat([one.detach().flatten() for one in model.parameters()])


def test_c5_f3_a_loss_scaler_skips_on_all_ranks():
    """Two overflows halve the scale twice, and no step afterwards is skipped."""
    model = model_of()
    optimizer = wrap(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    bad = {1: (1, "inf"), 2: (0, "nan")}
    for step in range(6):
        before = flat(model)
        x = torch.randn(8, 40, generator=torch.Generator().manual_seed(100 * step + hvd.rank()))
        loss = model(x).square().mean()
        if step in bad and hvd.rank() == bad[step][0]:
            loss = loss * float(bad[step][1])
        scaler.scale(loss).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
        hvdlite.set_loss_scale(scaler.get_scale())
        optimizer.zero_grad()
        assert torch.equal(before, flat(model)) == (step in bad), step
        (state,) = optimizer.state_dict()["hvdlite"]
        assert all(one.isfinite().all() for one in state["residuals"].values())
    assert scaler.get_scale() == 256 and same_on_ranks(flat(model)) and flat(model).isfinite().all()
    hvdlite.set_loss_scale(1.0)


def test_f4_residuals_in_checkpoints(tmp_path):
    """pytorch/pytorch#75666, #79334: error memory that is not saved, or made after loading and so lost."""
    straight = model_of()
    train(straight, wrap(straight), range(10))
    model = model_of()
    optimizer = wrap(model)
    train(model, optimizer, range(5))
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / f"{hvd.rank()}.pt")
    del optimizer
    hvd.shutdown()
    hvd.init()
    saved = torch.load(tmp_path / f"{hvd.rank()}.pt", weights_only=True)
    resumed = model_of()
    optimizer = wrap(resumed)
    resumed.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])  # before the first backward pass
    train(resumed, optimizer, range(5, 10))
    assert torch.equal(flat(straight), flat(resumed))
    # Those of a job of another size, and those of another rank, are left out with a warning that says what would help.
    for field, value in (("size", hvd.size() + 1), ("rank", hvd.rank() + 1)):
        other = copy.deepcopy(saved["optimizer"])
        other["hvdlite"][0][field] = value
        with pytest.warns(UserWarning, match=r"sync_residuals\(\)"):
            optimizer.load_state_dict(other)
        assert not optimizer.state_dict()["hvdlite"][0]["residuals"]
    train(resumed, optimizer, range(10, 12))
    assert same_on_ranks(flat(resumed))
