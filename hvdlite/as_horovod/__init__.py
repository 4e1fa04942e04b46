"""Scripts written for Horovod, run as they are: ``python -m hvdlite.as_horovod train.py``, ``hvdrun --as-horovod``.

Both start Python with ``startup/`` on its path, whose ``sitecustomize`` calls ``activate``; so processes that the
script starts find ``horovod`` too. Where it is not activated there is no ``horovod``.
"""

from __future__ import annotations

from hvdlite.as_horovod.finder import activate

__all__ = ["activate"]
