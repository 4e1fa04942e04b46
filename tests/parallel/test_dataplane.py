"""The contract of data planes over MPI; see tests/test_dataplane.py."""

import sys
from pathlib import Path

import pytest

import hvdlite as hvd
from hvdlite.dataplane.mpi import MpiPlane

sys.path.insert(0, str(Path(__file__).parent.parent))
from plane_contract import CONTRACT, HostMemory

RANKS = (1, 2, 3)


@pytest.mark.parametrize("is_shared_memory", [True, False])
@pytest.mark.parametrize("max_count", [2**31 - 1, 100])
@pytest.mark.parametrize("check", CONTRACT, ids=lambda check: check.__name__)
def test_contract(check, max_count, is_shared_memory):
    """While the runtime rests: only one thread at a time is to call MPI."""
    from mpi4py import MPI

    hvd.shutdown()
    try:
        plane = MpiPlane(MPI.COMM_WORLD.Dup(), is_shared_memory=is_shared_memory, max_count=max_count)
        check(plane, HostMemory())
        plane.close()
    finally:
        hvd.init()
