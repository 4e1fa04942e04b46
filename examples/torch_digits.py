"""Handwritten digits with a small convolutional net in torch, trained by all ranks together.

    hvdrun -np 2 python examples/torch_digits.py --epochs 20
"""

import argparse
import time

import numpy as np
import torch
from digits import Progress, load_digits, shard

import hvdlite.torch as hvd


class Net(torch.nn.Sequential):
    """Two convolutions and two linear layers on 8 x 8 images."""

    def __init__(self):
        super().__init__(
            torch.nn.Unflatten(1, (1, 8, 8)),
            torch.nn.Conv2d(1, 16, 3, padding=1), torch.nn.ReLU(),
            torch.nn.Conv2d(16, 32, 3, padding=1), torch.nn.ReLU(), torch.nn.MaxPool2d(2),
            torch.nn.Flatten(), torch.nn.Linear(512, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))


def accuracy(model, images, labels):
    with torch.no_grad():
        return float((model(images).argmax(1) == labels).float().mean())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=64, help="samples per step, over all ranks together")
    parser.add_argument("--learning-rate", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed + hvd.rank())
    train, validation = load_digits()
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=arguments.learning_rate, momentum=0.9)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    whole_train, whole_validation = ([torch.from_numpy(part) for part in samples] for samples in (train, validation))
    started = time.perf_counter()
    progress = Progress(arguments.epochs, is_shown=hvd.rank() == 0)
    for epoch in range(arguments.epochs):
        losses = []
        epoch_started = time.perf_counter()
        for images, labels in shard(train, arguments.batch_size, epoch, arguments.seed, hvd.rank(), hvd.size()):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(torch.from_numpy(images)), torch.from_numpy(labels))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        seconds = time.perf_counter() - epoch_started
        progress.report(
            epoch, loss=float(hvd.allreduce(torch.tensor(np.mean(losses)))), training=accuracy(model, *whole_train),
            validation=accuracy(model, *whole_validation), samples_per_second=len(train[1]) / seconds)
    if hvd.rank() == 0:
        print(f"validation accuracy {accuracy(model, *whole_validation):.4f} after {time.perf_counter() - started:.1f} s "
              f"on {hvd.size()} rank(s)")


if __name__ == "__main__":
    main()
