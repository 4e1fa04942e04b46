"""Elastic state, sampler and loop in one process; tests/parallel/test_elastic.py has several ranks."""

import sys
import time

import pytest
import torch
from ranks import hvdrun

import hvdlite.torch as hvd
from hvdlite.torch.elastic import (
    ElasticSampler,
    HostUpdateResult,
    ObjectState,
    State,
    TorchState,
    get_handler_registry,
    run_fn,
    set_handler_registry,
)
from hvdlite.torch.elastic import sampler as sampler_module
from hvdlite.torch.elastic.handlers import StateHandler


@pytest.fixture(autouse=True)
def job():
    hvd.init()
    yield
    hvd.shutdown()


# The sampler.


@pytest.fixture
def place(monkeypatch):
    """Sets rank and size as the sampler sees them."""

    def set_place(rank, size):
        monkeypatch.setattr(sampler_module.api, "rank", lambda: rank)
        monkeypatch.setattr(sampler_module.api, "size", lambda: size)

    return set_place


def samplers(place, size, count, processed=0, **arguments):
    found = []
    for rank in range(size):
        place(rank, size)
        sampler = ElasticSampler(range(count), **arguments)
        sampler.load_state_dict({"epoch": 0, "processed_num": processed})
        found.append(sampler)
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("count, processed", [(0, 0), (1, 0), (10, 0), (10, 7), (10, 9), (10, 10), (10, 12), (21, 0)])
def test_all_samples_are_dealt_and_all_ranks_get_equally_many(place, size, count, processed):
    dealt = [list(one) for one in samplers(place, size, count, processed, shuffle=False)]
    rest = list(range(processed, count))
    lengths = {len(one) for one in samplers(place, size, count, processed)}
    assert lengths == {-(-len(rest) // size)} == {len(one) for one in dealt}
    flat = [one for turn in zip(*dealt, strict=True) for one in turn]
    assert flat[: len(rest)] == rest
    assert len(flat) - len(rest) < size and set(flat) <= set(rest)


@pytest.mark.parametrize("first, second", [(2, 3), (3, 2), (4, 1), (1, 4)])
def test_an_epoch_goes_on_with_other_ranks_and_loses_or_repeats_nothing(place, first, second):
    before, seen = samplers(place, first, 24, seed=5), []
    for one in before:
        seen += list(one)[:4]
        for batch in range(2):
            one.record_batch(batch, batch_size=2)
    assert {one.processed_num for one in before} == {4 * first}
    after = samplers(place, second, 24, before[0].state_dict()["processed_num"], seed=5)
    for one in after:
        seen += list(one)
    assert sorted(seen) == list(range(24)) or (24 - 4 * first) % second


def test_epochs_differ_in_order_and_seeds_too():
    sampler = ElasticSampler(range(50))
    orders = [list(sampler)]
    for epoch in (1, 2):
        sampler.record_batch(0, 10)
        sampler.set_epoch(epoch)
        assert sampler.processed_num == 0
        orders.append(list(sampler))
    assert orders[0] != orders[1] != orders[2] and sorted(orders[2]) == list(range(50))
    assert list(ElasticSampler(range(50), seed=1)) == orders[1]  # seed + epoch


def test_recording_does_not_disturb_an_iteration():
    sampler = ElasticSampler(range(6), shuffle=False)
    seen = []
    for index in sampler:
        seen.append(index)
        sampler.record_batch(0, 1)
    assert seen == [0, 1, 2, 3, 4, 5] and len(sampler) == 6
    sampler.reset()
    assert len(sampler) == 0 and list(sampler) == []


# State.


def object_state(**values):
    return ObjectState(lambda obj: obj, lambda: 0, **values)


def test_objects_come_back_as_committed_each_time():
    shared = [1]
    state = object_state(epoch=1, a=shared, b=shared)
    for _ in range(2):
        state.epoch = 2
        state.a.append(2)
        state.restore()
        assert state.epoch == 1 and state.a == [1] and state.a is state.b
    state.a.append(3)
    state.commit()
    state.a.clear()
    state.restore()
    assert state.a == [1, 3]


def test_sync_sends_what_is_now_and_saves_it():
    sent = []
    state = ObjectState(lambda obj: sent.append(obj) or {"epoch": 9}, lambda: 1, epoch=1)
    state.epoch = 5
    state.sync()
    assert sent == [{"epoch": 5}] and state.epoch == 9
    state.epoch = 10
    state.restore()
    assert state.epoch == 9


def test_what_cannot_be_kept_is_refused_by_name():
    with pytest.raises(ValueError, match="'reader': a generator cannot be copied"):
        object_state(reader=(x for x in "ab"))
    for kind in (object_state, TorchState):
        with pytest.raises(ValueError, match=r"'commit'.*rename"):
            kind(commit=3)


def test_host_updates_interrupt_once_and_say_whether_to_sync():
    state = object_state(epoch=0)
    state.commit()
    for results, skip_sync in [
        ([HostUpdateResult.added], False), ([HostUpdateResult.removed], True),
        ([HostUpdateResult.removed, HostUpdateResult.added], False),
    ]:
        for result in results:
            state.on_hosts_updated(time.monotonic(), result)
        state.epoch += 1
        with pytest.raises(hvd.HostsUpdatedInterrupt) as caught:
            state.commit()
        assert caught.value.skip_sync is skip_sync
        state.check_host_updates()
    state.on_hosts_updated(1e-9, HostUpdateResult.added)  # older than what is known
    state.check_host_updates()
    state.restore()
    assert state.epoch == 3  # saved before the interrupt


def test_a_reset_forgets_old_news_and_calls_back():
    calls = []
    state = object_state()
    state.register_reset_callbacks([lambda: calls.append("a"), lambda: calls.append("b")])
    state.on_hosts_updated(time.monotonic(), HostUpdateResult.added)
    state.on_reset()
    state.check_host_updates()
    assert calls == ["a", "b"]


# TorchState.


def training(dtype=torch.float32, kind=torch.optim.SGD, **options):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1)).to(dtype)
    optimizer = kind(net.parameters(), lr=0.1, **options)

    def step():
        optimizer.zero_grad()
        net(torch.randn(8, 3, dtype=dtype)).square().sum().backward()
        optimizer.step()

    return net, optimizer, step


def bits(net, optimizer):
    state = [value for values in optimizer.state.values() for value in values.values() if torch.is_tensor(value)]
    return [(value.dtype, value.clone()) for value in [*net.state_dict().values(), *state]]


def same(one, other):
    return len(one) == len(other) and all(a[0] == b[0] and torch.equal(a[1], b[1]) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("kind, options", [
    (torch.optim.SGD, {"momentum": 0.9}), (torch.optim.Adam, {"amsgrad": True}), (torch.optim.RMSprop, {"centered": True}),
])
def test_restore_is_bitwise_every_time(kind, options):
    net, optimizer, step = training(kind=kind, **options)
    state = TorchState(net, optimizer, epoch=0)
    step()
    state.epoch = 1
    state.commit()
    committed = bits(net, optimizer)
    for _ in range(2):
        for _ in range(3):
            step()
        state.epoch = 5
        optimizer.param_groups[0]["lr"] = 9.0
        assert not same(bits(net, optimizer), committed)
        state.restore()
        assert same(bits(net, optimizer), committed)
        assert state.epoch == 1 and optimizer.param_groups[0]["lr"] == 0.1
        assert all(parameter.grad is None for parameter in net.parameters())


def test_restore_keeps_the_dtype_of_an_optimizers_state():
    net, optimizer, step = training(torch.bfloat16, momentum=0.9)
    step()
    for values in optimizer.state.values():  # an optimizer that keeps float32 beside 16-bit parameters
        values["momentum_buffer"] = values["momentum_buffer"].float() + 1e-4
    state = TorchState(net, optimizer)
    committed = bits(net, optimizer)
    for values in optimizer.state.values():
        values["momentum_buffer"] += 1
    state.restore()
    assert same(bits(net, optimizer), committed)


def test_whatever_has_a_state_dict_is_restored_in_place():
    net, optimizer, step = training()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    sampler = ElasticSampler(range(10))
    state = TorchState(net, optimizer, scheduler=scheduler, sampler=sampler, second=torch.nn.Linear(1, 1))
    for _ in range(2):
        step()
        scheduler.step()
        sampler.record_batch(0, 3)
        torch.nn.init.zeros_(state.second.weight)
        state.restore()
        assert state.scheduler is scheduler and scheduler.last_epoch == 0 and optimizer.param_groups[0]["lr"] == 0.1
        assert sampler.processed_num == 0 and len(sampler) == 10 and state.second.weight.abs().sum() > 0
    state.sync()
    assert state.scheduler is scheduler and state.sampler is sampler


def test_setting_an_attribute_saves_its_new_value():
    state = TorchState(torch.nn.Linear(1, 1))
    other = torch.nn.Linear(1, 1)
    weight = other.weight.detach().clone()
    state.model = other
    torch.nn.init.zeros_(other.weight)
    state.restore()
    assert state.model is other and torch.equal(other.weight, weight)
    assert state.optimizer is None
    state.optimizer = optimizer = torch.optim.SGD(other.parameters(), lr=0.5)
    optimizer.param_groups[0]["lr"] = 3.0
    state.restore()
    assert state.optimizer is optimizer and optimizer.param_groups[0]["lr"] == 0.5


def test_a_loss_with_its_graph_is_kept_as_a_value():
    net, _, _ = training()
    state = TorchState(net, loss=None)
    state.loss = net(torch.ones(2, 3)).sum()
    value = state.loss.item()
    state.commit()
    state.loss = None
    state.restore()
    assert state.loss.item() == value and not state.loss.requires_grad


def test_handlers_of_ones_own():
    class Counter:
        def __init__(self):
            self.count = 0

    class CounterHandler(StateHandler):
        def __init__(self, value):
            super().__init__(value)
            self.save()

        def save(self):
            self.saved = self.value.count

        def restore(self):
            self.value.count = self.saved

        def sync(self):
            self.value.count = 100

    before = list(get_handler_registry())
    set_handler_registry([(Counter, CounterHandler), *get_handler_registry()])
    try:
        counter = Counter()
        state = TorchState(counter=counter)
    finally:
        set_handler_registry(before)
    counter.count = 5
    state.restore()
    assert counter.count == 0
    state.sync()
    state.on_reset()
    assert state.counter is counter and counter.count == 100


# The loop.


class Recorded(State):
    """Writes down what is done to it."""

    def __init__(self):
        super().__init__(lambda obj: obj, lambda: 0)
        self.calls = []

    def __getattribute__(self, name):
        if name in ("save", "restore", "sync", "reset"):
            return lambda: self.calls.append(name)
        return super().__getattribute__(name)


def loop(state, *outcomes):
    """Run a function that raises or returns the outcomes one after the other; a list is what to do first."""
    remaining = list(outcomes)

    def train(state, word):
        state.calls.append(word)
        outcome = remaining.pop(0)
        if isinstance(outcome, tuple):
            outcome[0]()
            outcome = outcome[1]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    return run_fn(train, lambda: state.calls.append("restart"))(state, "train")


def test_a_failure_restores_restarts_and_synchronises():
    state = Recorded()
    assert loop(state, hvd.HorovodInternalError("x"), 7) == 7
    assert state.calls == ["sync", "train", "restart", "restore", "reset", "sync", "train"]


@pytest.mark.parametrize("skip_sync, then", [(True, []), (False, ["sync"])])
def test_a_host_update_keeps_the_state(skip_sync, then):
    state = Recorded()
    assert loop(state, hvd.HostsUpdatedInterrupt(skip_sync), 7) == 7
    assert state.calls == ["sync", "train", "restart", "reset", *then, "train"]


def test_skipping_one_sync_does_not_skip_the_next():
    state = Recorded()
    loop(state, hvd.HostsUpdatedInterrupt(True), hvd.HorovodInternalError("x"), 7)
    assert state.calls.count("sync") == 2


def test_a_lasting_failure_ends_the_loop_with_its_own_error(caplog):
    state = Recorded()
    errors = [hvd.HorovodInternalError(f"error {number}") for number in range(9)]
    with pytest.raises(hvd.HorovodInternalError, match="error 2"):
        loop(state, *errors)
    assert state.calls.count("train") == 3 and "with no commit in between: giving up" in caplog.text


def test_commits_are_progress():
    state = Recorded()
    failing = [(state.commit, hvd.HorovodInternalError("x"))] * 9
    assert loop(state, *failing, 7) == 7


def test_other_errors_are_the_callers():
    state = Recorded()
    with pytest.raises(ZeroDivisionError):
        loop(state, ZeroDivisionError())
    assert state.calls == ["sync", "train"]


def test_the_runtime_is_started_anew_and_arguments_are_passed():
    seen = []

    @hvd.elastic.run
    def train(state, a, *, b):
        """Doc."""
        seen.append((state.epoch, a, b, hvd.allreduce(torch.ones(1), name="x").item()))
        if len(seen) == 1:
            state.epoch = 9
            raise hvd.HorovodInternalError("once")
        return "done"

    assert train.__doc__ == "Doc." and train(TorchState(epoch=3), 1, b=2) == "done"
    assert seen == [(3, 1, 2, 1.0)] * 2 and hvd.is_initialized()


@pytest.mark.parametrize("fails", [
    "raise ZeroDivisionError('in sync')", "os._exit(5)", "sys.exit(6)", "sys.exit(0)", "time.sleep(3); sys.exit(0)"])
def test_a_rank_that_is_gone_for_good_ends_the_job(fails):
    code = f"""
import os, sys, time, hvdlite.torch as hvd
hvd.init()
class Broken(hvd.elastic.State):
    def save(self): pass
    def restore(self): pass
    def sync(self):
        if hvd.rank() == 1: {fails}
        hvd.broadcast_object(1, name="state")
hvd.elastic.run(lambda state: None)(Broken(hvd.broadcast_object, hvd.rank))
"""
    started = time.monotonic()
    done = hvdrun(2, sys.executable, "-c", code, timeout_s=60)
    assert done.returncode not in (0, None) and "rank 1" in done.stderr, done.stderr
    assert time.monotonic() - started < 30
