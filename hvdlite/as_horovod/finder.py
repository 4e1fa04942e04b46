"""Finder: what ``import horovod...`` gets.

Modules that hvdlite has under the same names are *the same module objects*, so classes are identical and patches take
effect; small ones that only Horovod has are files of ``modules/``.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location, spec_from_loader
from types import ModuleType

#: Everything that is offered: a module of hvdlite, or a file of ``modules/`` that is run under the Horovod name.
OFFERED = {
    "horovod": "horovod.py",
    "horovod.common": "empty.py",
    "horovod.common.elastic": "hvdlite.torch.elastic",
    "horovod.common.exceptions": "exceptions.py",
    "horovod.common.process_sets": "hvdlite.process_set",
    "horovod.common.util": "util.py",
    "horovod.runner": "runner.py",
    "horovod.runner.common": "empty.py",
    "horovod.runner.common.util": "empty.py",
    "horovod.runner.common.util.env": "env.py",
    "horovod.runner.util": "empty.py",
    "horovod.runner.util.threads": "threads.py",
    "horovod.torch": "hvdlite.torch",
    "horovod.torch.compression": "hvdlite.torch.compression",
    "horovod.torch.elastic": "hvdlite.torch.elastic",
    "horovod.torch.elastic.sampler": "hvdlite.torch.elastic.sampler",
    "horovod.torch.elastic.state": "hvdlite.torch.elastic.state",
    "horovod.torch.functions": "hvdlite.torch.functions",
    "horovod.torch.mpi_ops": "hvdlite.torch.mpi_ops",
    "horovod.torch.optimizer": "hvdlite.torch.optimizer",
    "horovod.torch.sync_batch_norm": "hvdlite.torch.sync_batch_norm",
}
_MODULES = os.path.join(os.path.dirname(os.path.abspath(__file__)), "modules")


def activate() -> None:
    """Make ``import horovod`` find hvdlite in this process, even where Horovod is installed."""
    if Finder not in sys.meta_path:
        sys.meta_path.insert(0, Finder)


class Finder:
    """A meta path finder; the class itself goes into ``sys.meta_path``."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Raises: ModuleNotFoundError for what Horovod may have and hvdlite does not offer."""
        if name.partition(".")[0] != "horovod":
            return None
        offered = OFFERED.get(name)
        if offered is None:
            raise ModuleNotFoundError(
                f"import {name}: hvdlite, which runs this script in place of Horovod, has no such module: "
                f"it offers {', '.join(name for name, module in OFFERED.items() if module != 'empty.py')}", name=name)
        is_package = any(other.startswith(f"{name}.") for other in OFFERED)
        if not offered.endswith(".py"):
            return spec_from_loader(name, _SameModule(offered), is_package=is_package)
        spec = spec_from_file_location(name, os.path.join(_MODULES, offered))
        if spec is not None and is_package:
            spec.submodule_search_locations = []  # nothing but this finder finds what is in it
        return spec


class _SameModule(Loader):
    """A loader that gives a module of hvdlite a second name."""

    def __init__(self, own_name: str) -> None:
        self._own_name = own_name

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._own_name)
        self._own_spec = module.__spec__  # the import system overwrites it with ``spec``
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._own_spec
