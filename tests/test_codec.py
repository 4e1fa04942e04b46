"""The codec: kernels bitwise equal to the NumPy reference, and what holds of the numbers whoever computes them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdlite.compression import codec, codec_cpu
from hvdlite.compression.rotation import GROUP, LANES, ROWS, SIGNS
from hvdlite.compression.spec import (
    COUNT,
    DTYPES,
    FIRST,
    FLOOR,
    GRADIENT,
    LEVELS,
    MOMENT,
    NUM_COLUMNS,
    OUT,
    RESIDUAL,
    SHADOW,
    CodecSpec,
)

SPECS = [CodecSpec(bits) for bits in (1, 2, 4, 8)] + [CodecSpec(1, scale) for scale in ("l1", "two_means", "rms")]
SIZES = [0, 1, 31, 32, 33, 511, 512, 513, 1537]
VALUES = ["gaussian", "nan", "infinite", "zero", "denormal", "outlier", "minus_zero", "huge", "mixed"]
BOTH = (codec, codec_cpu)
specs = pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.bits}-{spec.scale}")
twins = pytest.mark.parametrize("twin", BOTH, ids=["reference", "cpu"])


def _values(kind, num_elements, rng):
    values = rng.standard_normal(num_elements).astype(np.float32)
    at = rng.integers(num_elements) if num_elements else 0
    if kind == "zero":
        values[:] = 0
    elif kind == "minus_zero":
        values[:] = -0.0
    elif kind == "denormal":
        values *= np.float32(1e-40)
    elif kind == "huge":
        values *= np.float32(1e37)
    elif kind == "mixed":
        values *= np.float32(10.0) ** rng.integers(-30, 30, num_elements).astype(np.float32)
        values[rng.random(num_elements) < 0.3] = -0.0
    elif num_elements and kind != "gaussian":
        values[at] = {"nan": np.nan, "infinite": rng.choice([np.inf, -np.inf]), "outlier": 1e30}[kind]
    return values


def _as(dtype, values):
    if dtype == "bfloat16":
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    with np.errstate(over="ignore"):
        return values.astype(dtype)


def _message(spec, num_groups):
    return np.zeros(num_groups * spec.words_per_group, np.uint32), np.zeros(num_groups * spec.scales_per_group, np.float32)


def _bits(array):
    return array.view(f"uint{8 * array.itemsize}")


def _address(array):
    return 0 if array is None else array.ctypes.data


def _row(gradient, residual=None, shadow=None, out=None, moment=None, first=0):
    return [_address(gradient), len(gradient), *map(_address, (residual, shadow, out, moment)), first]


def _table(*rows):
    return np.array(rows, np.int64).reshape(-1, NUM_COLUMNS)


class _Case:
    """A table of pieces with gaps between them in the message, and messages to add; built alike for each twin from a seed."""

    def __init__(self, spec, dtype, kinds, sizes, num_incoming, options, seed):
        rng = np.random.default_rng(seed)
        self.arrays, rows, first = [], [], 0
        for kind, num_elements, has in zip(kinds, sizes, options, strict=True):
            gradient, padded = _as(dtype, _values(kind, num_elements, rng)), spec.padded(num_elements)
            residual = rng.standard_normal(padded).astype(np.float32) if "residual" in has else None
            if residual is not None:
                residual[num_elements:] = 0
            shadow = np.full(padded, 7, np.float32) if "shadow" in has else None
            out = gradient if "alias" in has else np.zeros_like(gradient) if "out" in has else None
            moment = None
            if "moment" in has and spec.scale == "rotated":
                moment = np.abs(_values(rng.choice(["gaussian", "zero", "denormal", "mixed", "nan"]), num_elements, rng))
                moment[rng.random(num_elements) < 0.2] = 0
            self.arrays += [one for one in (gradient, residual, shadow, out, moment) if one is not None]
            first += int(rng.integers(3))
            rows.append(_row(gradient, residual, shadow, out, moment, first))
            first += spec.num_groups(num_elements)
        self.pieces, self.incoming = _table(*rows), []
        self.words, self.scales = _message(spec, first)
        for _ in range(num_incoming):
            received = _message(spec, first)
            values = _values(rng.choice(["gaussian", "gaussian", "nan", "zero"]), first * GROUP, rng)
            codec.encode(spec, values, None, None, *received)
            self.incoming.append(received)

    def everything(self):
        return [self.words, self.scales, *self.arrays]


OPTIONS = st.sets(st.sampled_from(["residual", "shadow", "out", "alias", "moment"]))
PIECES = st.lists(st.tuples(st.sampled_from(VALUES), st.sampled_from(SIZES), OPTIONS), max_size=4)


@specs
@settings(max_examples=40, deadline=None)
@given(st.sampled_from(DTYPES), PIECES, st.integers(0, 3), st.sampled_from([1.0, 0.5, 1 / 3, 1e-3]), st.integers(0, 2**32))
def test_kernels_are_bitwise_the_reference(spec, dtype, pieces, num_incoming, factor, seed):
    kinds, sizes, options = zip(*pieces, strict=True) if pieces else ((), (), ())
    cases = []
    for twin in BOTH:
        case = _Case(spec, dtype, kinds, sizes, num_incoming, options, seed)
        twin.encode_pieces(spec, dtype, case.pieces, case.incoming, case.words, case.scales, factor)
        encoded = [one.copy() for one in case.everything()]
        finite = twin.finite_pieces(spec, case.pieces, case.scales)
        twin.decode_pieces(spec, dtype, case.pieces, case.words, case.scales, factor)
        for before, after in zip(encoded, case.everything(), strict=True):
            assert np.array_equal(_bits(before), _bits(after)), "decoding again gives another result than the owner's"
        cases.append([finite, *encoded])
    for reference, kernel in zip(*cases, strict=True):
        assert np.array_equal(_bits(reference), _bits(kernel))


@specs
@settings(max_examples=15, deadline=None)
@given(st.sampled_from(DTYPES), st.sampled_from(VALUES), st.sampled_from(SIZES), st.booleans(), st.integers(0, 2**32))
def test_calls_for_single_tensors_are_bitwise_the_reference(spec, dtype, kind, num_elements, has_residual, seed):
    results = []
    for twin in BOTH:
        rng = np.random.default_rng(seed)
        gradient, padded = _as(dtype, _values(kind, num_elements, rng)), spec.padded(num_elements)
        residual = _values("gaussian", padded, rng)
        residual[num_elements:] = 0
        added = residual if has_residual else None
        shadow, turned, decoded, total = (np.full(padded, 3, np.float32) for _ in range(4))
        message, again = _message(spec, spec.num_groups(num_elements)), _message(spec, spec.num_groups(num_elements))
        twin.encode(spec, gradient, added, shadow, *message)
        twin.rotate(spec, gradient, added, turned)
        rotated = turned.copy()
        twin.encode_rotated(spec, turned, turned, *again, num_elements)
        twin.decode(spec, *message, decoded, num_elements)
        total[num_elements:] = 0
        twin.decode_add(spec, *message, total, num_elements)
        back, last = np.zeros_like(gradient), np.zeros_like(gradient)
        twin.rotate_back(spec, rotated, back)
        twin.unrotate(spec, *message, last, 0.25)
        results.append([shadow, rotated, turned, decoded, total, back, last, *message, *again])
    for reference, kernel in zip(*results, strict=True):
        assert np.array_equal(_bits(reference), _bits(kernel))


@specs
def test_a_large_tensor_is_bitwise_the_reference(spec):
    rng = np.random.default_rng(3)
    num_elements = 10**6 + 7
    gradient, residual = rng.standard_normal(num_elements, np.float32), rng.standard_normal(spec.padded(num_elements), np.float32)
    residual[num_elements:] = 0
    results = []
    for twin in BOTH:
        shadow, out = np.empty_like(residual), np.empty_like(gradient)
        message = _message(spec, spec.num_groups(num_elements))
        twin.encode_pieces(spec, "float32", _table(_row(gradient, residual, shadow, out)), [], *message, 0.5)
        results.append([shadow, out, *message])
    for reference, kernel in zip(*results, strict=True):
        assert np.array_equal(_bits(reference), _bits(kernel))


@specs
@pytest.mark.parametrize("num_elements", [5, 512, 1300])
def test_pieces_of_a_tensor_give_what_the_whole_tensor_gives(spec, num_elements):
    gradient = np.random.default_rng(4).standard_normal(num_elements).astype(np.float32)
    shadow, cut_shadow = np.empty(spec.padded(num_elements), np.float32), np.empty(spec.padded(num_elements), np.float32)
    whole, cut = _message(spec, spec.num_groups(num_elements)), _message(spec, spec.num_groups(num_elements))
    codec_cpu.encode(spec, gradient, None, shadow, *whole)
    starts = range(0, num_elements, GROUP)
    parts = [(gradient[s : s + GROUP], cut_shadow[s : s + GROUP], s // GROUP) for s in starts]
    codec_cpu.encode_pieces(spec, "float32", _table(*(_row(g, shadow=e, first=k) for g, e, k in parts)), [], *cut, 1.0)
    for one, other in zip((shadow, *whole), (cut_shadow, *cut), strict=True):
        assert np.array_equal(_bits(one), _bits(other))


@twins
def test_without_gradient_the_residual_alone_is_sent(twin):
    spec, residual = CodecSpec(), np.random.default_rng(5).standard_normal(1024).astype(np.float32)
    message, expected = _message(spec, 2), _message(spec, 2)
    zeros = np.zeros(700, np.float32)
    row = _row(zeros, residual)
    residual[700:] = 0
    twin.encode_pieces(spec, "float32", _table(row), [], *expected, 1.0)
    row[GRADIENT] = 0
    twin.encode_pieces(spec, "float32", _table(row), [], *message, 1.0)
    assert np.array_equal(message[0], expected[0])
    assert np.array_equal(message[1], expected[1]) and (message[1] > 0).all()


@twins
def test_three_elements_by_hand(twin):
    spec, message, shadow, out = CodecSpec(), _message(CodecSpec(), 1), np.empty(GROUP, np.float32), np.empty(3, np.float32)
    gradient, residual = np.float32([1, -2, 5]), np.zeros(GROUP, np.float32)
    residual[:3] = [1, -1, 0]
    twin.encode_pieces(spec, "float32", _table(_row(gradient, residual, shadow, out)), [], *message, 0.5)
    # v = 2, -3, 5; a tail is not rotated; scale = sum v^2 / sum |v| = 38 / 10; bits 1, 0, 1, and 1 for the padding.
    scale = np.float32(38) / np.float32(10)
    assert message[0].tolist() == [0xFFFFFFFD] + [0xFFFFFFFF] * 15
    assert message[1] == scale
    assert shadow[:3].tolist() == [np.float32(2) - scale, np.float32(-3) + scale, np.float32(5) - scale]
    assert not shadow[3:].any()
    assert out.tolist() == [scale / 2, -scale / 2, scale / 2]


@twins
def test_moments_of_two_elements_by_hand(twin):
    spec, message, out = CodecSpec(), _message(CodecSpec(), 1), np.empty(2, np.float32)
    gradient, moment = np.float32([3, -2]), np.float32([1, 9])
    twin.encode_pieces(spec, "float32", _table(_row(gradient, out=out, moment=moment)), [], *message, 1.0)
    p = np.sqrt(moment) + FLOOR * np.sqrt(np.float32(5))
    v = gradient / p
    scale = (v[0] * v[0] + v[1] * v[1]) / (v[0] - v[1])
    assert message[1] == scale
    assert out.tolist() == [scale * p[0], -scale * p[1]]


@twins
@pytest.mark.parametrize("num_elements", [100, 2048])
def test_equal_moments_change_nothing_but_rounding_and_none_at_all_nothing(twin, num_elements):
    spec, gradient = CodecSpec(), np.random.default_rng(6).standard_normal(num_elements).astype(np.float32)
    outs = []
    for moment in (None, np.zeros(num_elements, np.float32), np.full(num_elements, 4, np.float32)):
        outs.append(np.empty(num_elements, np.float32))
        message = _message(spec, spec.num_groups(num_elements))
        twin.encode_pieces(spec, "float32", _table(_row(gradient, out=outs[-1], moment=moment)), [], *message, 1.0)
    assert np.array_equal(outs[0], outs[1])
    np.testing.assert_allclose(outs[2], outs[0], rtol=1e-5, atol=1e-6)


@specs
@settings(max_examples=20, deadline=None)
@given(st.sampled_from(["gaussian", "outlier", "denormal", "zero"]), st.sampled_from(SIZES[1:]), st.integers(0, 2**32))
def test_what_is_not_sent_stays_in_the_residual(spec, kind, num_elements, seed):
    rng = np.random.default_rng(seed)
    gradient, padded = _values(kind, num_elements, rng), spec.padded(num_elements)
    residual = _values(kind, padded, rng)
    residual[num_elements:] = 0
    v, shadow, decoded = (np.empty(padded, np.float32) for _ in range(3))
    words, scales = _message(spec, spec.num_groups(num_elements))
    codec_cpu.rotate(spec, gradient, residual, v)
    codec_cpu.encode(spec, gradient, residual, shadow, words, scales)
    codec_cpu.decode(spec, words, scales, decoded, num_elements)
    # The reach of a level: two_means has two scales.
    size = np.abs(scales.reshape(-1, spec.scales_per_group)).max(1).repeat(GROUP).astype(np.float64) * LEVELS[spec.bits][-1]
    error = np.abs(v.astype(np.float64) - (decoded.astype(np.float64) + shadow))
    assert (error <= 2.0**-24 * (np.abs(v.astype(np.float64)) + size) + 2.0**-149).all()
    assert not shadow[num_elements:].any()


@specs
@pytest.mark.parametrize("num_elements", SIZES[1:])
@pytest.mark.parametrize("value", [1.0, -0.3, 7e-5, 3e20])
def test_a_constant_tensor_survives(spec, num_elements, value):
    gradient, out = np.full(num_elements, value, np.float32), np.empty(num_elements, np.float32)
    message, shadow = _message(spec, spec.num_groups(num_elements)), np.empty(spec.padded(num_elements), np.float32)
    codec_cpu.encode(spec, gradient, None, shadow, *message)
    codec_cpu.unrotate(spec, *message, out, 1.0)
    if spec.bits == 1 and spec.scale != "two_means":
        assert np.array_equal(out, gradient) and not shadow.any()
    else:
        np.testing.assert_allclose(out, gradient, rtol=2e-6)


@pytest.mark.parametrize("ranks", [2, 3, 4, 7, 8])
@pytest.mark.parametrize("num_elements", SIZES[1:])
def test_the_mean_of_a_constant_is_the_constant(ranks, num_elements):
    spec, out = CodecSpec(), np.empty(num_elements, np.float32)
    gradient = np.full(num_elements, 3, np.float32)
    sent = _message(spec, spec.num_groups(num_elements))
    codec_cpu.encode(spec, gradient, None, None, *sent)
    total = _message(spec, spec.num_groups(num_elements))
    codec_cpu.encode_pieces(spec, "float32", _table(_row(gradient, out=out)), [sent] * (ranks - 1), *total, 1 / ranks)
    assert np.array_equal(out, gradient)


@twins
@specs
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_zeros_decode_to_zeros_and_leave_nothing(spec, twin, zero):
    gradient, out, shadow = np.full(1537, zero, np.float32), np.full(1537, 5, np.float32), np.full(2048, 5, np.float32)
    message = _message(spec, 4)
    twin.encode_pieces(spec, "float32", _table(_row(gradient, None, shadow, out)), [], *message, 1.0)
    assert not out.any() and not shadow.any() and not message[1].any()


@pytest.mark.parametrize("bits, share", [(1, 0.5708), (2, 0.1331), (4, 0.0117), (8, 0.0308**2 / 12)])
def test_of_gaussian_groups_a_known_share_of_energy_stays(bits, share):
    """|residual|^2 / |v|^2 = D / (1 - D), D the least distortion of such a quantiser: pi/2 - 1 with one bit (Max 1960)."""
    left = _share_left(CodecSpec(bits), np.random.default_rng(7).standard_normal(200 * GROUP))
    assert left.mean() == pytest.approx(share, rel=0.1)


@pytest.mark.parametrize("spec", SPECS[:6], ids=lambda spec: f"{spec.bits}-{spec.scale}")
def test_less_stays_than_there_was_in_uneven_groups(spec):
    """Of every group where the scale is that of least squares; with one rotated bit, whose scale is larger, on the whole."""
    rng = np.random.default_rng(8)
    left = _share_left(spec, rng.lognormal(0, 1, 100 * GROUP) * rng.choice([-1, 1], 100 * GROUP))
    assert left.mean() < 1
    assert (left < 1).all() or spec == CodecSpec()


@specs
def test_residuals_stay_bounded_in_the_worst_group(spec):
    """One element holds everything: one rotated bit leaves up to 31 times its energy, which feedback must not build upon."""
    gradient = np.zeros(GROUP, np.float32)
    gradient[77] = 1
    residual, message, norms = np.zeros(GROUP, np.float32), _message(spec, 1), []
    for _ in range(2000):
        codec_cpu.encode(spec, gradient, residual, residual, *message)
        norms.append(np.linalg.norm(residual))
    assert max(norms[1000:]) <= 1.05 * max(norms[:1000])


def _share_left(spec, values):
    """*Shapes*: (groups,)."""
    message, shadow = _message(spec, len(values) // GROUP), np.empty(len(values), np.float32)
    codec_cpu.encode(spec, values.astype(np.float32), None, shadow, *message)
    left, there = (np.sum(one.astype(np.float64).reshape(-1, GROUP) ** 2, 1) for one in (shadow, values))
    return left / there


@pytest.mark.parametrize("spec", SPECS[:4], ids=lambda spec: str(spec.bits))
def test_decoded_along_v_is_v(spec):
    gradient = np.random.default_rng(9).standard_normal(50 * GROUP).astype(np.float32)
    v, decoded, message = np.empty_like(gradient), np.empty_like(gradient), _message(spec, 50)
    codec_cpu.rotate(spec, gradient, None, v)
    codec_cpu.encode(spec, gradient, None, None, *message)
    codec_cpu.decode(spec, *message, decoded, len(v))
    groups, codes = v.reshape(-1, GROUP).astype(np.float64), decoded.reshape(-1, GROUP).astype(np.float64)
    np.testing.assert_allclose((groups * codes).sum(1), (groups**2).sum(1), rtol=1e-5)


@specs
@twins
@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("group", range(4))
def test_a_group_that_is_not_finite_is_marked_and_no_other(spec, twin, broken, group):
    gradient = np.random.default_rng(10).standard_normal(1537).astype(np.float32)
    clean, message, shadow = _message(spec, 4), _message(spec, 4), np.empty(2048, np.float32)
    twin.encode(spec, gradient, None, None, *clean)
    gradient[group * GROUP] = broken
    out = np.empty(1537, np.float32)
    twin.encode(spec, gradient, None, shadow, *message)
    others = np.arange(4) != group
    scales, expected = (one.reshape(4, -1) for one in (message[1], clean[1]))
    assert np.isnan(scales[group]).all() and np.array_equal(scales[others], expected[others])
    words, expected = (one.reshape(4, -1) for one in (message[0], clean[0]))
    assert not words[group].any() and np.array_equal(words[others], expected[others])
    twin.unrotate(spec, *message, out, 1.0)
    assert np.array_equal(np.flatnonzero(np.isnan(out)) // GROUP, np.full(min(GROUP, 1537 - group * GROUP), group))
    assert np.array_equal(np.isnan(shadow), np.isnan(np.append(out, np.zeros(511))))
    pieces = _table(*(_row(gradient[k * GROUP : (k + 1) * GROUP], first=k) for k in range(4)))
    assert np.array_equal(twin.finite_pieces(spec, pieces, message[1]), others)
    # A rank that adds the message to its own finite values passes the mark on.
    onward, ones = _message(spec, 4), np.ones(1537, np.float32)
    twin.encode_pieces(spec, "float32", _table(_row(ones)), [message], *onward, 1.0)
    assert np.array_equal(np.isnan(onward[1].reshape(4, -1)).all(1), ~others)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("num_elements", [31, 255, 511])
def test_a_tail_is_never_far_behind(bits, num_elements):
    """With one bit a scale of least squares left a spike half of the tail's elements in steps behind, here up to 255."""
    spec, rng = CodecSpec(bits), np.random.default_rng(10)
    spike = np.zeros(num_elements, np.float32)
    spike[num_elements // 2] = 1
    for gradient in (spike, (rng.standard_normal(num_elements) * rng.lognormal(0, 1.5, num_elements)).astype(np.float32)):
        residual, message, lags = np.zeros(GROUP, np.float32), _message(spec, 1), []
        for _ in range(3000):
            codec_cpu.encode(spec, gradient, residual, residual, *message)
            lags.append(np.abs(residual).max() / np.abs(gradient).max())
        assert max(lags) < 20


@specs
def test_with_feedback_the_mean_of_what_is_sent_approaches_a_fixed_gradient(spec):
    gradient = np.random.default_rng(11).standard_normal(1300).astype(np.float32)
    residual, shadow, out = np.zeros(1536, np.float32), np.zeros(1536, np.float32), np.empty(1300, np.float32)
    message, total, errors = _message(spec, 3), np.zeros(1300), {}
    for step in range(1, 401):
        codec_cpu.encode_pieces(spec, "float32", _table(_row(gradient, residual, shadow, out)), [], *message, 1.0)
        residual, shadow = shadow, residual
        total += out
        errors[step] = np.linalg.norm(total / step - gradient)
    # L1 scales starve outliers: their residuals are still growing at the hundredth step.
    assert errors[400] <= errors[100] * (0.5 if spec.scale in ("rotated", "rms") else 0.6)
    assert errors[400] < 0.05 * np.linalg.norm(gradient)


def test_messages_take_a_thirtieth_of_float32():
    num_elements = 10**7
    assert CodecSpec().wire_bytes(num_elements) <= num_elements * 4 / 29.5
    words, scales = CodecSpec().split(np.zeros(CodecSpec().wire_bytes(1300), np.uint8), 1300)
    assert (len(words), len(scales)) == (3 * 16, 3)


def test_the_rotation_is_its_own_inverse_and_keeps_lengths():
    spec, gradient = CodecSpec(), np.random.default_rng(12).standard_normal(GROUP).astype(np.float32)
    rotated, back = np.empty_like(gradient), np.empty_like(gradient)
    codec_cpu.rotate(spec, gradient, None, rotated)
    codec_cpu.rotate_back(spec, rotated, back)
    np.testing.assert_allclose(back, gradient, atol=1e-6)
    assert np.linalg.norm(rotated) == pytest.approx(np.linalg.norm(gradient), rel=1e-6)
    matrix = np.array([[-1.0 if bin(i & j).count("1") % 2 else 1.0 for j in range(ROWS)] for i in range(ROWS)])
    expected = matrix @ (gradient.astype(np.float64) * SIGNS).reshape(ROWS, LANES)
    np.testing.assert_allclose(rotated.reshape(ROWS, LANES), expected, atol=1e-6)


@twins
def test_tables_and_messages_are_checked(twin):
    spec, gradient = CodecSpec(), np.zeros(GROUP, np.float32)
    words, scales = _message(spec, 1)
    good = _table(_row(gradient, out=gradient))
    twin.decode_pieces(spec, "float32", good, words, scales, 1.0)

    def changed(column, value):
        table = good.copy()
        table[0, column] = value
        return table

    for pieces, message, fault in [
        (changed(FIRST, 1), (words, scales), "where 2 groups need"),
        (changed(FIRST, -1), (words, scales), "negative"),
        (changed(COUNT, -1), (words, scales), "negative"),
        (good, (words[:-1], scales), "have 15 elements"),
        (good, (words, scales[:-1]), "have 0 elements"),
        (good, (words.astype(np.uint64), scales), "are uint64"),
        (good, (np.zeros(32, np.uint32)[::2], scales), "contiguous"),
        (good.astype(np.int32), (words, scales), "is int32"),
        (good[:, :6], (words, scales), "shape"),
    ]:
        with pytest.raises(ValueError, match=fault):
            twin.decode_pieces(spec, "float32", pieces, *message, 1.0)
        with pytest.raises(ValueError, match=fault):
            twin.encode_pieces(spec, "float32", pieces, [], *message, 1.0)
    with pytest.raises(ValueError, match="have 15 elements"):
        twin.encode_pieces(spec, "float32", good, [(words[:-1], scales)], words, scales, 1.0)
    with pytest.raises(ValueError, match="MOMENT"):
        twin.encode_pieces(CodecSpec(1, "l1"), "float32", changed(MOMENT, 64), [], words, scales, 1.0)


@pytest.mark.parametrize("wrong", [{"bits": 3}, {"scale": "l2"}, {"bits": 2, "scale": "l1"}, {"group": 256}])
def test_a_spec_names_what_it_cannot_do(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        CodecSpec(**wrong)


def test_columns_are_those_of_the_table():
    assert list(range(NUM_COLUMNS)) == [GRADIENT, COUNT, RESIDUAL, SHADOW, OUT, MOMENT, FIRST]
