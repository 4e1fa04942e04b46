#!/usr/bin/env python3
"""Training runs in pairs: the same weights, batches and learning rates, once for every way to exchange gradients. Run it
under hvdrun.

    hvdrun -np 2 python tools/time_to_accuracy.py --steps 468,1872 --seeds 10 --ways fp32,onebit --json out.json
    tools/netlab run --hosts 2 --rate 100mbit -- hvdrun -np 2 python tools/time_to_accuracy.py --target 85 --hidden 1024

A multi-layer perceptron learns Fashion-MNIST (--data: the folder of its four files), every rank on its own batches; no
warm-up but what a way itself prescribes. Ways: fp32, fp16, auto, onebit, bits2, bits4, bits8, l1, two_means, rms, and
plain: onebit without preconditioning, for adaptive optimizers. Printed: validation accuracy in percent of every random
seed, the mean difference to the first way with its 95 % interval (Student's t, paired by seed), milliseconds per step,
and with --target the seconds of training until the validation accuracy reached it (looked at every --look steps, which
is not counted).
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from simulate_convergence import load

import hvdlite.torch as hvd

RATES = {"sgd": 0.1, "rmsprop": 1e-3, "adagrad": 1e-2}
OPTIMIZERS = {"sgd": lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9), "adam": torch.optim.Adam, "adamw": torch.optim.AdamW,
              "nadam": torch.optim.NAdam, "radam": torch.optim.RAdam, "rmsprop": torch.optim.RMSprop,
              "adagrad": torch.optim.Adagrad}
#: Student's t for 95 %, by degrees of freedom.
STUDENT = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26, 11: 2.20, 14: 2.14, 19: 2.09}


@dataclass(frozen=True)
class Run:
    """What one training run gave."""

    way: str
    steps: int
    seed: int
    accuracy: float
    ms_per_step: float
    seconds_to_target: float | None


def compression_of(way: str) -> Any:
    named = {"fp32": hvd.Compression.none, "fp16": hvd.Compression.fp16, "auto": hvd.Compression.auto,
             "onebit": hvd.Compression.onebit, "plain": hvd.Compression.quantized(precondition="none")}
    if way in named:
        return named[way]
    if way in ("bits2", "bits4", "bits8"):
        return hvd.Compression.quantized(bits=int(way[4:]))
    if way in ("l1", "two_means", "rms"):
        return hvd.Compression.quantized(scale=way)
    sys.exit(f"time_to_accuracy: no way {way!r}: see --help")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", default="fp32,onebit")
    parser.add_argument("--optimizer", default="sgd", choices=OPTIMIZERS)
    parser.add_argument("--lr", type=float, help="falls to 0 along a cosine")
    parser.add_argument("--steps", default="468,1872")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--images", type=int, default=20000, help="trained on; all 10000 others validate")
    parser.add_argument("--batch", type=int, default=64, help="of each rank")
    parser.add_argument("--hidden", type=int, default=256, help="width of the first hidden layer")
    parser.add_argument("--target", type=float, help="validation accuracy in percent")
    parser.add_argument("--look", type=int, default=20)
    parser.add_argument("--data", default="/usr/share/datasets/fashion-mnist")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)
    (x, y), validation = [tuple(map(torch.from_numpy, one)) for one in load(Path(options.data))]
    training = x[: options.images], y[: options.images]
    runs: list[Run] = []
    for steps in map(int, options.steps.split(",")):
        for seed in range(options.seeds):
            for way in options.ways.split(","):
                runs.append(train(way, steps, seed, training, validation, options))
        if hvd.rank() == 0:
            print(summary([one for one in runs if one.steps == steps], options), flush=True)
    if hvd.rank() == 0 and options.json:
        found = {"options": vars(options), "ranks": hvd.size(), "runs": list(map(asdict, runs))}
        Path(options.json).write_text(json.dumps(found))


def train(way: str, steps: int, seed: int, training: Any, validation: Any, options: argparse.Namespace) -> Run:
    torch.manual_seed(seed)
    net = torch.nn.Sequential(torch.nn.Linear(784, options.hidden), torch.nn.ReLU(), torch.nn.Linear(options.hidden, 128),
                              torch.nn.ReLU(), torch.nn.Linear(128, 10))
    lr = options.lr or RATES.get(options.optimizer, 1e-3)
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS[options.optimizer](net.parameters(), lr=lr), net.named_parameters(), compression=compression_of(way))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * step / steps)))
    x, y = training
    batch, each = options.batch, len(x) // (options.batch * hvd.size())
    order, seconds, reached = torch.arange(0), 0.0, None
    for step in range(steps):
        if step % each == 0:
            order = torch.randperm(len(x))  # the same on every rank
        started = time.perf_counter()
        mine = order[(step % each * hvd.size() + hvd.rank()) * batch :][:batch]
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(x[mine]), y[mine]).backward()
        optimizer.step()
        schedule.step()
        seconds += time.perf_counter() - started
        if options.target and reached is None and (step + 1) % options.look == 0 and accuracy(net, validation) >= options.target:
            reached = seconds
    return Run(way, steps, seed, accuracy(net, validation), 1e3 * seconds / steps, reached)


def accuracy(net: torch.nn.Module, validation: Any) -> float:
    x, y = validation
    with torch.no_grad():
        return round(100 * (net(x).argmax(1) == y).float().mean().item(), 2)


def summary(runs: list[Run], options: argparse.Namespace) -> str:
    ways = list(dict.fromkeys(one.way for one in runs))
    of = {way: [one for one in runs if one.way == way] for way in ways}
    lines = [f"{options.optimizer}, {hvd.size()} ranks, {runs[0].steps} steps",
             f"{'way':>10} {'mean %':>7} {'difference':>11} {'95 % interval':>18} {'ms/step':>8} "
             f"{'s to target':>12}  accuracy of every seed"]
    for way, found in of.items():
        differences = [one.accuracy - first.accuracy for one, first in zip(found, of[ways[0]], strict=True)]
        mean, half = statistics.mean(differences), half_interval(differences)
        reached = [one.seconds_to_target for one in found]
        target = statistics.median(one for one in reached if one is not None) if all(reached) else None
        pace = statistics.median(one.ms_per_step for one in found)
        lines.append(f"{way:>10} {statistics.mean(one.accuracy for one in found):7.2f} {mean:+11.3f} "
                     f"{f'[{mean - half:+.3f}, {mean + half:+.3f}]':>18} {pace:8.2f} "
                     f"{'-' if target is None else f'{target:.2f}':>12}  {' '.join(f'{one.accuracy:.2f}' for one in found)}")
    return "\n".join(lines)


def half_interval(values: list[float]) -> float:
    degrees = len(values) - 1
    if not degrees:
        return math.inf
    t = STUDENT[max(known for known in STUDENT if known <= degrees)]
    return float(t * np.std(values, ddof=1) / math.sqrt(len(values)))


if __name__ == "__main__":
    main()
