"""What islands that train alone need: each rule, its arithmetic, and the values that work."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.config.load import load_job
from echelon.core.errors import ConfigError, InfeasiblePlan
from echelon.parallel.module.start import check_plan
from echelon.planner.search.request import make_request
from tests.config.problems import SMALL, problems_of, write

ISLANDS = ["mesh.dp_replicate=2", "local_sgd.every=50"]
NOTHING: list[str] = []


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write(tmp_path, SMALL)


def test_two_islands_that_meet_every_fifty_steps_are_a_run(small: Path) -> None:
    assert not problems_of(small, ISLANDS)
    late = [*ISLANDS, "local_sgd.fragments=3", "local_sgd.delay=10", "train.steps=1010"]
    assert not problems_of(small, late)


def test_one_replica_meets_nobody(small: Path) -> None:
    found = problems_of(small, ["local_sgd.every=50", "mesh.dp_shard=2", "zero.stage=1"])
    assert list(found) == ["local-sgd-needs-islands"]
    ways = found["local-sgd-needs-islands"].suggestions
    assert "mesh.dp_replicate = 2" in ways
    assert "local_sgd.every = 0" in ways


def test_islands_are_replicas(small: Path) -> None:
    found = problems_of(small, [*ISLANDS, "local_sgd.islands=4"])
    assert list(found) == ["local-sgd-islands-are-replicas"]
    assert "local_sgd.islands = 2" in found["local-sgd-islands-are-replicas"].suggestions


@pytest.mark.parametrize(
    ("sets", "most"), [(["local_sgd.every=50"], 6), (["local_sgd.every=4"], 4)]
)
def test_fragments_have_blocks_and_steps(small: Path, sets: list[str], most: int) -> None:
    found = problems_of(small, ["mesh.dp_replicate=2", *sets, "local_sgd.fragments=7"])
    assert list(found) == ["local-sgd-fragments-fit"]
    assert f"local_sgd.fragments = {most}" in found["local-sgd-fragments-fit"].suggestions
    assert f"(7 > {most})" in found["local-sgd-fragments-fit"].message


def test_a_delay_is_less_than_a_round(small: Path) -> None:
    found = problems_of(small, [*ISLANDS, "local_sgd.delay=50"])
    assert list(found) == ["local-sgd-delay-fits"]
    assert "50 >= 50" in found["local-sgd-delay-fits"].message


@pytest.mark.parametrize(
    ("sets", "way"),
    [
        (["train.steps=120"], "train.steps = 100"),
        (["train.steps=100", "local_sgd.delay=5"], "train.steps = 105"),
        (["train.steps=20"], "train.steps = 50"),
    ],
)
def test_a_run_ends_with_a_round(small: Path, sets: list[str], way: str) -> None:
    found = problems_of(small, [*ISLANDS, *sets])
    assert list(found) == ["local-sgd-ends-with-a-round"]
    assert way in found["local-sgd-ends-with-a-round"].suggestions


def test_islands_are_whole_nodes_or_nodes_whole_islands(small: Path) -> None:
    on = ["cluster.preset=16xh100", *ISLANDS, "zero.stage=1", "batch.global_sequences=96"]
    found = problems_of(small, [*on, "mesh.dp_shard=6"])
    assert list(found) == ["local-sgd-islands-fill-nodes"]
    assert "8 % 6 = 2" in found["local-sgd-islands-fill-nodes"].message
    assert not problems_of(small, [*on, "mesh.dp_shard=8"])


@pytest.mark.parametrize(
    ("rule", "sets"),
    [
        (
            "local-sgd-keeps-state-near",
            ["mesh.dp_shard=2", "zero.stage=1", "zero.optimizer_offload=host"],
        ),
        (
            "local-sgd-scales-of-blocks",
            ["precision.matmul=fp8", "precision.fp8_block=8", "precision.fp8_scales=tensor"],
        ),
        ("local-sgd-masters-are-wide", ["precision.parameters=bf16", "precision.master=bf16"]),
        ("local-sgd-codes-save-bytes", ["local_sgd.gradients=int8", "local_sgd.delay=1"]),
    ],
)
def test_what_outer_steps_cannot_do_is_refused(small: Path, rule: str, sets: list[str]) -> None:
    steps = ["train.steps=1001"] if "local_sgd.delay=1" in sets else NOTHING
    assert rule in problems_of(small, [*ISLANDS, *sets, *steps])


def test_codes_of_many_islands_are_more_bytes_than_sums(small: Path) -> None:
    many = ["local_sgd.every=50", "mesh.dp_replicate=8", "local_sgd.gradients=int8"]
    found = problems_of(small, many)
    assert list(found) == ["local-sgd-codes-save-bytes"]
    assert "7 bytes, and 7 of a sum" in found["local-sgd-codes-save-bytes"].message


def test_settings_of_rounds_need_rounds_and_momentum_needs_nesterov(small: Path) -> None:
    assert list(problems_of(small, ["local_sgd.delay=2"])) == ["no-effect"]
    plain = [*ISLANDS, "local_sgd.outer=sgd"]
    assert not problems_of(small, plain)
    assert list(problems_of(small, [*plain, "local_sgd.outer_momentum=0.5"])) == ["no-effect"]


def test_a_search_splits_one_training() -> None:
    with pytest.raises(ConfigError) as error:
        make_request("llama3-8b", cluster="8xh100", settings=["local_sgd.every=50"])
    assert list(error.value.rules) == ["search-splits-one-training"]


def test_a_module_of_somebody_else_takes_no_outer_steps(small: Path) -> None:
    plan = load_job(str(small), ISLANDS).plan
    with pytest.raises(InfeasiblePlan) as error:
        check_plan(plan)
    assert "local-sgd-in-the-trainer" in error.value.rules
