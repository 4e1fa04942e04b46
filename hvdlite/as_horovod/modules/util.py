"""``horovod.common.util``: what scripts and tests use of it."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

_cache = functools.cache


@contextmanager
def env(**variables: str | None) -> Iterator[None]:
    """Set environment variables for a while; those given as None are left alone."""
    changed = {name: value for name, value in variables.items() if value is not None}
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether hvdlite can work with a framework: torch, if it is installed."""
    return ext_base_name == "torch" and find_spec("torch") is not None


def mpi_built(verbose: bool = False) -> bool:
    """Whether mpi4py is installed."""
    return find_spec("mpi4py") is not None


def gloo_built(verbose: bool = False) -> bool:
    """False: hvdlite does not use Gloo."""
    return False


def nccl_built(verbose: bool = False) -> int:
    """The version code of NCCL that CuPy has, or 0."""
    from hvdlite import torch as hvd

    return int(hvd.nccl_built())


def ddl_built(verbose: bool = False) -> bool:
    """False: hvdlite does not use DDL."""
    return False


def ccl_built(verbose: bool = False) -> bool:
    """False: hvdlite does not use oneCCL."""
    return False


def num_rank_is_power_2(num_rank: int) -> bool:
    """Whether a number of ranks is 1, 2, 4, 8 ..."""
    return num_rank > 0 and num_rank.bit_count() == 1


def split_list(l: Sequence[Any], n: int) -> list[Sequence[Any]]:  # noqa: E741  the name callers may use
    """Cut a list into n pieces whose lengths differ by at most one, the longer ones first."""
    short, num_longer = divmod(len(l), n)
    ends = [0]
    for piece in range(n):
        ends.append(ends[-1] + short + (piece < num_longer))
    return [l[begin:end] for begin, end in itertools.pairwise(ends)]


def is_iterable(x: Any) -> bool:
    """Whether ``iter(x)`` works."""
    try:
        iter(x)
    except TypeError:
        return False
    return True


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Whether version ``ver`` is ``target`` (major.minor.patch) or later.

    Raises: ValueError where one is no string, or ``target`` has not three parts.
    """
    if not isinstance(ver, str) or not isinstance(target, str):
        raise ValueError(f"versions are strings, not {ver!r} and {target!r}")
    if target.count(".") != 2:
        raise ValueError(f"{target!r} is not of the form major.minor.patch")
    from packaging.version import parse

    return parse(ver) >= parse(target)
