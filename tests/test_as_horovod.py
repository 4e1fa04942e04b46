"""Scripts written for Horovod, unmodified: what they import, what they see, where the alias ends."""

import json
import os
import subprocess
import sys

import pytest
from ranks import ROOT, hvdrun

import hvdlite.errors
from hvdlite.as_horovod import finder
from hvdlite.as_horovod.__main__ import command
from hvdlite.launch.environment import with_horovod_alias

PYTHON = sys.executable


def alias(*arguments, options=(), env=None, cwd=None):
    """Run ``python -m hvdlite.as_horovod`` and return what it printed."""
    done = subprocess.run([PYTHON, *options, "-m", "hvdlite.as_horovod", *map(str, arguments)],
                          capture_output=True, text=True, timeout=120, env=env, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout


SEES = """
import json, sys
if __name__ == "__main__":
    import __main__
    print(json.dumps([sys.argv, sys.path, sys.orig_argv, sys.flags.optimize, sorted(vars(__main__)), str(__file__)]))
"""


@pytest.mark.parametrize("options", [(), ("-O",), ("-u", "-W", "ignore")])
@pytest.mark.parametrize("how", ["script", "module"])
def test_a_program_sees_what_it_sees_without(tmp_path, options, how):
    (tmp_path / "my program.py").write_text(SEES)
    (tmp_path / "program.py").write_text(SEES)
    words = {"script": ["my program.py"], "module": ["-m", "program"]}[how] + ["a", "b c", "", "-m", "--x=1"]
    plain = subprocess.run([PYTHON, *options, *words], capture_output=True, text=True, timeout=60, cwd=tmp_path, check=True)
    assert json.loads(alias(*words, options=options, cwd=tmp_path)) == json.loads(plain.stdout)


def test_code_on_the_command_line():
    assert alias("-c", "import horovod, sys; print(horovod.__version__, sys.argv)", "x") == "0.28.1 ['-c', 'x']\n"


def test_pythons_own_options_are_kept():
    name = "hvdlite.as_horovod"
    assert command(["python", "-m", name, "a.py", "x"], ["a.py", "x"]) == ["a.py", "x"]
    assert command(["python", "-u", "-m", name, "a.py"], ["a.py"]) == ["-u", "a.py"]
    assert command(["python", "-um", name, "-c", "1"], ["-c", "1"]) == ["-u", "-c", "1"]
    assert command(["python", "-O", f"-m{name}", "-m", "a", "-m", name], ["-m", "a", "-m", name]) == ["-O", "-m", "a", "-m", name]
    assert command(["python", "-m", "pdb", "-m", name, "a.py"], ["a.py"]) == ["-m", "pdb", "a.py"]


def test_wrong_use_says_what_to_do():
    for options, arguments, says in [((), (), "usage:"), (("-E",), ("a.py",), "leave them out")]:
        argv = [PYTHON, *options, "-m", "hvdlite.as_horovod", *arguments]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
        assert done.returncode == 1 and says in done.stderr and "Traceback" not in done.stderr


def test_there_is_no_horovod_otherwise():
    done = subprocess.run([PYTHON, "-c", "import hvdlite, horovod"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "No module named 'horovod'" in done.stderr
    assert not (set(sys.modules) & {"horovod"}) and finder.Finder not in sys.meta_path


IMPORTS = """
import horovod.torch as hvd
import horovod.torch
from horovod import torch as again
import hvdlite.torch, hvdlite.errors
assert hvd is again is horovod.torch is hvdlite.torch and hvdlite.torch.__spec__.name == "hvdlite.torch"
import horovod.torch.elastic.state, horovod.torch.elastic.sampler
from horovod.torch.elastic import run
from horovod.torch.elastic.state import TorchState
from horovod.torch.elastic.sampler import ElasticSampler
from horovod.torch.functions import broadcast_parameters
from horovod.torch.optimizer import DistributedOptimizer
from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt, HorovodVersionMismatchError
from horovod.common.process_sets import ProcessSet
from horovod.common.elastic import ObjectState, State, run_fn
from horovod.common.util import env
from horovod.common import util
from horovod.runner.util.threads import in_thread
from horovod.runner.common.util.env import get_env_rank_and_size
assert TorchState is hvd.elastic.TorchState and issubclass(TorchState, State) and run is hvd.elastic.run
assert HorovodInternalError is hvdlite.errors.HorovodInternalError is hvd.HorovodInternalError
assert DistributedOptimizer is hvd.DistributedOptimizer

from unittest import mock
with mock.patch("horovod.torch.functions.broadcast_parameters", 1):
    assert hvdlite.torch.functions.broadcast_parameters == 1

import importlib, importlib.util
assert importlib.util.find_spec("horovod.torch").name == "hvdlite.torch"
assert importlib.util.find_spec("horovod.common.util").name == "horovod.common.util"
for name in ("horovod.tensorflow", "horovod.torch.no_such", "horovod.common.no_such", "horovod.spark.torch"):
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        assert "hvdlite" in str(error) and "horovod.torch.elastic" in str(error) and name.startswith(error.name), error
    else:
        raise SystemExit(name)
try:
    horovod.no_such
except AttributeError as error:
    assert "hvdlite" in str(error)
hvd.init()
assert (hvd.rank(), hvd.size()) == get_env_rank_and_size() == (0, 1)
print("done")
"""


def test_what_scripts_import():
    assert alias("-c", IMPORTS) == "done\n"


def test_every_offered_module_can_be_imported():
    code = f"import importlib\nfor name in {list(finder.OFFERED)}: importlib.import_module(name)\nprint('done')"
    assert alias("-c", code) == "done\n"


UTIL = """
import os, threading
from horovod.common.util import (_cache, env, extension_available, gloo_built, is_iterable, is_version_greater_equal_than,
                                 mpi_built, num_rank_is_power_2, split_list)
from horovod.runner.util.threads import in_thread
os.environ["HOROVOD_A"] = "before"
try:
    with env(HOROVOD_A="1", HOROVOD_B="2", HOROVOD_C=None):
        assert (os.environ["HOROVOD_A"], os.environ["HOROVOD_B"]) == ("1", "2") and "HOROVOD_C" not in os.environ
        del os.environ["HOROVOD_B"]
        raise KeyError
except KeyError:
    pass
assert os.environ["HOROVOD_A"] == "before" and "HOROVOD_B" not in os.environ
assert mpi_built() and not gloo_built() and extension_available("torch") and not extension_available("mxnet")
assert [num_rank_is_power_2(n) for n in (0, 1, 2, 3, 4, 6, 8)] == [False, True, True, False, True, False, True]
assert split_list(list(range(7)), 3) == [[0, 1, 2], [3, 4], [5, 6]]
assert is_iterable("a") and not is_iterable(1)
assert is_version_greater_equal_than("1.10.0", "1.9.0") and not is_version_greater_equal_than("1.9", "1.10.0")
count = [0]
@_cache
def counted(a):
    count[0] += 1
    return count[0]
assert counted(1) == counted(1) == 1 and counted(2) == 2
ran = []
thread = in_thread(ran.append, (1,), name="mine")
thread.join(10)
assert ran == [1] and thread.daemon and thread.name == "mine"
in_thread(lambda: 1 / 0, silent=True).join(10)
try:
    in_thread(ran.append, [1])
except ValueError as error:
    assert "tuple" in str(error)
print("done")
"""


def test_small_helpers_of_tests():
    assert alias("-c", UTIL) == "done\n"


SPAWNS = """
import multiprocessing, subprocess, sys
def child(queue):
    import horovod.torch as hvd
    queue.put(hvd.__name__)
if __name__ == "__main__":
    spawn = multiprocessing.get_context("spawn")
    queue = spawn.Queue()
    process = spawn.Process(target=child, args=(queue,))
    process.start()
    print(queue.get(timeout=60))
    process.join(60)
    print(subprocess.run([sys.executable, "-c", "import horovod; print(horovod.__version__)"],
                         capture_output=True, text=True, check=True).stdout.strip())
"""


def test_processes_that_a_script_starts(tmp_path):
    (tmp_path / "spawns.py").write_text(SPAWNS)
    assert alias(tmp_path / "spawns.py").split() == ["hvdlite.torch", "0.28.1"]


def test_the_sitecustomize_it_hides_is_run(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import builtins; builtins.hidden = __file__")
    code = "import sys, horovod; print(hidden, sys.modules['sitecustomize'].__file__, [p for p in sys.path if 'startup' in p])"
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}"}
    file = f"{tmp_path}/sitecustomize.py"
    assert alias("-c", code, env=env).split() == [file, file, "[]"]


def test_it_can_be_switched_off_and_costs_nothing_until_horovod_is_imported():
    code = "import sys; assert not [m for m in sys.modules if m.startswith('hvdlite.')], sys.modules; import horovod"
    environment = with_horovod_alias(os.environb)
    subprocess.run([PYTHON, "-c", code], env=environment, check=True, timeout=60)
    done = subprocess.run([PYTHON, "-c", code], env={**environment, b"HVDLITE_AS_HOROVOD": b""}, capture_output=True, timeout=60)
    assert b"No module named 'horovod'" in done.stderr


def test_a_python_without_hvdlite_is_told(tmp_path):
    (tmp_path / "hvdlite.py").write_text("raise ImportError('not here')")
    environment = with_horovod_alias({**os.environb, b"PYTHONPATH": os.fsencode(tmp_path)})
    done = subprocess.run(
        [PYTHON, "-c", "import horovod"], env=environment, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 1 and "cannot import it (not here)" in done.stderr and PYTHON in done.stderr


def test_the_environment_of_the_alias():
    plain = with_horovod_alias({b"A": b"1"})
    assert plain[b"A"] == b"1" and plain[b"HVDLITE_AS_HOROVOD"] == b"1"
    assert os.path.isfile(os.path.join(plain[b"PYTHONPATH"], b"sitecustomize.py"))
    assert with_horovod_alias({b"PYTHONPATH": b"/a:/b"})[b"PYTHONPATH"] == plain[b"PYTHONPATH"] + b":/a:/b"
    assert with_horovod_alias({b"PYTHONPATH": b""})[b"PYTHONPATH"] == plain[b"PYTHONPATH"]  # empty is not the directory "."


TESTS = """
import unittest
import torch
import horovod.torch as hvd
from horovod.common.util import env

class Tests(unittest.TestCase):
    def test_sum(self):
        hvd.init()
        assert hvd.allreduce(torch.ones(3), op=hvd.Sum).tolist() == [hvd.size()] * 3 and hvd.size() == 2

    def test_elastic(self):
        hvd.init()
        state = hvd.elastic.TorchState(batch=hvd.rank())
        state.sync()
        assert state.batch == 0
"""


def test_a_test_file_under_hvdrun(tmp_path):
    file = tmp_path / "test_of_horovod.py"
    file.write_text(TESTS)
    done = hvdrun(2, PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider", file, options=["--as-horovod"])
    assert done.returncode == 0 and done.stdout.count("2 passed") == 2, done.stdout + done.stderr


def test_without_the_option_hvdrun_offers_none():
    done = hvdrun(1, PYTHON, "-c", "import horovod")
    assert done.returncode == 1 and "No module named 'horovod'" in done.stderr


def test_exceptions_keep_their_signatures():
    namespace = {}
    exec((ROOT / "hvdlite/as_horovod/modules/exceptions.py").read_text(), namespace)
    assert namespace["HorovodInternalError"] is hvdlite.errors.HorovodInternalError
    error = namespace["HorovodVersionMismatchError"]("torch", "2.1", "2.0")
    assert isinstance(error, ImportError) and (error.name, error.version, error.installed_version) == ("torch", "2.1", "2.0")


RESNET = """
import json
import torch
from torch import nn
import horovod.torch as hvd

hvd.init()
torch.set_num_threads(1)
torch.manual_seed(1 + hvd.rank())  # rank 0's parameters count
torch.set_default_dtype(torch.float64)


class Bottleneck(nn.Module):
    def __init__(self, width_in, width, stride):
        super().__init__()
        wide = 4 * width
        layers = []
        for one, other, size, step in [(width_in, width, 1, 1), (width, width, 3, stride), (width, wide, 1, 1)]:
            layers += [nn.Conv2d(one, other, size, step, size // 2, bias=False), hvd.SyncBatchNorm(other), nn.ReLU()]
        nn.init.zeros_(layers[-2].weight)  # every block begins as its shortcut, or 20 steps would be chaos
        self.body = nn.Sequential(*layers[:-1])
        self.shortcut = nn.Sequential()
        if stride != 1 or width_in != wide:
            self.shortcut = nn.Sequential(nn.Conv2d(width_in, wide, 1, stride, bias=False), hvd.SyncBatchNorm(wide))

    def forward(self, x):
        return torch.relu(self.body(x) + self.shortcut(x))


layers = [nn.Conv2d(3, 4, 7, 2, 3, bias=False), hvd.SyncBatchNorm(4), nn.ReLU()]
width_in = 4
for width, count, stride in [(2, 3, 1), (4, 4, 2), (8, 6, 2), (16, 3, 2)]:
    for number in range(count):
        layers.append(Bottleneck(width_in, width, stride if number == 0 else 1))
        width_in = 4 * width
model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width_in, 10))

optimizer = torch.optim.SGD(model.parameters(), lr=0.002, momentum=0.9, weight_decay=1e-4)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)

losses = []
for step in range(20):
    generator = torch.Generator().manual_seed(step)
    images = torch.randn(16, 3, 32, 32, generator=generator)[hvd.rank()::hvd.size()]
    labels = torch.randint(0, 10, (16,), generator=generator)[hvd.rank()::hvd.size()]
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    losses.append(hvd.allreduce(loss.detach(), name="loss").item())
if hvd.rank() == 0:
    print(json.dumps({"tensors": len(list(model.parameters())), "size": hvd.size(), "losses": losses}))
"""


def test_a_resnet_of_161_tensors_trains_as_in_a_single_process(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(RESNET)
    alone = json.loads(alias(script))
    done = hvdrun(2, PYTHON, script, options=["--as-horovod"])
    assert done.returncode == 0, done.stderr
    together = json.loads(done.stdout)
    assert (alone["tensors"], alone["size"], together["size"]) == (161, 1, 2)
    assert together["losses"] == pytest.approx(alone["losses"], rel=1e-5) and len(alone["losses"]) == 20
    assert min(alone["losses"]) < alone["losses"][0]
