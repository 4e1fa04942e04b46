"""Every CUDA kernel in the simulator, bitwise equal to the NumPy reference and to the kernels for CPUs."""

import numpy as np
import pytest
from fake_cuda import FakeDevice
from test_codec import SIZES, _address, _as, _bits, _Case, _message, _row, _table, _values

from hvdlite.compression import codec, codec_cpu, codec_cuda
from hvdlite.compression.rotation import GROUP
from hvdlite.compression.spec import DTYPES, LEVELS, CodecSpec

SPECS = [CodecSpec(bits) for bits in (1, 2, 4, 8)] + [CodecSpec(1, scale) for scale in ("l1", "two_means", "rms")]
specs = pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.bits}-{spec.scale}")
KINDS = ["gaussian", "nan", "infinite", "zero", "denormal", "outlier", "minus_zero", "huge", "mixed"]


def _at(message):
    return tuple(map(_address, message))


def _assert_equal(first, second):
    for one, other in zip(first, second, strict=True):
        assert np.array_equal(_bits(one), _bits(other))


@specs
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", [0, 1, 2])
def test_tables_of_pieces(spec, dtype, case):
    """All sizes in one launch, with every column of the table there and not, and 0 to 2 messages incoming."""
    kinds = [KINDS[(size + case) % len(KINDS)] for size in range(len(SIZES))]
    options = [[{"residual", "shadow", "out"}, {"residual", "shadow", "alias", "moment"}, {"shadow"}][(case + i) % 3]
               for i in range(len(SIZES))]
    results = []
    for twin in ("reference", "cuda"):
        one = _Case(spec, dtype, kinds, SIZES, case, options, 7 + case)
        if twin == "reference":
            codec.encode_pieces(spec, dtype, one.pieces, one.incoming, one.words, one.scales, 1 / 3)
            encoded = [array.copy() for array in one.everything()]
            finite = codec.finite_pieces(spec, one.pieces, one.scales)
            codec.decode_pieces(spec, dtype, one.pieces, one.words, one.scales, 1 / 3)
        else:
            kernels = codec_cuda.CudaCodec(FakeDevice())
            own = _at((one.words, one.scales))
            verdicts = np.ones((2, len(SIZES)), np.int32)
            places = verdicts.ctypes.data + 4 * np.arange(2 * len(SIZES)).reshape(2, -1)
            kernels.encode_pieces(spec, dtype, one.pieces, [_at(m) for m in one.incoming], own, 1 / 3, places[0])
            encoded = [array.copy() for array in one.everything()]
            kernels.decode_pieces(spec, dtype, one.pieces, own, 1 / 3, places[1])
            finite = verdicts[0].astype(bool)
            assert np.array_equal(verdicts[0], verdicts[1])
        results.append([finite, *encoded, *one.everything()])
    _assert_equal(*results)
    assert (spec.scale != "rotated") or not results[0][0].all() or case > 0


@specs
@pytest.mark.parametrize("kind", ["gaussian", "nan", "mixed"])
def test_single_tensors(spec, kind):
    """rotate, encode_rotated, decode, decode_add and rotate_back, for all sizes."""
    device = FakeDevice()
    kernels = codec_cuda.CudaCodec(device)
    for number, num_elements in enumerate(SIZES):
        dtype = DTYPES[number % len(DTYPES)]
        results = []
        for twin in (codec_cpu, kernels):
            rng = np.random.default_rng(num_elements)
            gradient, padded = _as(dtype, _values(kind, num_elements, rng)), spec.padded(num_elements)
            residual = _values("gaussian", padded, rng)
            residual[num_elements:] = 0
            turned, shadow, decoded, total = (np.full(padded, 3, np.float32) for _ in range(4))
            total[num_elements:] = 0
            message, back = _message(spec, spec.num_groups(num_elements)), np.zeros_like(gradient)
            if twin is codec_cpu:
                twin.rotate(spec, gradient, residual, turned)
                twin.encode_rotated(spec, turned, shadow, *message, num_elements)
                twin.decode(spec, *message, decoded, num_elements)
                twin.decode_add(spec, *message, total, num_elements)
                twin.rotate_back(spec, turned, back)
            else:
                twin.rotate(spec, dtype, _table(_row(gradient, residual, turned)))
                twin.encode_rotated(spec, _table([_address(turned), num_elements, 0, _address(shadow), 0, 0, 0]), _at(message))
                twin.decode(spec, _table([0, num_elements, 0, 0, _address(decoded), 0, 0]), _at(message))
                twin.decode(spec, _table([0, num_elements, 0, 0, _address(total), 0, 0]), _at(message), add=True)
                twin.rotate_back(spec, dtype, _table([0, num_elements, _address(turned), 0, _address(back), 0, 0]))
            results.append([shadow, decoded, total, back, *message] + ([turned] if kind != "nan" else []))
        _assert_equal(*results)


def test_gradients_may_lie_anywhere():
    """Off by one element: no access of 16 bytes is possible."""
    spec, values = CodecSpec(), np.random.default_rng(1).standard_normal(1025).astype(np.float32)
    results = []
    for twin in (codec, codec_cuda.CudaCodec(FakeDevice())):
        gradient, out, message = values[1:], np.zeros(1025, np.float32)[1:], _message(spec, 2)
        table = _table(_row(gradient, out=out))
        if twin is codec:
            twin.encode_pieces(spec, "float32", table, [], *message, 1.0)
        else:
            twin.encode_pieces(spec, "float32", table, [], _at(message), 1.0)
        results.append([out, *message])
    _assert_equal(*results)


def test_a_persistent_grid_takes_every_group_once():
    """40 tensors, more groups than warps: whatever the grid, the same words."""
    spec, rng = CodecSpec(), np.random.default_rng(2)
    gradients = [rng.standard_normal(int(size)).astype(np.float32) for size in rng.integers(0, 1200, 40)]
    expected = None
    for blocks in (1, 3):
        device, rows, first = FakeDevice(), [], 0
        device.num_blocks = blocks
        for gradient in gradients:
            rows.append(_row(gradient, first=first))
            first += spec.num_groups(len(gradient))
        message = _message(spec, first)
        codec_cuda.CudaCodec(device).encode_pieces(spec, "float32", _table(*rows), [], _at(message), 1.0)
        if expected is None:
            expected = _message(spec, first)
            codec_cpu.encode_pieces(spec, "float32", _table(*rows), [], *expected, 1.0)
        _assert_equal(message, expected)


def test_copies_of_any_size_and_place():
    rng, device = np.random.default_rng(3), FakeDevice()
    sizes = [0, 1, 15, 16, 17, 2047, 2048, 2049, 5000]
    memory = rng.integers(0, 255, 40000).astype(np.uint8)
    packed, back = np.zeros(40000, np.uint8), np.zeros(40000, np.uint8)
    places = [64 * (i + sum(sizes[:i]) // 64 + i) + i % 3 for i in range(len(sizes))]
    at = np.array(places)
    codec_cuda.copy(device, memory.ctypes.data + at, packed.ctypes.data + at, sizes)
    codec_cuda.copy(device, packed.ctypes.data + at, back.ctypes.data + at, sizes)
    for place, size in zip(places, sizes, strict=True):
        assert np.array_equal(back[place : place + size], memory[place : place + size])
    assert not packed[places[-1] + sizes[-1] :].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_elements", [0, 1, 127, 128, 1300])
def test_scale(dtype, num_elements):
    values = _as(dtype, np.random.default_rng(4).standard_normal(num_elements).astype(np.float32))
    wide = (values.astype(np.uint32) << 16).view(np.float32) if dtype == "bfloat16" else values
    expected = wide * (np.float32(0.3) if dtype != "float64" else 0.3)
    if dtype == "float16":
        expected = (wide.astype(np.float32) * np.float32(0.3)).astype(np.float16)
    codec_cuda.scale(FakeDevice(), values.ctypes.data, num_elements, dtype, 0.3)
    if dtype == "bfloat16":
        assert np.allclose((values.astype(np.uint32) << 16).view(np.float32), expected, rtol=2**-8)
    else:
        assert np.array_equal(values, expected)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "int32", "int64"])
def test_integers_are_divided_toward_zero(dtype):
    values = np.array([-7, -6, -1, 0, 1, 5, 7, 100] * 9).astype(dtype)
    expected = np.trunc(values.astype(np.float64) / 3).astype(dtype)
    codec_cuda.divide(FakeDevice(), values.ctypes.data, len(values), dtype, 3)
    assert np.array_equal(values, expected)


@pytest.mark.parametrize("spec", SPECS[:4], ids=lambda spec: str(spec.bits))
def test_bytes_moved_are_those_of_the_docstring(spec):
    num_elements, bits = 4 * GROUP, spec.bits
    gradient, residual = np.zeros(num_elements, np.float32), np.zeros(num_elements, np.float32)
    table = _table(_row(gradient, residual, residual))
    assert codec_cuda.bytes_moved(spec, "float32", table, 0) == num_elements * (12 + bits / 8 + 4 / 512)
    table = _table(_row(gradient, residual, residual, gradient, gradient))
    assert codec_cuda.bytes_moved(spec, "float16", table, 2) == num_elements * (2 + 2 + 8 + 4 + 3 * (bits / 8 + 4 / 512))
    assert codec_cuda.bytes_moved(spec, "bfloat16", table, None) == num_elements * (2 + 4 + bits / 8 + 4 / 512)
    assert len(LEVELS[bits]) == 2**bits
