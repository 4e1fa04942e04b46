"""Handwritten digits with a two-layer network in pure NumPy, trained by all ranks together.

    hvdrun -np 2 python examples/numpy_digits.py --epochs 20
"""

import argparse
import time

import numpy as np
from digits import Progress, load_digits, shard

import hvdlite


class MomentumSGD:
    """Any object with a ``step`` that takes a dict of gradients is an optimizer to hvdlite."""

    def __init__(self, parameters, learning_rate, momentum=0.9):
        self.parameters, self.learning_rate, self.momentum = parameters, learning_rate, momentum
        self.velocity = {name: np.zeros_like(value) for name, value in parameters.items()}

    def step(self, gradients):
        for name, gradient in gradients.items():
            self.velocity[name] = self.momentum * self.velocity[name] + gradient
            self.parameters[name] -= self.learning_rate * self.velocity[name]


def new_parameters(seed, hidden=64):
    random = np.random.default_rng(seed)
    return {
        "w1": random.normal(0, np.sqrt(2 / 64), (64, hidden)).astype(np.float32),
        "b1": np.zeros(hidden, np.float32),
        "w2": random.normal(0, np.sqrt(2 / hidden), (hidden, 10)).astype(np.float32),
        "b2": np.zeros(10, np.float32),
    }


def forward(parameters, images):
    hidden = np.maximum(images @ parameters["w1"] + parameters["b1"], 0)
    return hidden, hidden @ parameters["w2"] + parameters["b2"]


def loss_and_gradients(parameters, images, labels):
    """Mean cross-entropy of the batch, and its gradient by parameter."""
    hidden, logits = forward(parameters, images)
    exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
    probabilities = exponentials / exponentials.sum(axis=1, keepdims=True)
    rows = np.arange(len(labels))
    loss = -np.log(probabilities[rows, labels] + 1e-12).mean()
    probabilities[rows, labels] -= 1
    back = probabilities / len(labels)
    back_hidden = (back @ parameters["w2"].T) * (hidden > 0)
    gradients = {
        "w1": images.T @ back_hidden, "b1": back_hidden.sum(axis=0), "w2": hidden.T @ back, "b2": back.sum(axis=0),
    }
    return loss, gradients


def accuracy(parameters, images, labels):
    return float((forward(parameters, images)[1].argmax(axis=1) == labels).mean())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=64, help="samples per step, over all ranks together")
    parser.add_argument("--learning-rate", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    hvdlite.init()
    train, validation = load_digits()
    parameters = new_parameters(arguments.seed + hvdlite.rank())
    hvdlite.broadcast_parameters(parameters, root_rank=0)
    optimizer = hvdlite.DistributedOptimizer(MomentumSGD(parameters, arguments.learning_rate))

    started = time.perf_counter()
    progress = Progress(arguments.epochs, is_shown=hvdlite.rank() == 0)
    for epoch in range(arguments.epochs):
        losses = []
        epoch_started = time.perf_counter()
        for images, labels in shard(train, arguments.batch_size, epoch, arguments.seed, hvdlite.rank(), hvdlite.size()):
            loss, gradients = loss_and_gradients(parameters, images, labels)
            optimizer.step(gradients)
            losses.append(loss)
        seconds = time.perf_counter() - epoch_started
        progress.report(
            epoch, loss=float(hvdlite.allreduce(np.float32(np.mean(losses)))), training=accuracy(parameters, *train),
            validation=accuracy(parameters, *validation), samples_per_second=len(train[1]) / seconds)
    if hvdlite.rank() == 0:
        print(f"validation accuracy {accuracy(parameters, *validation):.4f} after {time.perf_counter() - started:.1f} s "
              f"on {hvdlite.size()} rank(s)")


if __name__ == "__main__":
    main()
