"""Allgather: concatenate along the first dimension, which may differ between ranks."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from hvdlite.collectives.workspace import Workspace
from hvdlite.dataplane.base import MovesRows
from hvdlite.fusion import Bucket
from hvdlite.tensor_queue import TensorEntry
from hvdlite.timeline.phase import Phase


def execute(bucket: Bucket, entries: Mapping[int, TensorEntry], plane: MovesRows, workspace: Workspace,
            phase: Phase = Phase.MPI_ALLGATHER) -> None:
    """Exchange the first dimensions of all tensors of the call, then gather each."""
    entry = entries[bucket.segments[0].slot]
    assert entry.allocate is not None
    rows = plane.exchange_sizes([buffer.shape[0] for buffer in entry.inputs])
    outputs = []
    for index, source in enumerate(entry.inputs):
        row_elements = prod(source.shape[1:])
        target = entry.allocate(index, (int(rows[:, index].sum()), *source.shape[1:]))
        with workspace.timeline.timed(phase, bucket.label, target.array.nbytes):
            plane.allgather(source.array, target.array, [int(count) * row_elements for count in rows[:, index]])
        outputs.append(target)
    entry.outputs = tuple(outputs)
