"""Elastic training: state that is committed and brought back, and a loop that starts again after a failure.

Without an elastic launcher the ranks stay the same ones: after a HorovodInternalError all of them go back to the last
commit and start again. What a launcher needs to add and remove ranks is in place: ``State.on_hosts_updated`` takes its
news, ``commit`` and ``check_host_updates`` interrupt all ranks at the same point, ``run`` starts the runtime anew.
"""

from __future__ import annotations

from hvdlite.torch.elastic.handlers import get_handler_registry, set_handler_registry
from hvdlite.torch.elastic.loop import run, run_fn
from hvdlite.torch.elastic.sampler import ElasticSampler
from hvdlite.torch.elastic.state import HostUpdateResult, ObjectState, State, TorchState

__all__ = [
    "ElasticSampler", "HostUpdateResult", "ObjectState", "State", "TorchState", "get_handler_registry", "run", "run_fn",
    "set_handler_registry",
]
