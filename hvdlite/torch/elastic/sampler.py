"""ElasticSampler: shares a data set among the ranks and knows how far the epoch has come."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sized
from typing import Any

from torch.utils.data import Sampler

from hvdlite import api


class ElasticSampler(Sampler[int]):
    """A sampler for a DataLoader that can resume in the middle of an epoch, with any number of ranks.

    Put it into a TorchState, call ``record_batch`` after every batch and ``set_epoch`` at the *end* of an epoch: at its
    beginning it would forget what was done before a restart. ``epoch`` and ``processed_num`` (samples that all ranks
    together have done in this epoch) are its whole state.

    *Guarantees*: the ranks take the remaining samples in turns, so that equal numbers of batches on all ranks make a
    prefix of the epoch's order, and what remains is the rest, neither lost nor repeated. All ranks get equally many:
    where the number of ranks does not divide them, the first ones are dealt out again at the end of the epoch.
    *Source*: the order is that of Horovod 0.28 for the same seed, so its checkpoints can be resumed.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        """``seed`` must be the same on every rank; the data set must not change its length.

        Raises: NotInitializedError before ``init``.
        """
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch: nothing is processed, and with ``shuffle`` there is a new order."""
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Count a batch as processed on every rank; what is being iterated over stays as it is."""
        self.processed_num += batch_size * self.num_replicas

    def reset(self) -> None:
        """Share what remains of the epoch among the ranks there are now."""
        self.rank, self.num_replicas = api.rank(), api.size()
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        self.remaining_indices = order[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def state_dict(self) -> dict[str, int]:
        """Epoch and progress; the same on every rank."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to that epoch and progress, and share what remains."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def __iter__(self) -> Iterator[int]:
        dealt = itertools.islice(itertools.cycle(self.remaining_indices), self.total_size)
        return itertools.islice(dealt, self.rank, None, self.num_replicas)

    def __len__(self) -> int:
        """How many samples this rank gets."""
        return self.num_samples
