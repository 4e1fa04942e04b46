"""The structure that the design draws: layers, who may import what, light imports, exported names."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import hvdlite

PACKAGE = Path(hvdlite.__file__).parent
LAYERS = [
    {"_version", "errors", "config", "notes"},
    {"message", "fusion", "handle", "buffer", "backoff", "kernels", "timeline.phase", "timeline.recorder", "timeline.earlier",
     "timeline.tee",
     "timeline.ring", "timeline.export", "timeline.live", "timeline", "bucket_size"},
    {"tensor_queue", "negotiation", "response_cache", "stall"},
    {"control", "dataplane", "compression", "collectives"},
    {"recording", "background", "runtime", "process_set", "process_end", "watch"},
    {"adapters", "submission", "objects", "membership", "optimizer", "compressor", "api", "torch"},
    {"", "as_horovod", "launch", "timeline.cli"},
]
LEVELS = {name: level for level, names in enumerate(LAYERS) for name in names}
MODULES = sorted(PACKAGE.rglob("*.py"))


def _level(module):
    """The layer of a dotted module below hvdlite: that of its longest known prefix."""
    parts = module.split(".") if module else []
    for length in range(len(parts), -1, -1):
        name = ".".join(parts[:length])
        if name in LEVELS and (name or not parts):
            return LEVELS[name]
    raise AssertionError(f"hvdlite.{module} is in no layer: add it to LAYERS")


def _name(path):
    parts = list(path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(path):
    """Every absolute module imported anywhere in the file, ``from a import b`` as both a and a.b."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", MODULES, ids=_name)
def test_modules_import_only_from_their_layer_and_those_before(path):
    own = _level(_name(path))
    for module in _imports(path):
        target = PACKAGE.parent.joinpath(*module.split("."))
        if module.startswith("hvdlite.") and (target.is_dir() or target.with_suffix(".py").exists()):
            inner = module.removeprefix("hvdlite.")
            assert _level(inner) <= own, f"{_name(path)} (layer {own}) imports {inner} (layer {_level(inner)})"


ALLOWED = {
    "torch": {"adapters.torch", *(name for name in map(_name, MODULES) if name.split(".")[0] == "torch")},
    "numba": {"kernels", "control.fast_path", "dataplane.cuda",
              *(name for name in map(_name, MODULES) if name.split(".")[0] == "compression")},
    "cupy": {"adapters.cupy", "dataplane.cuda"},
    "mpi4py": {"control.mpi", "dataplane.mpi", "runtime", "process_end"},
}


@pytest.mark.parametrize("package", ALLOWED)
def test_frameworks_are_imported_in_their_few_files_only(package):
    users = {_name(path) for path in MODULES if any(m.split(".")[0] == package for m in _imports(path))}
    assert users <= ALLOWED[package]


def test_only_config_notes_and_the_launcher_read_the_environment():
    readers = {
        _name(path) for path in MODULES
        if any(isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv")
               for node in ast.walk(ast.parse(path.read_text())))}
    assert {name for name in readers if not name.startswith(("as_horovod", "launch"))} == {"config", "notes"}


def _loaded_by(statement):
    code = f"import sys; {statement}; print(' '.join(sorted(m for m in sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return set(done.stdout.split())


def test_importing_the_package_is_light():
    assert not {"numpy", "mpi4py", "numba", "torch", "cupy"} & _loaded_by("import hvdlite")
    assert not {"numpy", "mpi4py", "numba", "torch", "cupy"} & _loaded_by("import hvdlite.launch.cli")


def test_nothing_of_gpus_is_loaded_before_there_is_a_tensor_on_one():
    loaded = _loaded_by("import hvdlite; hvdlite.init(); hvdlite.allreduce(1.0); hvdlite.shutdown()")
    assert "hvdlite.dataplane.gpus" in loaded
    assert not {"cupy", "hvdlite.dataplane.cuda", "hvdlite.compression.codec_cuda", "torch"} & loaded


def test_importing_the_package_takes_under_50_ms():
    taken = []
    for _ in range(5):
        done = subprocess.run(
            [sys.executable, "-X", "importtime", "-c", "import hvdlite"], capture_output=True, text=True, check=True, timeout=60)
        line = next(line for line in done.stderr.splitlines() if line.rstrip().endswith("| hvdlite"))
        taken.append(int(line.split("|")[1]))
    assert min(taken) < 50_000, f"{min(taken)} us"


def test_all_names_what_can_be_had():
    assert hvdlite.__all__ == sorted(hvdlite.__all__)
    for name in hvdlite.__all__:
        assert getattr(hvdlite, name) is not None
    from hvdlite import api

    assert set(api.__all__) == set(hvdlite._API)
