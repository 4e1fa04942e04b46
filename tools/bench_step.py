#!/usr/bin/env python3
"""One step's communication, and whole training steps, beside other implementations in the same run.

    python tools/bench_step.py [--np 2] [--impl hvdlite,mpi,ddp,horovod] [--rows scalar,resnet50,small,16MB,100MB,mlp,resnet56]
    tools/netlab run --hosts 2 --rate 1gbit -- hvdrun -np 2 python tools/bench_step.py --as-rank --rows resnet50

Every round runs each implementation once, in an order drawn anew, so that what disturbs the machine disturbs all; the
slowest rank's time counts. Ratios are medians over the rounds of one implementation's time divided by that of the first
one of the row, raw MPI or DDP, in the same round.

scalar: a synchronous allreduce of one element, of a torch tensor without a name; also its 99th percentile.
resnet50, small: the 161 gradients of ResNet-50 (102 MB), 108 tensors of at most 16 KB, summed in place: by MPI one
call after the other, by DDP's way (one flat buffer, gloo), by hvdlite's optimizer wrapper, whose gradients stay (as after
zero_grad(set_to_none=False)); hvdlite-new: they are new tensors in every step; by Horovod as its wrapper does.
16MB, 100MB: one tensor in place.
mlp, resnet56: training steps of a perceptron with 1.0 M parameters, and of a residual network of 173 tensors and
0.86 M parameters: what the exchange adds to the step without any ("none"). mpi: after backward, tensor by tensor.
overlap: on a slow link (tools/netlab): the gradients of ResNet-50, each after a piece of computation, together about as
long as the exchange. alone: no exchange; off: it begins when all is computed; on: as gradients come; in flight: the
computation alone is timed, while everything is on its way.
timeline: what recording costs a training step, in one run: a few steps of the mlp and of resnet56 in a row that are recorded, and
as many that are not, take turns in pairs of either order, after one step each that is not timed; the mean difference of the
pairs, without the tenth that differ the most, and its 95 % interval by bootstrap.
horovod takes part where it is installed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_allreduce import resnet50_shapes

import hvdlite
import hvdlite.torch as hvd
from hvdlite.optimizer import GradientExchange, GradientSpec
from hvdlite.runtime import default_runtime

ROWS = ("scalar", "resnet50", "small", "16MB", "100MB", "mlp", "resnet56", "overlap", "timeline")
TRAINING = ("mlp", "resnet56")
#: Rounds of a row: short ones need more to give a median that is worth something. Chosen.
ROUNDS = {"scalar": 60, "resnet50": 25, "small": 300, "16MB": 40, "100MB": 15, "mlp": 200, "resnet56": 60, "overlap": 7,
          "timeline": 400}
#: Steps in a row that are recorded, or not, and timed together. Chosen: a job records all of its steps, from warm caches.
RECORDED_STEPS = 4
#: Calls in a row in a round, each timed: a loop of calls is what a latency is about. Chosen.
SCALAR_CALLS = 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--np", type=int, default=2)
    parser.add_argument("--impl", default="mpi,ddp,hvdlite,hvdlite-new", help="of mpi, ddp, hvdlite, hvdlite-new, horovod")
    parser.add_argument("--rows", default=",".join(ROWS[:-2]))
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of rounds")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--as-rank", action="store_true", help="this is a rank already: hvdrun started it")
    options = parser.parse_args()
    if not options.as_rank:
        hvdrun = [sys.executable, "-m", "hvdlite.launch", "-np", str(options.np)]
        sys.exit(subprocess.call([*hvdrun, sys.executable, __file__, "--as-rank", *sys.argv[1:]]))
    hvd.init()
    torch.set_num_threads(1)
    found = []
    for row in options.rows.split(","):
        if row not in ROWS:
            sys.exit(f"bench_step: no row {row!r}: use {', '.join(ROWS)}")
        found.append(measure(row, options.impl.split(","), max(5, int(ROUNDS[row] * options.scale))))
        if hvd.rank() == 0:
            print(table(found[-1]), flush=True)
    if options.json and hvd.rank() == 0:
        Path(options.json).write_text(json.dumps(found))


def measure(row: str, impls: list[str], rounds: int) -> dict[str, Any]:
    """Seconds of every round, those of the slowest rank, by implementation."""
    if row == "overlap":
        return overlap(rounds)
    if row == "timeline":
        return recording(rounds)
    if row in TRAINING:
        impls = ["none", *impls]
    if row not in ("resnet50", "small"):
        impls = [impl for impl in impls if impl != "hvdlite-new"]
    calls = {impl: (training(row, impl) if row in TRAINING else exchange(row, impl)) for impl in impls}
    for call in calls.values():
        for _ in range(5):
            call()
    in_a_row = SCALAR_CALLS if row == "scalar" else 1
    taken = np.empty((rounds, in_a_row, len(impls)))
    for number in range(rounds):
        for index in np.random.default_rng(number).permutation(len(impls)):
            call = calls[impls[index]]
            hvd.barrier()
            if in_a_row > 1:
                call()
            for repeat in range(in_a_row):
                started = time.perf_counter()
                call()
                taken[number, repeat, index] = time.perf_counter() - started
    slowest = hvd.allreduce(torch.from_numpy(taken), op=hvd.Max).numpy().reshape(-1, len(impls))
    return {"row": row, "ranks": hvd.size(), "seconds": {impl: slowest[:, index].tolist() for index, impl in enumerate(impls)}}


def exchange(row: str, impl: str) -> Callable[[], object]:
    """What sums the row's tensors in place over the ranks."""
    shapes: list[tuple[int, ...]]
    if row == "scalar":
        return scalar(impl)
    if row.endswith("MB"):
        shapes = [(int(row[:-2]) << 18,)]
    elif row == "resnet50":
        shapes = resnet50_shapes()
    else:
        shapes = [(64 + 37 * index,) for index in range(108)]  # up to 16 KB, 0.9 MB in all
    tensors = [torch.zeros(shape) for shape in shapes]
    if impl == "mpi":
        return mpi_in_place(tensors)
    if impl == "ddp":
        return gloo_flat(tensors)
    if impl == "horovod":
        return horovod_each(tensors)
    if len(tensors) == 1:
        return lambda: hvd.allreduce_(tensors[0], name=row, op=hvd.Sum)
    parameters = [torch.nn.Parameter(one) for one in tensors]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(parameters), [(f"{row}.{index}", one) for index, one in enumerate(parameters)], op=hvd.Sum)
    for one in parameters:
        one.grad = torch.zeros_like(one)

    def run() -> None:
        if impl == "hvdlite-new":
            for one in parameters:
                one.grad = one.detach()
        optimizer.synchronize()

    return run


def scalar(impl: str) -> Callable[[], object]:
    one = torch.ones(1)
    if impl == "mpi":
        return mpi_in_place([one])
    if impl == "ddp":
        gloo()
        return lambda: torch.distributed.all_reduce(one)
    if impl == "horovod":
        import horovod.torch as horovod

        horovod.init()
        return lambda: horovod.allreduce(one)
    return lambda: hvd.allreduce(one)


def mpi_in_place(tensors: list[torch.Tensor]) -> Callable[[], object]:
    from mpi4py import MPI

    communicator, arrays = MPI.COMM_WORLD.Dup(), [one.numpy() for one in tensors]

    def run() -> None:
        for one in arrays:
            communicator.Allreduce(MPI.IN_PLACE, one)

    return run


def gloo() -> None:
    if not torch.distributed.is_initialized():
        os.environ.setdefault("MASTER_ADDR", os.environ.get("NETLAB_HOSTS", "127.0.0.1").partition(",")[0])
        os.environ.setdefault("MASTER_PORT", "29518")
        torch.distributed.init_process_group("gloo", rank=hvd.rank(), world_size=hvd.size())


def gloo_flat(tensors: list[torch.Tensor]) -> Callable[[], object]:
    gloo()
    parts = [one.numel() for one in tensors]

    def run() -> None:
        flat = torch.cat([one.reshape(-1) for one in tensors]) if len(tensors) > 1 else tensors[0]
        torch.distributed.all_reduce(flat)
        if len(tensors) > 1:
            torch._foreach_copy_(tensors, [part.view_as(one) for part, one in zip(flat.split(parts), tensors, strict=True)])

    return run


def horovod_each(tensors: list[torch.Tensor]) -> Callable[[], object]:
    import horovod.torch as horovod

    horovod.init()
    return lambda: [horovod.synchronize(handle) for handle in
                    [horovod.allreduce_async_(one, name=f"h{index}", op=horovod.Sum) for index, one in enumerate(tensors)]]


def training(row: str, impl: str) -> Callable[[], object]:
    """One training step of the row's model."""
    torch.manual_seed(1)
    net, x, y = perceptron() if row == "mlp" else residual_network()
    optimizer: Any = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)
    after: Callable[[], object] | None = None
    if impl == "hvdlite":
        optimizer = hvd.DistributedOptimizer(optimizer, net.named_parameters())
    elif impl == "horovod":
        import horovod.torch as horovod

        horovod.init()
        optimizer = horovod.DistributedOptimizer(optimizer, net.named_parameters())
    elif impl == "ddp":
        gloo()
        net = torch.nn.parallel.DistributedDataParallel(net)
    elif impl == "mpi":
        from mpi4py import MPI

        communicator = MPI.COMM_WORLD.Dup()

        def sum_up() -> None:
            for one in net.parameters():
                assert one.grad is not None
                array = one.grad.numpy()
                communicator.Allreduce(MPI.IN_PLACE, array)
                array /= communicator.size

        after = sum_up

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(x), y).backward()
        if after is not None:
            after()
        optimizer.step()

    return step


def overlap(rounds: int) -> dict[str, Any]:
    """Four ways of a step, the exchange by hvdlite."""
    gradients = [torch.zeros(shape) for shape in resnet50_shapes()]
    specs = [GradientSpec(f"w{index}", 4 * one.numel()) for index, one in enumerate(gradients)]
    exchange = GradientExchange(specs, label=default_runtime().label("bench.overlap"), in_place=True)
    exchange.finish(lambda index: gradients[index])
    hvd.barrier()
    started = time.perf_counter()
    exchange.finish(lambda index: gradients[index])
    matrix = torch.randn(128, 128)
    timed = time.perf_counter()
    for _ in range(200):
        matrix @ matrix
    # As much computation per gradient as makes all of it about as long as the exchange; the same on every rank.
    amount = hvd.broadcast_object(max(1, round((timed - started) / len(gradients) / ((time.perf_counter() - timed) / 200))), 0)

    def compute() -> None:
        for _ in range(amount):
            matrix @ matrix

    def step(way: str) -> float:
        begun = time.perf_counter()
        if way == "in flight":
            for index in reversed(range(len(gradients))):
                exchange.ready(index, gradients[index])
        for index in reversed(range(len(gradients))):
            compute()
            if way == "on":
                exchange.ready(index, gradients[index])
        computed = time.perf_counter()
        if way != "alone":
            exchange.finish(lambda index: gradients[index])
        return (computed if way == "in flight" else time.perf_counter()) - begun

    ways = ["alone", "off", "on", "in flight"]
    taken = np.empty((rounds, len(ways)))
    for number in range(rounds):
        for index in np.random.default_rng(number).permutation(len(ways)):
            hvd.barrier()
            taken[number, index] = step(ways[index])
    slowest = hvd.allreduce(torch.from_numpy(taken), op=hvd.Max).numpy()
    return {"row": "overlap", "ranks": hvd.size(), "seconds": {way: slowest[:, index].tolist() for index, way in enumerate(ways)}}


def recording(rounds: int) -> dict[str, Any]:
    """Steps with and without recording, of each training row. *Shapes* of seconds: (rounds,), each."""
    runtime = default_runtime()
    seconds = {}
    with tempfile.TemporaryDirectory() as directory:
        directory = hvd.broadcast_object(directory, 0)
        runtime.start_timeline(f"{directory}/", False)
        for row in TRAINING:
            step = training(row, "hvdlite")
            pairs = max(20, rounds if row == "mlp" else rounds // 10)
            taken = np.empty((pairs, 2))
            for number in range(-5, pairs):
                for is_on in np.random.default_rng(number + 5).permutation(2).tolist():
                    runtime.marks.window = None if is_on else (0, 0)
                    runtime.marks.follow_window()
                    for repeat in range(1 + RECORDED_STEPS):
                        if repeat == 1:  # the step before was the first after the change
                            started = time.perf_counter()
                        step()
                        hvdlite.mark_step()
                    if number >= 0:
                        taken[number, is_on] = (time.perf_counter() - started) / RECORDED_STEPS
            slowest = hvd.allreduce(torch.from_numpy(taken), op=hvd.Max).numpy()
            seconds |= {f"{row} off": slowest[:, 0].tolist(), f"{row} on": slowest[:, 1].tolist()}
        runtime.stop_timeline()
        hvd.barrier()
    return {"row": "timeline", "ranks": hvd.size(), "seconds": seconds}


def cost_of_recording(off: np.ndarray, on: np.ndarray) -> tuple[float, float, float]:
    """The share of a step, and its 95 % interval. *Shapes*: (pairs,)."""
    more = np.sort((on - off) / np.median(off))
    more = more[len(more) // 20 : len(more) - len(more) // 20]
    means = [np.random.default_rng(seed).choice(more, len(more)).mean() for seed in range(1000)]
    return float(more.mean()), *map(float, np.quantile(means, [0.025, 0.975]))


def perceptron() -> tuple[torch.nn.Module, torch.Tensor, torch.Tensor]:
    """1.0 M parameters in 6 tensors."""
    net = torch.nn.Sequential(torch.nn.Linear(784, 784), torch.nn.ReLU(), torch.nn.Linear(784, 512), torch.nn.ReLU(),
                              torch.nn.Linear(512, 10))
    return net, torch.randn(64, 784), torch.randint(10, (64,))


class _Block(torch.nn.Module):
    def __init__(self, width_in: int, width: int) -> None:
        super().__init__()
        self.first = torch.nn.Conv2d(width_in, width, 3, 1 if width_in == width else 2, 1, bias=False)
        self.second = torch.nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norms = torch.nn.ModuleList(torch.nn.BatchNorm2d(width) for _ in range(2))
        self.shortcut = torch.nn.Conv2d(width_in, width, 1, 2, bias=False) if width_in != width else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.norms[1](self.second(torch.relu(self.norms[0](self.first(x)))))
        return torch.relu(made + (x if self.shortcut is None else self.shortcut(x)))


def residual_network() -> tuple[torch.nn.Module, torch.Tensor, torch.Tensor]:
    """ResNet-56 for 32 x 32 images, with projections where the width grows: 0.86 M parameters in 173 tensors, 8 images."""
    layers: list[torch.nn.Module] = [torch.nn.Conv2d(3, 16, 3, 1, 1, bias=False), torch.nn.BatchNorm2d(16), torch.nn.ReLU()]
    width_in = 16
    for width in (16, 32, 64):
        for _ in range(9):
            layers.append(_Block(width_in, width))
            width_in = width
    layers += [torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(64, 10)]
    net = torch.nn.Sequential(*layers)
    return net, torch.randn(4, 3, 32, 32), torch.randint(10, (4,))


def table(found: dict[str, Any]) -> str:
    row, seconds = found["row"], {impl: np.array(one) for impl, one in found["seconds"].items()}
    control = next(iter(seconds))
    lines = [f"{row}, {found['ranks']} ranks, {len(seconds[control])} rounds"]
    if row == "overlap":
        alone, off, on, in_flight = (np.median(seconds[way]) for way in ("alone", "off", "on", "in flight"))
        return (f"{lines[0]}: alone {1e3 * alone:.0f} ms, off {1e3 * off:.0f}, on {1e3 * on:.0f}; exposed on / off "
                f"{(on - alone) / (off - alone):.3f}; computation slowed by {100 * (in_flight / alone - 1):.1f} %")
    if row == "timeline":
        return "\n".join(
            f"timeline, {found['ranks']} ranks, {model}: {len(seconds[f'{model} off'])} pairs of steps of "
            f"{1e3 * np.median(seconds[f'{model} off']):.2f} ms: recording adds {100 * mean:+.2f} % ({100 * low:+.2f} to "
            f"{100 * high:+.2f})" for model in TRAINING
            for mean, low, high in [cost_of_recording(seconds[f"{model} off"], seconds[f"{model} on"])])
    for impl, one in seconds.items():
        line = f"  {impl:8} median {1e3 * np.median(one):9.3f} ms  least {1e3 * one.min():9.3f}"
        if row in TRAINING:
            line += f"  added {1e3 * added(seconds, impl):+8.3f} ms"
            if "ddp" in seconds and impl not in ("none", "ddp"):
                line += f"  of what DDP adds {added(seconds, impl) / added(seconds, 'ddp'):6.3f}"
        else:
            line += f"  / {control} {statistics.median(one / seconds[control]):7.3f}"
            if "ddp" in seconds and impl != "ddp":
                line += f"  / ddp {statistics.median(one / seconds['ddp']):7.3f}"
        if row == "scalar":
            line += f"  99 % below {1e3 * np.percentile(one, 99):7.3f} ms"
        lines.append(line)
    return "\n".join(lines)


def added(seconds: dict[str, Any], impl: str) -> float:
    """What the exchange adds to a step."""
    return float(np.median(seconds[impl] - seconds["none"]))


if __name__ == "__main__":
    main()
