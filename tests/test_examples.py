"""The examples, as a user runs them."""

import re
import subprocess
import sys

import pytest
from ranks import ROOT, hvdrun


def accuracy(text):
    return float(re.search(r"validation accuracy ([0-9.]+) after", text).group(1))


@pytest.mark.parametrize("example, epochs", [("numpy_digits.py", 20), ("torch_digits.py", 10)])
def test_two_ranks_learn(example, epochs):
    done = hvdrun(2, sys.executable, ROOT / "examples" / example, "--epochs", epochs)
    assert done.returncode == 0, done.stderr
    assert accuracy(done.stdout) >= 0.95
    assert done.stdout.count("samples/s") == epochs


def test_alone_and_help():
    argv = [sys.executable, ROOT / "examples" / "numpy_digits.py"]
    done = subprocess.run([*argv, "--epochs", "20"], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0 and accuracy(done.stdout) >= 0.95, done.stderr
    assert "--seed" in subprocess.run([*argv, "--help"], capture_output=True, text=True, timeout=60).stdout


def test_a_batch_that_cannot_be_shared_is_refused():
    done = hvdrun(2, sys.executable, ROOT / "examples" / "numpy_digits.py", "--batch-size", 63)
    assert done.returncode == 1 and "multiple of 2" in done.stderr
