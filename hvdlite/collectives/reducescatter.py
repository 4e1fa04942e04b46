"""Reducescatter: combine, and keep this rank's rows; the first ranks get one row more."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import numpy as np

from hvdlite.buffer import HALVES
from hvdlite.collectives.scaling import scale, unscaled_op
from hvdlite.collectives.workspace import Workspace
from hvdlite.dataplane import halves
from hvdlite.dataplane.base import DataPlane, even_counts
from hvdlite.fusion import Bucket
from hvdlite.tensor_queue import TensorEntry
from hvdlite.timeline.phase import Phase


def execute(bucket: Bucket, entries: Mapping[int, TensorEntry], plane: DataPlane, workspace: Workspace) -> None:
    """Combine each tensor of the call."""
    entry = entries[bucket.segments[0].slot]
    assert entry.allocate is not None
    request = entry.request
    op, divisor = unscaled_op(request.op, plane.size)
    outputs = []
    for index, source in enumerate(entry.inputs):
        rows = even_counts(source.shape[0], plane.size)
        target = entry.allocate(index, (rows[plane.rank], *source.shape[1:]))
        counts = [count * prod(source.shape[1:]) for count in rows]
        with workspace.timeline.timed(Phase.MPI_REDUCESCATTER, bucket.label, source.array.nbytes):
            if source.dtype in HALVES:
                halves.reducescatter(plane, source.array, target.array, counts, op, source.dtype == "bfloat16",
                                     request.prescale, request.postscale / divisor)
            else:
                values = source.array
                if request.prescale != 1.0:
                    values = np.empty_like(values)
                    scale(source.array, values, request.prescale, 1)
                plane.reducescatter(values, target.array, counts, op)
                scale(target.array, target.array, request.postscale, divisor)
        outputs.append(target)
    entry.outputs = tuple(outputs)
