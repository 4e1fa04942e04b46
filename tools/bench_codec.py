"""Rates of the codec's kernels on one core, against NumPy's copyto and fill in the same run. Prints a table, or JSON.

    python tools/bench_codec.py [--megabytes 64] [--rounds 15] [--wall] [--all] [--json]

Every round times copyto, fill and each kernel in turn, so that what disturbs the machine disturbs all; a ratio is the median over
rounds of a kernel's bytes per second divided by copyto's (8 bytes per element) or fill's (4) of that round. Bytes per element
that a kernel has to move: encode 12.13 (gradient, residual, new residual, code), decode_add 8.13, last decode 4.13; the owner's
encode_pieces, with one incoming message and the result written elsewhere, 16.27 (over the gradient it takes a third less).
Times are the thread's own processor time unless --wall, because a shared machine takes the core away for milliseconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from hvdlite.compression import codec_cpu as codec
from hvdlite.compression.spec import COUNT, FIRST, GRADIENT, ITEM_BYTES, MOMENT, OUT, RESIDUAL, SHADOW, CodecSpec

#: Elements of a piece of a table, the last perhaps fewer: whole groups.
PIECE = 512 * 512
#: How many gradients a kernel reads and writes.
GRADIENTS = {
    "encode": 1, "encode_pieces": 1, "owner": 2, "moment": 2, "rotate": 1, "last_decode": 1, "decode_pieces": 1
}  # fmt: skip

#: Kernel: bytes per element beside those of the code, what it is compared with, aims of the rotated and the unrotated one.
KINDS = {
    "encode": (12, "copyto", 0.6, 0.9),
    "encode_pieces": (12, "copyto", 0.6, 0.9),
    "owner": (16, "copyto", None, None),
    "moment": (20, "copyto", None, None),
    "encode_rotated": (8, "copyto", None, None),
    "rotate": (12, "copyto", None, None),
    "decode": (4, "fill", None, None),
    "decode_add": (8, "copyto", 0.9, 0.9),
    "last_decode": (4, "fill", 0.6, 0.85),
    "decode_pieces": (4, "fill", 0.6, 0.85),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--megabytes", type=int, default=64, help="size of the gradient in MiB")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--wall", action="store_true", help="wall clock in place of processor time")
    parser.add_argument("--all", action="store_true", help="more bits, other scales and dtypes too")
    parser.add_argument("--kernels", nargs="*", help="only these")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    num_elements = options.megabytes * 2**18
    cases = CASES + MORE_CASES if options.all else CASES
    found = measure(num_elements, options.rounds, time.perf_counter if options.wall else time.thread_time, cases, options.kernels)
    print(json.dumps(found, indent=1) if options.json else table(found, num_elements))


CASES = [(1, "rotated", "float32"), (1, "l1", "float32")]
MORE_CASES = [
    *((1, scale, "float32") for scale in ("two_means", "rms")),
    *((bits, "rotated", "float32") for bits in (2, 4, 8)),
    *((1, "rotated", dtype) for dtype in ("float16", "bfloat16", "float64")),
]


def measure(
    num_elements: int, rounds: int, clock: Callable[[], float], cases: list[tuple[int, str, str]], only: list[str] | None
) -> list[dict[str, Any]]:
    """One record per kernel and case, copyto and fill first. Each case has arrays of its own."""
    source, copied = aligned(num_elements, np.float32), aligned(num_elements, np.float32)
    source[:] = np.random.default_rng(0).standard_normal(num_elements, dtype=np.float32)
    found = []
    for bits, scale, dtype in cases:
        spec = CodecSpec(bits, scale)
        timed: dict[str, Callable[[], Any]] = {"copyto": lambda: np.copyto(copied, source), "fill": lambda: copied.fill(0)}
        every = kernels(spec, source, dtype)  # kept: tables hold arrays by address, the calls by reference
        timed |= {name: call for name, call in every.items() if not only or name in only}
        times = in_turn(timed, rounds, clock)
        for name, (moved, against, *aims) in {"copyto": (8, "copyto"), "fill": (4, "fill"), **KINDS}.items():
            if name not in times:
                continue
            code = spec.wire_bytes(num_elements) / num_elements * (2 if name in ("owner", "moment") else name in KINDS)
            size = moved + code + (ITEM_BYTES[dtype] - 4) * GRADIENTS.get(name, 0)
            base = 8 if against == "copyto" else 4
            ratio = statistics.median(
                size / base * other / own for own, other in zip(times[name], times[against], strict=True)
            )
            found.append({
                "kernel": name, "bits": bits, "scale": scale, "dtype": dtype, "bytes_per_element": round(size, 3),
                "ms": [round(1e3 * one, 2) for one in times[name]], "against": against, "ratio": round(ratio, 3),
                "aim": aims[0 if scale == "rotated" else 1] if aims and bits == 1 and dtype == "float32" else None,
            })  # fmt: skip
    return found


def kernels(spec: CodecSpec, values: np.ndarray, dtype: str) -> dict[str, Callable[[], None]]:
    """Calls on arrays that lie at different offsets within a page, as those of a program do."""
    num_elements, padded = len(values), spec.padded(len(values))
    gradient, out = values, aligned(num_elements, np.float32)
    if dtype == "bfloat16":
        gradient, out = (values.view(np.uint32) >> 16).astype(np.uint16), out.view(np.uint16)[:num_elements]
    elif dtype != "float32":
        gradient = values.astype(dtype)
        out = np.zeros_like(gradient)
    residual, shadow, moments = (aligned(padded, np.float32, offset) for offset in (1088, 2176, 3200))
    moments[:] = 1
    message = aligned(spec.wire_bytes(num_elements), np.uint8)
    words, scales = spec.split(message, num_elements)
    codec.encode(spec, gradient, residual, shadow, words, scales)
    received = words.copy(), scales.copy()
    starts = np.arange(0, num_elements, PIECE)
    table = np.zeros((len(starts), 7), np.int64)
    for column, array in ((GRADIENT, gradient), (RESIDUAL, residual), (SHADOW, shadow)):
        table[:, column] = array.ctypes.data + array.itemsize * starts
    table[:, COUNT], table[:, FIRST] = np.minimum(PIECE, num_elements - starts), starts // spec.group
    owner, receiver = table.copy(), table.copy()
    owner[:, OUT] = receiver[:, OUT] = out.ctypes.data + out.itemsize * starts
    with_moment = owner.copy()
    with_moment[:, MOMENT] = moments.ctypes.data + 4 * starts
    more = {} if spec.scale != "rotated" else {
        # The default keeps the moments alive, which the table holds by address only.
        "moment": lambda moments=moments: codec.encode_pieces(spec, dtype, with_moment, [received], words, scales, 0.5),
    }  # fmt: skip
    return more | {
        "encode_pieces": lambda: codec.encode_pieces(spec, dtype, table, [], words, scales, 0.5),
        "owner": lambda: codec.encode_pieces(spec, dtype, owner, [received], words, scales, 0.5),
        "decode_pieces": lambda: codec.decode_pieces(spec, dtype, receiver, words, scales, 0.5),
        "encode": lambda: codec.encode(spec, gradient, residual, shadow, words, scales),
        "encode_rotated": lambda: codec.encode_rotated(spec, values, shadow, words, scales, num_elements),
        "rotate": lambda: codec.rotate(spec, gradient, residual, shadow),
        "decode": lambda: codec.decode(spec, words, scales, shadow, num_elements),
        "decode_add": lambda: codec.decode_add(spec, words, scales, shadow, num_elements),
        "last_decode": lambda: codec.unrotate(spec, words, scales, out, 0.5),
    }


def in_turn(timed: dict[str, Callable[[], Any]], rounds: int, clock: Callable[[], float]) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in timed}
    for call in timed.values():
        call()
    for _ in range(rounds):
        for name, call in timed.items():
            started = clock()
            call()
            times[name].append(clock() - started)
    return times


def aligned(length: int, dtype: Any, offset: int = 0) -> np.ndarray:
    """Zeros, touched, that begin so many bytes after a page."""
    dtype = np.dtype(dtype)
    raw = np.zeros(length * dtype.itemsize + 8192, np.uint8)
    raw[:] = 0
    start = -raw.ctypes.data % 4096 + offset
    return raw[start : start + length * dtype.itemsize].view(dtype)


def table(found: list[dict[str, Any]], num_elements: int) -> str:
    lines = [
        f"{'kernel':15}{'bits':>5}{'scale':>10} {'dtype':9}{'median ms':>10}{'least ms':>9}{'GB/s':>6}{'ratio':>7}{'aim':>6}"
    ]
    for one in found:
        median = statistics.median(one["ms"])
        rate = one["bytes_per_element"] * num_elements / median / 1e6
        ratio = "" if one["kernel"] == one["against"] else f"{one['ratio']:.2f}"
        lines.append(
            f"{one['kernel']:15}{one['bits']:5}{one['scale']:>10} {one['dtype']:9}{median:10.2f}{min(one['ms']):9.2f}"
            f"{rate:6.1f}{ratio:>7}{one['aim'] or '':>6}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
