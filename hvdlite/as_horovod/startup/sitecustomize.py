"""Run by every Python that starts with this directory in PYTHONPATH: ``import horovod`` finds hvdlite.

It leaves no other trace: this directory leaves ``sys.path`` again, the ``sitecustomize`` that it hid is run, and
hvdlite is imported only when ``horovod`` is.
"""

import importlib.util
import os
import sys
from importlib.machinery import PathFinder


class _UntilHorovod:
    """A meta path finder that makes way for hvdlite's at the first import of ``horovod``."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name.partition(".")[0] != "horovod":
            return None
        try:
            from hvdlite.as_horovod import finder
        except ImportError as reason:
            raise ModuleNotFoundError(
                f"import {name}: hvdlite is to take Horovod's place, but {sys.executable} cannot import it ({reason}): "
                "install it for this Python, or start the script with the Python that has it", name=name) from reason
        if cls in sys.meta_path:
            sys.meta_path.remove(cls)
        finder.activate()
        return finder.Finder.find_spec(name, path, target)


def _run_hidden() -> None:
    """Run the ``sitecustomize`` that would have been found without this one."""
    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


_here = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != _here]
if os.environ.get("HVDLITE_AS_HOROVOD") == "1":
    sys.meta_path.insert(0, _UntilHorovod)
_run_hidden()
