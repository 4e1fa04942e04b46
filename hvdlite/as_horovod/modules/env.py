"""``horovod.runner.common.util.env``: a rank's place, before ``init``."""

from __future__ import annotations

import os


def get_env_rank_and_size() -> tuple[int, int]:
    """This process's rank and the number of ranks, as the starter says; (0, 1) without one."""
    for rank, size in (("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE")):
        if rank in os.environ and size in os.environ:
            return int(os.environ[rank]), int(os.environ[size])
    return 0, 1
