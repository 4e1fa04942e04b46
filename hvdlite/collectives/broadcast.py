"""Broadcast: everyone gets the root's values."""

from __future__ import annotations

from collections.abc import Mapping

from hvdlite.collectives.workspace import Workspace
from hvdlite.dataplane.base import DataPlane
from hvdlite.fusion import Bucket
from hvdlite.tensor_queue import TensorEntry
from hvdlite.timeline.phase import Phase


def execute(bucket: Bucket, entries: Mapping[int, TensorEntry], plane: DataPlane, workspace: Workspace) -> None:
    """Send the root's input to every output."""
    entry = entries[bucket.segments[0].slot]
    root = entry.root_in_set
    for source, target in zip(entry.inputs, entry.outputs, strict=True):
        if plane.rank == root and target is not source:
            target.array[:] = source.array
        with workspace.timeline.timed(Phase.MPI_BCAST, bucket.label, target.array.nbytes):
            plane.broadcast(target.array, root)
