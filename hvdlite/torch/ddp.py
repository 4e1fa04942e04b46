"""A communication hook: torch's DistributedDataParallel computes and buckets gradients, hvdlite averages them.

*Threads*: torch calls the hook on the thread that runs backward, which goes on at once; hvdlite's background thread
completes the Future that torch waits for when backward has ended.
"""

# No "from __future__ import annotations": torch compares the hook's annotations with the types themselves.

import weakref

import torch
import torch.distributed as dist
from torch.utils.weak import WeakTensorKeyDictionary

from hvdlite import api
from hvdlite.errors import HorovodInternalError
from hvdlite.handle import Handle
from hvdlite.process_set import ProcessSet
from hvdlite.runtime import Runtime, default_runtime

#: Names of buckets in each runtime, by the bucket's first parameter; goes with the runtime, which knows no tensors.
_names: "weakref.WeakKeyDictionary[Runtime, WeakTensorKeyDictionary]" = weakref.WeakKeyDictionary()


def ddp_hook(state: ProcessSet | None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket's gradients over the ranks: ``model.register_comm_hook(state=None, hook=ddp_hook)``.

    ``state`` is the process set of the ranks that hold the model, None for all of them. The model is a
    DistributedDataParallel over the same ranks in the same order; its own process group still sends the initial
    parameters and the buffers. Half-precision gradients are summed in float32.
    Raises: where the exchange fails, ``backward`` raises its HorovodInternalError.
    """
    gradients = bucket.buffer()
    handle = api.allreduce_async_(gradients, op=api.Average, name=_name(bucket, state), process_set=state)
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future(
        devices=[gradients.device] if gradients.is_cuda else None)
    handle.add_done_callback(lambda done: _hand_over(done, future, gradients))
    try:
        # torch would turn the error in the Future into its own: waiting here, before it does, keeps the type.
        torch.autograd.Variable._execution_engine.queue_callback(handle.wait)
    except RuntimeError:
        pass  # not in backward: a rank that takes part with zeros, within DistributedDataParallel.join()
    return future


def _hand_over(handle: Handle, future: "torch.futures.Future[torch.Tensor]", gradients: torch.Tensor) -> None:
    try:
        handle.wait()
    except HorovodInternalError as error:
        future.set_exception(error)
    else:
        future.set_result(gradients)


def _name(bucket: dist.GradBucket, process_set: ProcessSet | None) -> str:
    """The bucket's name: that of its first parameter, which no other bucket in flight holds, of whatever model.

    So torch may build its buckets anew, as it does after the first step. A parameter gets its name when first seen
    as the first of a bucket, which happens in the same order on all ranks: torch hands the buckets of a model over in order.
    """
    runtime = default_runtime()
    names = _names.setdefault(runtime, WeakTensorKeyDictionary())
    first = bucket.parameters()[0]
    name = names.get(first)
    if name is None:
        name = names[first] = runtime.label("ddp", runtime.members(process_set))
    return str(name)
