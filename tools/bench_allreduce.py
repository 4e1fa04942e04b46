#!/usr/bin/env python3
"""Allreduce: sizes x ways, each within every round in a random order, so that what disturbs the machine or fills a link's
queue disturbs all. Run it under hvdrun.

    hvdrun -np 2 python tools/bench_allreduce.py --sizes 1MB,16MB,resnet50 --ways fp32,fp16,onebit:two_shot
    tools/netlab run --hosts 2 --rate 1gbit -- hvdrun -np 2 python tools/bench_allreduce.py --sizes resnet50 --json out.json

A size is one tensor of so many bytes of float32, or ``resnet50``: the 161 gradients of that model (102 MB), in buckets,
with what an optimizer wrapper leaves dense. A way is ``IMPL`` or ``COMPRESSOR[:SCHEDULE]``: fp32, fp16, bits1, bits2,
bits4, bits8, onebit (rotated), l1, two_means, rms, auto; with ``--impl mpi``, ``ddp`` (torch, gloo), ``horovod`` in fp32
beside them. ``--dtypes`` of the tensors.

algbw: bytes of the tensors in their own dtype per second; busbw: times 2 (n - 1) / n. Bytes on the wire are counted at
the interface (--interface, default e0 where netlab made it): what this rank's host sent. Ratios are medians over the
rounds of a way's time divided by the first way's time in the same round; for auto also divided by the best other way's,
with the 95 % interval (bootstrap).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import hvdlite
from hvdlite.adapters.numpy import cast
from hvdlite.optimizer import GradientExchange, GradientSpec
from hvdlite.runtime import default_runtime

UNITS = {"B": 1, "KB": 1 << 10, "MB": 1 << 20}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="64KB,1MB,16MB,resnet50")
    parser.add_argument("--ways", default="fp32,fp16,onebit:two_shot,onebit:ring")
    parser.add_argument("--impl", default="hvdlite", help="hvdlite,mpi,ddp,horovod: those beside hvdlite in fp32")
    parser.add_argument("--dtypes", default="float32")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--interface", default="e0" if "NETLAB_HOSTS" in os.environ else "")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    hvdlite.init()
    from hvdlite.compression import codec_cpu  # noqa: F401  compiled, or loaded, before anything is timed

    found = []
    for dtype in options.dtypes.split(","):
        for size in options.sizes.split(","):
            found += measure(size, dtype, options)
    if hvdlite.rank() == 0:
        print(table(found))
        if options.json:
            Path(options.json).write_text(json.dumps(found, indent=1))


def measure(size: str, dtype: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """One record for each way, with every round's seconds on the slowest rank."""
    shapes = resnet50_shapes() if size == "resnet50" else [(num_bytes(size) // 4,)]
    rng = np.random.default_rng(hvdlite.rank())
    gradients = [rng.standard_normal(shape, np.float32).astype(dtype) for shape in shapes]
    ways = [*(way for way in options.ways.split(",") if way), *(one for one in options.impl.split(",") if one != "hvdlite")]
    calls = {way: call_of(way, size, gradients) for way in ways}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    sent: dict[str, list[int]] = {way: [] for way in ways}
    for number in range(options.rounds + 1):
        for way in np.random.default_rng(number).permutation(ways):
            for one, fresh in zip(gradients, calls[way][0], strict=True):
                np.copyto(fresh, one)
            hvdlite.barrier()
            before, started = sent_bytes(options.interface), time.perf_counter()
            calls[way][1]()
            taken = time.perf_counter() - started
            hvdlite.barrier()  # its few bytes are counted too
            if number:
                seconds[way].append(float(hvdlite.allreduce(np.array([taken]), op=hvdlite.Max, name="taken")[0]))
                sent[way].append(sent_bytes(options.interface) - before)
    total, ranks = sum(one.nbytes for one in gradients), hvdlite.size()
    records = []
    for way in ways:
        median = statistics.median(seconds[way])
        ratio = statistics.median(own / first for own, first in zip(seconds[way], seconds[ways[0]], strict=True))
        records.append({
            "size": size, "bytes": total, "dtype": dtype, "ranks": ranks, "way": way, "seconds": seconds[way], "median_s": median,
            "ratio": ratio, "algbw_gb_s": total / median / 1e9, "busbw_gb_s": 2 * (ranks - 1) / ranks * total / median / 1e9,
            "wire_bytes": statistics.median(sent[way]) if options.interface else None,
        })
    return records


def call_of(way: str, size: str, gradients: list[np.ndarray]) -> tuple[list[np.ndarray], Callable[[], Any]]:
    """Arrays to fill, and what exchanges them in place."""
    arrays = [np.empty_like(one) for one in gradients]
    if way in ("mpi", "ddp", "horovod"):
        return arrays, other_call(way, arrays)
    if size != "resnet50":
        compression, name = compression_of(way), f"{size}.{way}.{arrays[0].dtype}"
        return arrays, lambda: hvdlite.allreduce_(arrays[0], op=hvdlite.Average, name=name, compression=compression)
    compression = compression_of(way)
    casts = way == "fp16"
    quantized = None if casts or compression is None else compression
    specs = [
        GradientSpec(f"w{index}", one.nbytes // (2 if casts else 1),
                     is_quantized=quantized is not None and quantized.takes(f"w{index}", one.shape, str(one.dtype)))
        for index, one in enumerate(arrays)]
    exchange = GradientExchange(specs, label=default_runtime().label(f"bench.{way}"), in_place=True, compression=quantized)

    def run() -> None:
        halves = [cast(one, "float16") for one in arrays] if casts else arrays
        results = exchange.finish(lambda index: halves[index])
        if casts:
            for index, one in enumerate(arrays):
                np.copyto(one, cast(results[index], "float32"))

    return arrays, run


def compression_of(way: str) -> Any:
    name, _, schedule = way.partition(":")
    if name == "fp32":
        return None
    if name == "auto":
        return hvdlite.Compression.auto
    if name == "fp16":
        return hvdlite.Compression.fp16
    settings: dict[str, Any] = {"schedule": schedule or "auto"}
    if name.startswith("bits"):
        settings["bits"] = int(name.removeprefix("bits"))
    elif name != "onebit":
        settings["scale"] = name
    return hvdlite.Compression.quantized(**settings)


def other_call(way: str, arrays: list[np.ndarray]) -> Callable[[], Any]:
    if way == "mpi":
        from mpi4py import MPI

        communicator = MPI.COMM_WORLD.Dup()

        def run_mpi() -> None:
            for one in arrays:
                communicator.Allreduce(MPI.IN_PLACE, one)
                one /= communicator.size

        return run_mpi
    import torch

    tensors = [torch.from_numpy(one) for one in arrays]
    if way == "horovod":
        import horovod.torch as horovod

        horovod.init()
        return lambda: [horovod.synchronize(handle) for handle in
                        [horovod.allreduce_async_(one, name=f"h{index}") for index, one in enumerate(tensors)]]
    if not torch.distributed.is_initialized():
        os.environ.setdefault("MASTER_ADDR", os.environ.get("NETLAB_HOSTS", "127.0.0.1").partition(",")[0])
        os.environ.setdefault("MASTER_PORT", "29517")
        torch.distributed.init_process_group("gloo", rank=hvdlite.rank(), world_size=hvdlite.size())

    def run_gloo() -> None:
        flat = torch.cat([one.reshape(-1) for one in tensors])
        torch.distributed.all_reduce(flat)
        flat /= hvdlite.size()
        torch._foreach_copy_(tensors, [part.view_as(one) for part, one in zip(
            flat.split([one.numel() for one in tensors]), tensors, strict=True)])

    return run_gloo


def num_bytes(text: str) -> int:
    for unit in ("KB", "MB", "B"):
        if text.endswith(unit):
            return int(float(text.removesuffix(unit)) * UNITS[unit])
    sys.exit(f"bench_allreduce: size {text!r}: write it like 64KB, 16MB, or resnet50")


def resnet50_shapes() -> list[tuple[int, ...]]:
    """Of the 161 parameters, in order of registration."""
    shapes: list[tuple[int, ...]] = [(64, 3, 7, 7), (64,), (64,)]
    width_in = 64
    for width, count in [(64, 3), (128, 4), (256, 6), (512, 3)]:
        for number in range(count):
            for shape in [(width, width_in, 1, 1), (width, width, 3, 3), (4 * width, width, 1, 1)]:
                shapes += [shape, (shape[0],), (shape[0],)]
            if number == 0:
                shapes += [(4 * width, width_in, 1, 1), (4 * width,), (4 * width,)]
            width_in = 4 * width
    return [*shapes, (1000, 2048), (1000,)]


def sent_bytes(interface: str) -> int:
    """Bytes that left the interface."""
    if not interface:
        return 0
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == interface:
            return int(numbers.split()[8])
    sys.exit(f"bench_allreduce: no interface {interface!r} here: name one of /proc/net/dev")


def table(found: list[dict[str, Any]]) -> str:
    lines = [f"{'size':>10} {'dtype':9}{'way':18}{'median ms':>10}{'least':>9}{'ratio':>8}{'algbw GB/s':>11}{'busbw':>7}"
             f"{'wire bytes':>12}"]
    for one in found:
        wire = "" if one["wire_bytes"] is None else f"{one['wire_bytes']:.0f}"
        lines.append(
            f"{one['size']:>10} {one['dtype']:9}{one['way']:18}{1e3 * one['median_s']:10.2f}{1e3 * min(one['seconds']):9.2f}"
            f"{one['ratio']:8.3f}{one['algbw_gb_s']:11.3f}{one['busbw_gb_s']:7.3f}{wire:>12}")
    for size, dtype in dict.fromkeys((one["size"], one["dtype"]) for one in found):
        ways = {one["way"]: one for one in found if (one["size"], one["dtype"]) == (size, dtype)}
        if "auto" in ways and len(ways) > 1:
            best = min((one for one in ways.values() if one["way"] != "auto"), key=lambda one: one["median_s"])
            ratios = np.array(ways["auto"]["seconds"]) / np.array(best["seconds"])
            drawn = np.median(np.random.default_rng(0).choice(ratios, (10_000, len(ratios))), axis=1)
            low, high = np.percentile(drawn, [2.5, 97.5])
            lines.append(f"{size} {dtype}: auto / {best['way']} {np.median(ratios):.3f} [{low:.3f}, {high:.3f}]")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
