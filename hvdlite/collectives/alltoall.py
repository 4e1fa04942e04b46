"""Alltoall: every rank sends a run of rows to every rank."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from hvdlite.collectives.workspace import Workspace
from hvdlite.dataplane.base import MovesRows
from hvdlite.fusion import Bucket
from hvdlite.tensor_queue import TensorEntry
from hvdlite.timeline.phase import Phase


def execute(bucket: Bucket, entries: Mapping[int, TensorEntry], plane: MovesRows, workspace: Workspace,
            phase: Phase = Phase.MPI_ALLTOALL) -> None:
    """Exchange the splits, then the rows; ``received_splits`` of the entry says how many came from whom."""
    entry = entries[bucket.segments[0].slot]
    assert entry.allocate is not None
    source = entry.inputs[0]
    row_elements = prod(source.shape[1:])
    splits = plane.exchange_sizes(entry.splits)
    entry.received_splits = tuple(int(rows) for rows in splits[:, plane.rank])
    target = entry.allocate(0, (sum(entry.received_splits), *source.shape[1:]))
    with workspace.timeline.timed(phase, bucket.label, target.array.nbytes):
        plane.alltoall(source.array, target.array, splits * row_elements)
    entry.outputs = (target,)
