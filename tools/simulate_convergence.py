#!/usr/bin/env python3
"""The numerics of the quantised exchange for any number of ranks in one process, with the codec's own functions.

    python tools/simulate_convergence.py --ranks 2,4,16,64,256 --ways two_shot:rotated,ring:rotated,two_shot:l1 --plot lag.png
    python tools/simulate_convergence.py --train --data /usr/share/datasets/fashion-mnist --ranks 4 --seeds 2 --epochs 6

A way is ``SCHEDULE:SCALE[:BITS][:nofeedback]``, or ``dense``. Without ``--train`` every rank has a fixed gradient with
heavy tails and fresh noise in every step; printed after ``--steps`` steps: *lag*, |sum of true means - sum of results| /
|mean gradient|, in steps; *residual*, the ranks' residuals together against one step's gradients, as energy; *cosine*
between result and true mean of the last step. With ``--train`` a multi-layer perceptron learns Fashion-MNIST with
momentum SGD, every rank on its own batches; per way and seed the validation accuracy in percent.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import statistics
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from hvdlite.compression import codec_cpu as codec
from hvdlite.compression.exchange import owned_groups
from hvdlite.compression.rotation import GROUP
from hvdlite.compression.spec import CodecSpec


@dataclass(frozen=True)
class Way:
    """How the ranks exchange."""

    schedule: str
    spec: CodecSpec
    has_feedback: bool = True

    @staticmethod
    def parse(text: str) -> Way:
        schedule, *rest = text.split(":")
        has_feedback = "nofeedback" not in rest
        rest = [one for one in rest if one != "nofeedback"]
        if schedule not in ("dense", "two_shot", "ring"):
            sys.exit(f"simulate_convergence: way {text!r}: write it like two_shot:rotated, ring:l1 or two_shot:rotated:2")
        return Way(schedule, CodecSpec(int(rest[1]) if len(rest) > 1 else 1, rest[0] if rest else "rotated"), has_feedback)


class Exchange:
    """The residuals of all ranks for one tensor, and its exchange."""

    def __init__(self, way: Way, num_elements: int, num_ranks: int, name: str) -> None:
        self.way, self.num_ranks = way, num_ranks
        padded = way.spec.padded(num_elements)
        self.residuals = np.zeros((num_ranks, padded), np.float32)
        ends = np.cumsum([0, *owned_groups(padded // GROUP, num_ranks, name)]) * GROUP
        self.chunks = [slice(start, min(end, num_elements)) for start, end in pairwise(ends)]

    def mean(self, gradients: np.ndarray) -> np.ndarray:
        """What every rank gets. *Shapes*: gradients (ranks, elements), result (elements,)."""
        if self.way.schedule == "dense":
            return gradients.mean(axis=0)
        out = np.empty(gradients.shape[1], np.float32)
        for owner, chunk in enumerate(self.chunks):
            if chunk.stop > chunk.start:
                words, scales = self._final_code(gradients, owner, chunk)
                codec.unrotate(self.way.spec, words, scales, out[chunk], 1 / self.num_ranks)
        if not self.way.has_feedback:
            self.residuals[:] = 0
        return out

    def _final_code(self, gradients: np.ndarray, owner: int, chunk: slice) -> tuple[np.ndarray, np.ndarray]:
        spec, count = self.way.spec, chunk.stop - chunk.start
        kept = slice(chunk.start, chunk.start + spec.padded(count))
        groups = spec.num_groups(count)
        words = np.empty(groups * spec.words_per_group, np.uint32)
        scales = np.empty(groups * spec.scales_per_group, np.float32)
        total = np.empty(spec.padded(count), np.float32)
        others = [(owner + 1 + hop) % self.num_ranks for hop in range(self.num_ranks - 1)]
        if self.way.schedule == "two_shot":
            codec.rotate(spec, gradients[owner, chunk], self.residuals[owner, kept], total)
            for rank in sorted(others):
                own = self.residuals[rank, kept]
                codec.encode(spec, gradients[rank, chunk], own, own, words, scales)
                codec.decode_add(spec, words, scales, total, count)
        else:
            for hop, rank in enumerate([*others, owner]):
                codec.rotate(spec, gradients[rank, chunk], self.residuals[rank, kept], total)
                if hop:
                    codec.decode_add(spec, words, scales, total, count)
                if rank != owner:
                    codec.encode_rotated(spec, total, self.residuals[rank, kept], words, scales, count)
        codec.encode_rotated(spec, total, self.residuals[owner, kept], words, scales, count)
        return words, scales


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4,8,32")
    parser.add_argument("--ways", default="two_shot:rotated,ring:rotated,two_shot:l1,two_shot:two_means,two_shot:rms,"
                                          "two_shot:rotated:2,two_shot:rotated:nofeedback")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--elements", type=int, default=16384)
    parser.add_argument("--tail", type=float, default=0.5, help="of the gradient: sigma of its log-normal sizes")
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--data", default="/usr/share/datasets/fashion-mnist")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch", type=int, default=64, help="of each rank")
    parser.add_argument("--plot", metavar="FILE", help="draw lag and residual, or accuracy; needs matplotlib")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    found = []
    for ranks in map(int, options.ranks.split(",")):
        for text in options.ways.split(","):
            made = train(Way.parse(text), ranks, options) if options.train else drift(Way.parse(text), ranks, options)
            found.append({"ranks": ranks, "way": text, **made})
            print("  ".join(f"{key} {value}" for key, value in found[-1].items() if key != "lags"), flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1))
    if options.plot:
        draw(found, options.plot)


def drift(way: Way, ranks: int, options: argparse.Namespace) -> dict[str, Any]:
    """Follow a fixed gradient with noise."""
    rng = np.random.default_rng(0)
    sizes = rng.lognormal(0, options.tail, options.elements)
    fixed = (rng.standard_normal(options.elements) * sizes).astype(np.float32)
    exchange = Exchange(way, options.elements, ranks, "w")
    owed, lags = np.zeros(options.elements), []
    true = out = energy = np.zeros(0)
    for _ in range(options.steps):
        noise = rng.standard_normal((ranks, options.elements)).astype(np.float32)
        gradients = fixed + noise * sizes.astype(np.float32)
        true, out = gradients.mean(axis=0), exchange.mean(gradients)
        owed += true.astype(np.float64) - out
        lags.append(float(np.linalg.norm(owed) / np.linalg.norm(fixed)))
        energy = np.square(gradients).sum()
    cosine = float(true @ out / np.linalg.norm(true) / np.linalg.norm(out))
    residual = float(np.square(exchange.residuals, dtype=np.float64).sum() / energy)
    return {"lag": round(lags[-1], 3), "residual": round(residual, 3), "cosine": round(cosine, 3), "lags": lags}


def train(way: Way, ranks: int, options: argparse.Namespace) -> dict[str, Any]:
    """Learn Fashion-MNIST once per seed; the same weights and batches for every way."""
    accuracies = [train_once(way, ranks, seed, options) for seed in range(options.seeds)]
    return {"mean": round(statistics.mean(accuracies), 2), "accuracies": accuracies}


def train_once(way: Way, ranks: int, seed: int, options: argparse.Namespace) -> float:
    try:
        import torch
    except ImportError:
        sys.exit("simulate_convergence: --train needs torch: pip install hvdlite[torch]")
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    (x, y), (xt, yt) = [tuple(map(torch.from_numpy, one)) for one in load(Path(options.data))]
    x, y = x[:20000], y[:20000]
    net = torch.nn.Sequential(torch.nn.Linear(784, 256), torch.nn.ReLU(), torch.nn.Linear(256, 128), torch.nn.ReLU(),
                              torch.nn.Linear(128, 10))
    parameters = list(net.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    exchanges = [Exchange(way if one.ndim > 1 else Way("dense", way.spec), one.numel(), ranks, f"{index}")
                 for index, one in enumerate(parameters)]
    steps = len(x) // (options.batch * ranks)
    for epoch in range(options.epochs):
        order = torch.randperm(len(x))
        for step in range(steps):
            rate = 0.5 * (1 + math.cos(math.pi * (epoch * steps + step) / (options.epochs * steps)))
            optimizer.param_groups[0]["lr"] = 0.1 * rate
            taken = []
            for rank in range(ranks):
                batch = order[(step * ranks + rank) * options.batch :][: options.batch]
                loss = torch.nn.functional.cross_entropy(net(x[batch]), y[batch])
                taken.append(torch.autograd.grad(loss, parameters))
            for index, one in enumerate(parameters):
                gradients = np.stack([part[index].reshape(-1).numpy() for part in taken])
                one.grad = torch.from_numpy(exchanges[index].mean(gradients)).view_as(one)
            optimizer.step()
    with torch.no_grad():
        return round(100 * (net(xt).argmax(1) == yt).float().mean().item(), 2)


def load(folder: Path) -> list[tuple[np.ndarray, np.ndarray]]:
    """Training and validation images, normalised, and labels, from the four gzip files of the data set."""
    made = []
    for part in ("train", "t10k"):
        files = [folder / f"{part}-{kind}.gz" for kind in ("images-idx3-ubyte", "labels-idx1-ubyte")]
        for file in files:
            if not file.exists():
                sys.exit(f"simulate_convergence: no {file}: install Debian's dataset-fashion-mnist, or pass --data FOLDER")
        images, labels = (np.frombuffer(gzip.open(file).read(), np.uint8, offset=skip)
                          for file, skip in zip(files, (16, 8), strict=True))
        made.append((((images.reshape(-1, 784) / 255.0 - 0.286) / 0.353).astype(np.float32), labels.astype(np.int64)))
    return made


def draw(found: list[dict[str, Any]], file: str) -> None:
    try:
        from matplotlib import pyplot
    except ImportError:
        sys.exit("simulate_convergence: --plot needs matplotlib: pip install matplotlib")
    what = [key for key in ("lag", "residual", "mean") if key in found[0]]
    figure, axes = pyplot.subplots(1, len(what), figsize=(6 * len(what) + 3, 5), squeeze=False,
                                   layout="constrained")
    for axis, key in zip(axes[0], what, strict=True):
        for way in dict.fromkeys(one["way"] for one in found):
            rows = [one for one in found if one["way"] == way]
            axis.plot([one["ranks"] for one in rows], [one[key] for one in rows], marker="o", label=way)
        ranks = sorted({one["ranks"] for one in found})
        axis.set_xscale("log", base=2)
        axis.set_xticks(ranks, [str(one) for one in ranks])
        axis.set(xlabel="ranks", title={"lag": "lag, steps", "residual": "residual / gradient, energy",
                                             "mean": "validation accuracy, %"}[key])
        axis.set_yscale("linear" if key == "mean" else "log")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside right upper")
    figure.savefig(file, dpi=120)


if __name__ == "__main__":
    main()
