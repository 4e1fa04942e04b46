"""What the digit examples share: the data, its split among ranks, and the lines they print."""

import sys

import numpy as np


def load_digits():
    """scikit-learn's 1797 handwritten digits as ((images, labels), (images, labels)): training and validation.

    Images are (n, 64) float32 in 0..1; every fifth sample is for validation.
    """
    try:
        from sklearn.datasets import load_digits as load
    except ImportError as reason:
        raise SystemExit(
            f"the data set comes with scikit-learn, which is missing ({reason}): pip install hvdlite[examples]") from None
    data = load()
    images, labels = (data.data / 16).astype(np.float32), data.target.astype(np.int64)
    is_validation = np.arange(len(labels)) % 5 == 4
    return (images[~is_validation], labels[~is_validation]), (images[is_validation], labels[is_validation])


def shard(samples, batch_size, epoch, seed, rank, size):
    """This rank's part of every global batch of an epoch: the batches are the same for any number of ranks."""
    if batch_size % size:
        raise SystemExit(f"--batch-size {batch_size} cannot be shared evenly by {size} ranks: choose a multiple of {size}")
    images, labels = samples
    order = np.random.default_rng([seed, epoch]).permutation(len(labels))
    for start in range(0, len(order) - batch_size + 1, batch_size):
        mine = order[start : start + batch_size].reshape(size, -1)[rank]
        yield images[mine], labels[mine]


class Progress:
    """One line per epoch, and a bar where there is a terminal; on one rank only."""

    def __init__(self, epochs, is_shown):
        self.is_shown = is_shown
        self.bar = None
        if is_shown and sys.stderr.isatty():
            from tqdm import tqdm

            self.bar = tqdm(total=epochs, unit="epoch", leave=False)

    def report(self, epoch, loss, training, validation, samples_per_second):
        if not self.is_shown:
            return
        line = (f"epoch {epoch + 1:3d}  loss {loss:.4f}  training accuracy {training:.4f}  "
                f"validation accuracy {validation:.4f}  {samples_per_second:,.0f} samples/s")
        if self.bar is None:
            print(line, flush=True)
        else:
            self.bar.update()
            self.bar.write(line, file=sys.stdout)
