"""How large buckets are: what is set is obeyed, what is measured is kept, what --autotune does can be replayed."""

import json
import os
import random
import sys

import pytest
from ranks import hvdrun

from hvdlite import bucket_size
from hvdlite.bucket_size import CANDIDATES, SAMPLE_STEPS, Cache, LiveTuner, Tuner, probe, replay
from hvdlite.config import Config
from hvdlite.errors import InvalidRequestError

MODEL = 1 << 30


def tuned(start, cost, noise=0.0, seed=0):
    """A tuner that was fed until it chose, and the steps that took."""
    rng, tuner, steps = random.Random(seed), Tuner(start, MODEL), 0
    while not tuner.why:
        tuner.add([cost(tuner.size) * (1 + noise * rng.random()) for _ in range(SAMPLE_STEPS - 1)])
        steps += SAMPLE_STEPS
    return tuner, steps


@pytest.mark.parametrize("best", CANDIDATES)
@pytest.mark.parametrize("start", [CANDIDATES[0], CANDIDATES[-1], 123_456])
def test_the_tuner_finds_the_best_size_from_any_start_within_200_steps(start, best):
    places = {size: place for place, size in enumerate(CANDIDATES)}
    tuner, steps = tuned(start, lambda size: 1 + abs(places.get(size, 9) - places[best]))
    assert tuner.size == best and steps <= 200


@pytest.mark.parametrize("seed", range(20))
def test_noise_costs_at_most_a_tenth(seed):
    costs = {size: 1 + 0.08 * place for place, size in enumerate(CANDIDATES)}
    tuner, _ = tuned(CANDIDATES[-1], costs.__getitem__, noise=0.3, seed=seed)
    assert costs[tuner.size] <= 1.1


def test_the_tuner_tries_no_size_that_makes_one_bucket_as_a_smaller_one_does():
    tuner = Tuner(CANDIDATES[0], 3 << 20)
    tried = {tuner.size}
    while not tuner.why:
        tuner.add([1.0])
        tried.add(tuner.size)
    assert max(tried) == 4 << 20
    with pytest.raises(InvalidRequestError, match="chosen"):
        tuner.add([1.0])


def test_a_log_replays_and_a_changed_one_does_not(tmp_path, capsys):
    rng, log = random.Random(1), tmp_path / "tune.log"
    live = LiveTuner(Tuner(CANDIDATES[0], MODEL), lambda own: [rng.random() for _ in own], bucket_size.appender(str(log), "net"))
    sizes = []
    while live.choice is None:
        sizes.append(live.step())
    lines = log.read_text().splitlines()
    assert replay(lines)["net"].size == live.choice[0] == json.loads(lines[-1])["bytes"]
    assert sum(size is not None for size in sizes) >= len(CANDIDATES) - 1
    assert bucket_size.main([str(log)]) == 0 and "MiB" in capsys.readouterr().out
    samples = [json.loads(line) for line in lines]
    for other in CANDIDATES:
        if other != live.choice[0]:
            samples[-1]["bytes"] = other
            log.write_text("\n".join(map(json.dumps, samples)))
            assert bucket_size.main([str(log)]) == 1 and f"line {len(lines)}" in capsys.readouterr().err
    log.write_text("")
    assert bucket_size.main([str(log)]) == 1


class Clock:
    """Stands in for the time module: time passes only where a pass takes some."""

    now_s = 0.0

    def perf_counter(self):
        return self.now_s


def probed(monkeypatch, seconds):
    clock, made = Clock(), []
    monkeypatch.setattr(bucket_size, "time", clock)

    def make(size):
        made.append(size)

        def one():
            clock.now_s += seconds(size)

        return one

    return probe(make, list, 4 << 20, 16 << 20), made


def test_the_probe_takes_what_is_clearly_faster(monkeypatch):
    (size, why), _ = probed(monkeypatch, lambda size: 0.01 if size == 1 << 20 else 0.02)
    assert size == 1 << 20 and "1 MiB 10.00 ms" in why


def test_the_probe_keeps_the_default_where_nothing_is_gained(monkeypatch):
    assert probed(monkeypatch, lambda size: 0.0196 if size == 1 << 20 else 0.02)[0][0] == 4 << 20


def test_the_probe_stops_at_once_on_a_slow_link(monkeypatch):
    (size, why), made = probed(monkeypatch, lambda size: 0.2)
    assert size == 4 << 20 and made == [4 << 20] and "link" in why


def test_the_cache_keeps_what_is_put(tmp_path, caplog):
    cache = Cache(Config(cache_dir=str(tmp_path / "new")))
    assert cache.get("a") is None
    cache.put("a", 7, "probe", "faster")
    cache.put("b", 8, "autotune", "faster")
    assert Cache(Config(cache_dir=str(tmp_path / "new"))).get("a") == 7 and cache.get("b") == 8
    assert os.listdir(tmp_path / "new") == ["bucket_sizes.json"] and not caplog.records
    for content in ("{", "[]", '{"a": 3}', '{"a": {"bytes": "many"}}', '{"a": {"bytes": -1}}'):
        cache.path.write_text(content)
        assert cache.get("a") is None
    cache.put("a", 9, "probe", "")
    assert cache.get("a") == 9
    (tmp_path / "file").write_text("")
    caplog.clear()
    Cache(Config(cache_dir=str(tmp_path / "file"))).put("a", 7, "probe", "")
    assert "HVDLITE_CACHE_DIR" in caplog.text


TRAIN = """
import sys, torch
import hvdlite.torch as hvd
hvd.init()
torch.manual_seed(0)
net = torch.nn.Sequential(*[torch.nn.Linear(128, 128) for _ in range(40)])
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), 0.1), named_parameters=net.named_parameters())
exchange = None
sizes = set()
for step in range(100):
    optimizer.zero_grad(set_to_none=step % 3 == 0)
    torch.manual_seed(step * 10 + hvd.rank())
    net(torch.randn(4, 128)).square().mean().backward()
    optimizer.step()
    sizes.add(len(optimizer._exchanges[0]._exchange.buckets))
weights = torch.cat([one.detach().flatten() for one in net.parameters()])
both = hvd.allgather(weights[None])
assert torch.equal(both[0], both[1])
if hvd.rank() == 0:
    print("sum", weights.double().sum().item(), "buckets", sorted(sizes))
"""


def test_training_is_the_same_whatever_autotune_tries(tmp_path):
    cache = tmp_path / "cache"
    environment = {**os.environ, "HVDLITE_CACHE_DIR": str(cache)}
    log = tmp_path / "tune.log"
    first = hvdrun(2, sys.executable, "-c", TRAIN, env=environment)
    [kept] = json.loads((cache / "bucket_sizes.json").read_text()).values()
    assert kept["by"] == "probe"
    live = hvdrun(2, sys.executable, "-c", TRAIN, env=environment, options=["--autotune", "--autotune-log-file", str(log)])
    explicit = hvdrun(2, sys.executable, "-c", TRAIN, env={**environment, "HOROVOD_FUSION_THRESHOLD": str(256 << 10)},
                      options=["--autotune"])
    assert first.returncode == live.returncode == explicit.returncode == 0, first.stderr + live.stderr + explicit.stderr
    results = [one.stdout.split("buckets") for one in (first, live, explicit)]
    assert results[0][0] == results[1][0] == results[2][0]
    assert len(json.loads(results[1][1])) > 2 and len(json.loads(results[2][1])) == 1
    assert "leaves the fusion threshold" in explicit.stderr
    [kept] = json.loads((cache / "bucket_sizes.json").read_text()).values()
    with open(log) as file:
        [tuner] = replay(file).values()
    assert tuner.size == kept["bytes"] and kept["by"] == "autotune"
