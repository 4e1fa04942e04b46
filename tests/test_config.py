"""Settings: precedence, wording of errors, flags, the README's table."""

import argparse

import pytest

from hvdlite import config
from hvdlite.config import Config, Starter
from hvdlite.errors import ConfigError


def test_own_variable_wins_over_horovods_and_both_over_the_default():
    assert Config.from_environment({}) == Config()
    assert Config.from_environment({"HOROVOD_CYCLE_TIME": "2"}).cycle_time_ms == 2.0
    assert Config.from_environment({"HOROVOD_CYCLE_TIME": "2", "HVDLITE_CYCLE_TIME": "3"}).cycle_time_ms == 3.0
    assert Config.from_environment({"HOROVOD_HIERARCHICAL_ALLREDUCE": "1"}).hierarchical_allreduce


@pytest.mark.parametrize("name, text, says", [
    ("HVDLITE_CACHE_CAPACITY", "many", "is not a whole number"),
    ("HOROVOD_FUSION_THRESHOLD", "-1", "must be >= 0"),
    ("HVDLITE_LOG_LEVEL", "loud", "is none of"),
    ("HVDLITE_TIMELINE_MARK_CYCLES", "maybe", "neither"),
    ("HVDLITE_CYCLE_TIME", "nan", "must be >= 0"),
])
def test_a_bad_value_names_variable_text_and_rule(name, text, says):
    with pytest.raises(ConfigError) as caught:
        Config.from_environment({name: text})
    assert name in str(caught.value) and repr(text) in str(caught.value) and says in str(caught.value)


def _environment(*flags):
    parser = argparse.ArgumentParser()
    config.add_arguments(parser)
    return config.environment_from_arguments(parser.parse_args(flags))


def test_flags_become_variables_that_read_back():
    environment = _environment("--fusion-threshold-mb", "0.5", "--timeline-mark-cycles", "--cycle-time-ms", "2.5")
    read = Config.from_environment(environment)
    assert (read.fusion_threshold_bytes, read.timeline_mark_cycles, read.cycle_time_ms) == (1 << 19, True, 2.5)
    assert _environment() == {}


def test_a_bad_flag_is_named():
    with pytest.raises(ConfigError, match="--cache-capacity"):
        _environment("--cache-capacity", "x")
    with pytest.raises(ConfigError, match="--fusion-threshold-mb"):
        _environment("--fusion-threshold-mb", "x")


def test_readme_holds_the_generated_table():
    from ranks import ROOT

    assert config.markdown_table() in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("environ, expected", [
    ({}, None),
    ({"PMI_RANK": "0", "PMI_SIZE": "4"}, Starter("mpiexec (PMI)", 4)),
    ({"OMPI_COMM_WORLD_SIZE": "2", "PMIX_RANK": "0"}, Starter("mpirun (Open MPI)", 2)),
    ({"PMIX_RANK": "0"}, Starter("a PMIx or PMI starter", None)),
    ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "3"}, Starter("srun", 3)),
    ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, None),
])
def test_starters_are_recognised(environ, expected):
    assert Starter.from_environment(environ) == expected
