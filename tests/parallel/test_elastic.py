"""Elastic training on two ranks that stay: commits, failures on all ranks or one, new starts of the runtime."""

import pytest
import torch

import hvdlite.torch as hvd
from hvdlite.torch.elastic import ElasticSampler, HostUpdateResult, TorchState

RANKS = (2,)


def everywhere(value):
    """A tensor, after a check that all ranks have the same."""
    assert (hvd.allgather(value.detach()[None].clone()) == value).all()
    return value.detach().clone()


def training(distributed=False, dtype=torch.float64):
    torch.manual_seed(hvd.rank())  # ranks start differently: sync has to mend that
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1)).to(dtype)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    if distributed:
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=net.named_parameters())
    return net, optimizer


def step(net, optimizer, indices, distributed=False):
    optimizer.zero_grad()
    data = torch.tensor([[index, index**2 / 10, 1] for index in indices], dtype=torch.float64)
    net(data).square().mean().backward()
    if not distributed:
        for parameter in net.parameters():
            hvd.allreduce_(parameter.grad)
    optimizer.step()


def everything(net, optimizer):
    momenta = [optimizer.state[parameter]["momentum_buffer"] for parameter in net.parameters()]
    return torch.cat([one.detach().flatten() for one in [*net.parameters(), *momenta]])


def test_sampler_and_state_come_back_as_committed():
    r = hvd.rank()
    net, optimizer = training()
    sampler = ElasticSampler(range(10), shuffle=False)
    state = TorchState(net, optimizer, sampler=sampler, epoch=0, batch=0, history=[])
    state.sync()
    assert list(sampler) == [[0, 2, 4, 6, 8], [1, 3, 5, 7, 9]][r]
    batches = [list(sampler)[2 * b : 2 * b + 2] for b in range(2)]
    for state.batch, indices in enumerate(batches):
        step(net, optimizer, indices)
        sampler.record_batch(state.batch, 2)
        state.history.append(indices)
        if state.batch == 0:
            state.commit()
            committed = everywhere(everything(net, optimizer))
    assert sampler.processed_num == 8 and not torch.equal(everything(net, optimizer), committed)
    state.restore()
    assert torch.equal(everything(net, optimizer), committed)
    assert (state.epoch, state.batch, state.history) == (0, 0, batches[:1])
    assert list(sampler) == [[4, 6, 8], [5, 7, 9]][r] and len(sampler) == 3
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(r)
    state.epoch = 10 + r
    state.sync()
    assert torch.equal(everything(net, optimizer), committed)
    assert state.epoch == 10 and list(sampler) == [[4, 6, 8], [5, 7, 9]][r]
    state.restore()  # what was synchronised counts as committed
    assert state.epoch == 10


@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize("failing", [(0, 1), (1,), (0,)], ids=["both", "rank1", "rank0"])
def test_training_through_failures_equals_training_without(distributed, failing):
    def run(fail_at):
        net, optimizer = training(distributed)
        sampler = ElasticSampler(range(24), seed=3)
        starts, planned = [], list(fail_at)

        @hvd.elastic.run
        def train(state):
            starts.append(state.epoch)
            while state.epoch < 2:
                for batch, start in enumerate(range(0, len(sampler), 3)):
                    indices = list(sampler)[start : start + 3]
                    if (state.epoch, batch) in planned and hvd.rank() in failing:
                        planned.remove((state.epoch, batch))
                        optimizer.zero_grad()
                        net(torch.ones(3, 3, dtype=torch.float64)).sum().backward()  # gradients may be on their way
                        raise hvd.HorovodInternalError("as if the network had failed")
                    step(net, optimizer, indices, distributed)
                state.epoch += 1
                sampler.set_epoch(state.epoch)
                state.commit()

        train(TorchState(net, optimizer, sampler=sampler, epoch=0))
        return everywhere(everything(net, optimizer)), starts

    alone, starts = run(fail_at=())
    assert starts == [0]
    through, starts = run(fail_at=((0, 2), (1, 1)))
    assert starts == [0, 0, 1]
    assert torch.equal(through, alone)


def test_a_mismatch_is_retried_on_both_ranks_and_given_up_alike():
    starts = []

    @hvd.elastic.run
    def train(state):
        starts.append(state.epoch)
        shape = 2 if len(starts) == 3 or hvd.rank() == 0 else 3
        return hvd.allreduce(torch.ones(shape), name="x").tolist()

    assert train(TorchState(epoch=hvd.rank())) == [1, 1]
    assert starts == [0, 0, 0]

    starts.clear()

    @hvd.elastic.run
    def never(state):
        starts.append(1)
        hvd.allreduce(torch.ones(2 + hvd.rank()), name="x")

    with pytest.raises(hvd.HorovodInternalError, match="shapes differ"):
        never(TorchState())
    assert len(starts) == 3


def test_a_host_update_interrupts_all_ranks_at_one_commit():
    state = TorchState(epoch=0)
    state.sync()
    interrupted_at = []

    @hvd.elastic.run
    def train(state):
        while state.epoch < 4:
            state.epoch += 1
            if state.epoch == 2 and hvd.rank() == 0 and not interrupted_at:
                state.on_hosts_updated(1.0, HostUpdateResult.added)
            try:
                state.commit()
            except hvd.HostsUpdatedInterrupt:
                interrupted_at.append(state.epoch)
                raise

    train(state)
    assert interrupted_at == [2] and state.epoch == 4


def test_an_error_in_one_ranks_sync_reaches_the_other():
    class Refuses:
        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            if hvd.rank() == 1:
                raise ZeroDivisionError("refused")

    state = TorchState(a=Refuses(), b=Refuses())
    with pytest.raises(ZeroDivisionError if hvd.rank() == 1 else hvd.HorovodInternalError):
        try:
            state.sync()
        finally:
            hvd.shutdown()
    hvd.init()
