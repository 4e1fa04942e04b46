"""The CPU kernels against NumPy and torch, exhaustively where that is cheap."""

import numpy as np
import pytest

from hvdlite import kernels

ALL_HALVES = np.arange(65536, dtype=np.uint16)


def _floats_near_halves():
    """Random bit patterns, every half, every tie between halves, and their neighbours."""
    random = np.random.default_rng(0).integers(0, 2**32, 500_000, dtype=np.uint32).view(np.float32)
    halves = ALL_HALVES.view(np.float16).astype(np.float32)
    ordered = np.sort(halves[np.isfinite(halves)])
    ties = (ordered[:-1] + ordered[1:]) / 2
    near = [np.nextafter(ties, np.float32(sign)) for sign in (-1e38, 1e38)]
    return np.concatenate([random, halves, ties, *near, np.float32([65519.996, 65520, np.inf, -np.inf, np.nan])])


def test_widening_float16_is_exact_for_all_65536():
    wide = np.empty(65536, np.float32)
    kernels.halves_to_float(ALL_HALVES, wide, False)
    expected = ALL_HALVES.view(np.float16).astype(np.float32)
    nan = np.isnan(expected)
    assert np.array_equal(np.isnan(wide), nan)
    assert np.array_equal(wide[~nan].view(np.uint32), expected[~nan].view(np.uint32))


def test_narrowing_float16_rounds_as_numpy():
    values = _floats_near_halves()
    got = np.empty(len(values), np.uint16)
    kernels.float_to_halves(values, got, False)
    with np.errstate(all="ignore"):
        expected = values.astype(np.float16).view(np.uint16)
    nan = np.isnan(values)
    assert np.array_equal(got[~nan], expected[~nan])
    assert np.isnan(got[nan].view(np.float16)).all()


def test_bfloat16_both_ways_as_torch():
    torch = pytest.importorskip("torch")
    values = _floats_near_halves()
    got = np.empty(len(values), np.uint16)
    kernels.float_to_halves(values, got, True)
    expected = torch.from_numpy(values).bfloat16().view(torch.int16).numpy().view(np.uint16)
    nan = np.isnan(values)
    assert np.array_equal(got[~nan], expected[~nan])
    back = np.empty(len(values), np.float32)
    kernels.halves_to_float(got, back, True)
    assert np.isnan(back[nan]).all()
    assert np.array_equal(back[~nan].view(np.uint32), got[~nan].astype(np.uint32) << 16)


@pytest.mark.parametrize("count", [0, 1, 31, 2047, 2048, 2049, 5000])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("op", [kernels.SUM, kernels.MIN, kernels.MAX, kernels.PRODUCT])
def test_reduce_halves_accumulates_in_float32_in_rank_order(op, ranks, count):
    rows = np.random.default_rng(count).normal(size=(ranks, count)).astype(np.float16)
    out = np.empty(count, np.uint16)
    kernels.reduce_halves(rows.view(np.uint16), out, op, False, 0.5, 3.0)
    combine = [np.add, np.minimum, np.maximum, np.multiply][op]
    total = rows[0].astype(np.float32) * np.float32(0.5)
    for row in rows[1:]:
        total = combine(total, row.astype(np.float32) * np.float32(0.5))
    assert np.array_equal(out.view(np.float16), (total * np.float32(3.0)).astype(np.float16))


@pytest.mark.parametrize("op", [kernels.MIN, kernels.MAX])
@pytest.mark.parametrize("nan_rank", [0, 1])
def test_min_and_max_keep_nan(op, nan_rank):
    rows = np.ones((2, 3), np.float16)
    rows[nan_rank, 1] = np.nan
    out = np.empty(3, np.uint16)
    kernels.reduce_halves(rows.view(np.uint16), out, op, False, 1.0, 1.0)
    assert np.isnan(out.view(np.float16)).tolist() == [False, True, False]


def test_pack_and_unpack_are_inverse():
    generator = np.random.default_rng(1)
    tensors = [generator.integers(0, 256, size, dtype=np.uint8) for size in (1, 0, 7, 64, 4097)]
    sizes = np.array([len(one) for one in tensors], np.int64)
    offsets = np.array([0, 64, 64, 128, 192], np.int64)
    buffer = np.zeros(8192, np.uint8)
    addresses = np.array([one.ctypes.data for one in tensors], np.uint64)
    kernels.pack(addresses, sizes, offsets, buffer.ctypes.data)
    for one, offset in zip(tensors, offsets, strict=True):
        assert np.array_equal(buffer[offset : offset + len(one)], one)
    assert not buffer[192 + 4097 :].any()
    copies = [np.zeros_like(one) for one in tensors]
    kernels.unpack(np.array([one.ctypes.data for one in copies], np.uint64), sizes, offsets, buffer.ctypes.data)
    assert all(np.array_equal(a, b) for a, b in zip(copies, tensors, strict=True))


def test_nothing_is_compiled_after_import():
    for kernel in (kernels.pack, kernels.unpack, kernels.halves_to_float, kernels.float_to_halves, kernels.reduce_halves):
        assert len(kernel.signatures) == 1
        assert not kernel._can_compile
