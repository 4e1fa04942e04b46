"""What tools/gpu_check.py does with kernels, in the simulator; and that it would notice one that is wrong."""

import sys

import pytest
from fake_gpu import FakeDevice, view
from ranks import ROOT

sys.path.insert(0, str(ROOT / "tools"))
import gpu_check_kernels as kernels

SIZES = (0, 1, 33, 513, 1537)


@pytest.mark.parametrize("number", range(len(kernels.CASES)))
def test_kernels_are_compared(number):
    row = kernels.compare(FakeDevice(), *kernels.CASES[number], SIZES)
    assert row["ok"] and row["result"] == "0 bytes differ", row


def test_plain_kernels_and_rates():
    rows = list(kernels.compare_plain(FakeDevice(), SIZES))
    assert len(rows) == 5 and all(row["ok"] for row in rows), rows
    rows = list(kernels.rates(FakeDevice(), 1 << 13, rounds=1, must_reach=False))
    assert [row["check"].split(",")[0] for row in rows] == ["copy", "encode", "decode", "pack"] and all(row["ok"] for row in rows)


def test_a_wrong_bit_is_found():
    class Broken(FakeDevice):
        def launch(self, kernel, num_warps, *arguments):
            super().launch(kernel, num_warps, *arguments)
            if kernel.__name__ == "decode":

                def flip():
                    out = view(arguments[0], 7, "int64")[4]  # OUT of the first piece
                    view(out, 1, "uint8")[:] ^= 1

                self._put(None, "flip", flip)

    row = kernels.compare(Broken(), *kernels.CASES[0], (513,))
    assert row["ok"] is False and row["result"] == "1 bytes differ"
