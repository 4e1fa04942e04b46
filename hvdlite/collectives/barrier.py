"""Barrier: nobody goes on before everybody is here.

Negotiation alone tells that every rank of the set has submitted it, and no rank completes it earlier.
"""

from __future__ import annotations

from collections.abc import Mapping

from hvdlite.collectives.workspace import Workspace
from hvdlite.dataplane.base import DataPlane
from hvdlite.fusion import Bucket
from hvdlite.tensor_queue import TensorEntry


def execute(bucket: Bucket, entries: Mapping[int, TensorEntry], plane: DataPlane, workspace: Workspace) -> None:
    """Nothing is left to do."""
