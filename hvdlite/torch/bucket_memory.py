"""BucketMemory: where the small gradients of a bucket lie side by side, in the order in which they travel: nothing is packed.

A parameter's ``grad`` becomes a view of it when the gradient is handed over: by a copy where backward made a new tensor, by
nothing at all where backward added to the view of the step before (``zero_grad(set_to_none=False)``). A bucket whose memory
somebody else still looks into, as at ``grad`` of an earlier step, is left alone in that step.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

import torch

from hvdlite.adapters import torch as adapter
from hvdlite.buffer import Buffer
from hvdlite.fusion import DIRECT_BYTES, aligned

#: torch's count of the views of a storage; None where this torch has no such function, and there is no bucket memory then.
_num_users = getattr(torch._C, "_storage_Use_Count", None)


class BucketMemory:
    """The memory of one bucket's small host gradients of one dtype."""

    def __init__(self, parameters: Mapping[int, torch.Tensor]) -> None:
        sizes = {index: one.numel() * one.element_size() for index, one in parameters.items()}
        first = next(iter(parameters.values()))
        flat = torch.zeros(sum(map(aligned, sizes.values())) // first.element_size(), dtype=first.dtype)
        self.homes: dict[int, torch.Tensor] = {}
        at = 0
        for index, one in parameters.items():
            # .data: with a version counter of its own, by which changes are noticed.
            self.homes[index] = flat[at : at + one.numel()].view(one.shape).data
            at += aligned(sizes[index]) // one.element_size()
        self.flat = adapter.buffer(flat, True).array
        self.buffers: dict[int, Buffer] = {index: adapter.buffer(home, True) for index, home in self.homes.items()}
        self._storage = flat.untyped_storage()
        self._num_views = 0
        self._num_references: dict[int, int] = {}

    def note_users(self) -> None:
        """All who are to have a reference to a home have one now."""
        self._num_views = self._count_views()
        self._num_references = {index: self._count_references(index) for index in self.homes}

    def is_viewed(self) -> bool:
        """Whether somebody else has a view of some of it."""
        return self._count_views() > self._num_views

    def takes(self, index: int, gradient: torch.Tensor) -> bool:
        """Whether a gradient may be brought home: a dense one that autograd does not follow, and while nobody has the tensor that
        was ``grad`` before."""
        home = self.homes[index]
        return (gradient.layout is torch.strided and not gradient.requires_grad
                and gradient.dtype == home.dtype and gradient.shape == home.shape
                and self._count_references(index) <= self._num_references[index] + 1)  # and the variable here

    def _count_references(self, index: int) -> int:
        return sys.getrefcount(self.homes[index])

    def _count_views(self) -> int:
        assert _num_users is not None
        return int(_num_users(self._storage._cdata))


def memories_of(bucket: Sequence[int], parameters: Sequence[torch.Tensor]) -> list[BucketMemory]:
    """One for each dtype among a bucket's small contiguous host parameters; ``bucket``: their indices in order."""
    if _num_users is None:
        return []
    by_dtype: dict[torch.dtype, dict[int, torch.Tensor]] = {}
    for index in bucket:
        one = parameters[index]
        if one.device.type == "cpu" and one.is_contiguous() and 0 < one.numel() * one.element_size() < DIRECT_BYTES:
            by_dtype.setdefault(one.dtype, {})[index] = one
    return [BucketMemory(some) for some in by_dtype.values()]
