"""Of tools/gpu_check.py: every CUDA kernel against NumPy, and the rates of the large ones. Each row is a dict."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from hvdlite.buffer import NUMPY_DTYPES
from hvdlite.compression import codec, codec_cpu, codec_cuda
from hvdlite.compression.rotation import GROUP
from hvdlite.compression.spec import GRADIENT, MOMENT, NUM_COLUMNS, OUT, RESIDUAL, SHADOW, CodecSpec

Row = dict[str, Any]
SIZES = (0, 1, 31, 32, 33, 511, 512, 513, 1537, 10**6 + 7)
#: Spec, dtype, whether there are second moments: every kernel's source once, not every combination, for compiling takes seconds.
CASES: list[tuple[CodecSpec, str, bool]] = [
    (CodecSpec(1), "float32", False), (CodecSpec(2), "float16", False), (CodecSpec(4), "float64", False),
    (CodecSpec(8), "bfloat16", True), (CodecSpec(1), "float32", True), (CodecSpec(1, "l1"), "bfloat16", False),
    (CodecSpec(1, "two_means"), "float32", False), (CodecSpec(1, "rms"), "float16", False)]
LEAST_RATE = 0.8


class Mirror:
    """Host arrays and their copies on a device; ``of`` gives the address of either."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._pairs: list[tuple[np.ndarray, Any]] = []

    def upload(self, array: np.ndarray) -> int:
        there = self._device.allocate(array.nbytes)
        self._pairs.append((array, there))
        flat = array.reshape(-1).view(np.uint8)
        self._device.copy(there.address, flat.ctypes.data, flat.nbytes)
        self._device.synchronize()  # the host's array changes next
        return int(there.address)

    def differing(self) -> int:
        """How many bytes on the device are not those on the host."""
        self._device.synchronize()
        return sum(int((self._device.download(there.address, array.nbytes) != array.reshape(-1).view(np.uint8)).sum())
                   for array, there in self._pairs if array.nbytes)


def _gradient(size: int, dtype: str, rng: np.random.Generator) -> np.ndarray:
    values = rng.standard_normal(size).astype(np.float32)
    if size > 100:
        values[size // 2] = np.nan if size % 2 else np.inf
    if dtype == "bfloat16":
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(NUMPY_DTYPES[dtype])


def compare(device: Any, spec: CodecSpec, dtype: str, has_moments: bool, sizes: Sequence[int]) -> Row:
    """Encode with one message incoming, decode, rotate and back, on the host and on the device: all bytes are to be the same.

    The host's side is the NumPy reference for what is small and the kernels for CPUs, which tests hold to it, for the rest.
    """
    differing, kernels = 0, codec_cuda.CudaCodec(device)
    for size in sizes:
        rng, twin = np.random.default_rng(size), codec if size < 10_000 else codec_cpu
        padded, groups = spec.padded(size), spec.num_groups(size)
        names = ["gradient", "residual", "shadow", "out", *(["moment"] if has_moments else [])]
        host = dict(gradient=_gradient(size, dtype, rng), residual=rng.standard_normal(padded).astype(np.float32),
                    shadow=np.zeros(padded, np.float32), out=np.zeros(size, NUMPY_DTYPES[dtype]),
                    moment=np.abs(rng.standard_normal(size)).astype(np.float32))
        host["residual"][size:] = 0
        words, scales, other_words, other_scales = (
            np.zeros(groups * each, kind) for _ in range(2)
            for each, kind in ((spec.words_per_group, np.uint32), (spec.scales_per_group, np.float32)))
        other_words[:] = rng.integers(0, 2**32, len(other_words), np.uint32)
        other_scales[:] = rng.random(len(other_scales), np.float32)
        mirror = Mirror(device)
        there = {name: mirror.upload(host[name]) for name in names}
        own = mirror.upload(words), mirror.upload(scales)
        other = mirror.upload(other_words), mirror.upload(other_scales)
        columns = dict(gradient=GRADIENT, residual=RESIDUAL, shadow=SHADOW, out=OUT, moment=MOMENT)

        def table(places: dict[str, int], size: int = size, columns: dict[str, int] = columns) -> np.ndarray:
            row = np.zeros((1, NUM_COLUMNS), np.int64)
            row[0, 1] = size  # COUNT
            for name, place in places.items():
                row[0, columns[name]] = place
            return row

        with np.errstate(all="ignore"):
            here = table({name: host[name].ctypes.data for name in names})
            twin.encode_pieces(spec, dtype, here, [(other_words, other_scales)], words, scales, 1 / 3)
            twin.decode_pieces(spec, dtype, here, words, scales, 1 / 3)
        kernels.encode_pieces(spec, dtype, table(there), [other], own, 1 / 3)
        kernels.decode_pieces(spec, dtype, table(there), own, 1 / 3)
        differing += mirror.differing()
    name = f"{spec.bits} bits {spec.scale} {dtype}{' moments' if has_moments else ''}"
    return dict(check=f"encode, decode: {name}", result=f"{differing} bytes differ", limit="0", ok=differing == 0)


def compare_plain(device: Any, sizes: Sequence[int]) -> Iterator[Row]:
    """Pack, scale and divide."""
    rng, mirror = np.random.default_rng(0), Mirror(device)
    total = sum(sizes)
    values, packed = rng.integers(0, 255, total).astype(np.uint8), np.zeros(total, np.uint8)
    source, target = mirror.upload(values), mirror.upload(packed)
    begin = np.cumsum([0, *sizes[:-1]])
    codec_cuda.copy(device, source + begin, target + begin, list(sizes))
    packed[:] = values
    differing = mirror.differing()
    yield dict(check="pack", result=f"{differing} bytes differ", limit="0", ok=differing == 0)
    for dtype in ("float32", "float64", "int32", "int64"):
        mirror, array = Mirror(device), rng.integers(-1000, 1000, max(sizes)).astype(dtype)
        at = mirror.upload(array)
        if "float" in dtype:
            codec_cuda.scale(device, at, len(array), dtype, 1 / 3)
            array *= array.dtype.type(1 / 3)
        else:
            codec_cuda.divide(device, at, len(array), dtype, 3)
            array[:] = np.trunc(array / 3)
        differing = mirror.differing()
        yield dict(check=f"{'scale' if 'float' in dtype else 'divide'} {dtype}", result=f"{differing} bytes differ", limit="0",
                   ok=differing == 0)


def rates(device: Any, num_bytes: int, rounds: int = 7, must_reach: bool = True) -> Iterator[Row]:
    """Encode, decode and pack of so many bytes of float32, against a copy of as many within the device, in the same run."""
    spec, count = CodecSpec(), num_bytes // (4 * GROUP) * GROUP
    memory = [device.allocate(4 * count) for _ in range(4)]
    gradient, residual, shadow, out = (one.address for one in memory)
    for one in memory:
        device.copy(one.address, memory[0].address, 4 * count if one is not memory[0] else 0)
    groups = spec.num_groups(count)
    words, scales = device.allocate(4 * groups * spec.words_per_group), device.allocate(4 * groups)
    own, kernels = (words.address, scales.address), codec_cuda.CudaCodec(device)
    encoding = np.array([[gradient, count, residual, shadow, 0, 0, 0]], np.int64)
    decoding = np.array([[0, count, 0, 0, out, 0, 0]], np.int64)
    ways: dict[str, tuple[int, Callable[[], None]]] = {
        "copy": (8 * count, lambda: device.copy(out, gradient, 4 * count)),
        "encode": (codec_cuda.bytes_moved(spec, "float32", encoding, 0),
                   lambda: kernels.encode_pieces(spec, "float32", encoding, [], own, 1.0)),
        "decode": (codec_cuda.bytes_moved(spec, "float32", decoding, None),
                   lambda: kernels.decode_pieces(spec, "float32", decoding, own, 1.0)),
        "pack": (8 * count, lambda: codec_cuda.copy(device, [gradient], [out], [4 * count])),
    }
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, (moved, run) in ways.items():
            device.synchronize()
            started = time.perf_counter()
            for _ in range(5):
                run()
            device.synchronize()
            speeds[name].append(5 * moved / (time.perf_counter() - started))
    copied = statistics.median(speeds["copy"][1:])
    for name in ways:
        speed = statistics.median(speeds[name][1:])
        limit = f">= {LEAST_RATE}" if name != "copy" and must_reach else ""
        yield dict(check=f"{name}, {num_bytes >> 20} MiB", result=f"{speed / 1e9:.0f} GB/s, {speed / copied:.2f} of a copy",
                   limit=limit, ok=not limit or speed >= LEAST_RATE * copied)
