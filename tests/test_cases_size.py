"""Public bug reports as tests, on two ranks: what is really large, or really many; as parallel/test_cases_size.py."""

import sys

import pytest
from ranks import hvdrun

pytestmark = pytest.mark.slow

LARGE_TENSOR = """
import torch, hvdlite.torch as hvd
hvd.init()
marks = [0, 2**31 - 1, 2**31, 2**31 + 15]
tensor = torch.empty(2**31 + 16, dtype=torch.uint8)
for number, place in enumerate(marks):
    tensor[place] = 10 * hvd.rank() + number + 1
tensor[1:5] = hvd.rank()
assert hvd.broadcast_(tensor, root_rank=1) is tensor
assert [tensor[place].item() for place in marks] == [11, 12, 13, 14]
assert tensor[1:5].tolist() == [1] * 4
"""

LARGE_OBJECT = """
import hvdlite.torch as hvd
hvd.init()
size = 2**31 + 16
got = hvd.broadcast_object(bytes(size) if hvd.rank() == 0 else None, root_rank=0)
assert type(got) is bytes and len(got) == size and not got.strip(b"\\0")
"""

MANY_CALLS = """
import os, torch, hvdlite.torch as hvd
hvd.init()
def memory_bytes():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
one = torch.ones(10)
for i in range(20_000):
    hvd.allreduce(one)
    if i % 4 == 0:
        assert hvd.allgather_object(i) == [i, i]
    if i == 2_000:
        before_bytes = memory_bytes()
assert memory_bytes() - before_bytes < 20 << 20, (before_bytes, memory_bytes())
"""


@pytest.mark.parametrize("code", [LARGE_TENSOR, LARGE_OBJECT], ids=["tensor", "object"])
def test_g1_above_what_an_int_holds(code):
    """bytedance/byteps#302, facebookresearch/maskrcnn-benchmark#796: sizes above 2^31 - 1 became negative.

    Takes 4 GB of memory for the tensor, and up to 15 GB for the object.
    """
    done = hvdrun(2, sys.executable, "-c", code, timeout_s=600)
    assert done.returncode == 0, done.stderr


def test_g2_memory_of_many_calls_that_wait():
    """horovod/horovod#1501, #3110: as test_g2_memory_of_many_calls, each call waiting for its end."""
    done = hvdrun(2, sys.executable, "-c", MANY_CALLS, timeout_s=600)
    assert done.returncode == 0, done.stderr
