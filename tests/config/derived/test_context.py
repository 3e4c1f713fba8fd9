"""Settings of context parallelism and of masks: what they become, and what must come out even."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.config.files.show import resolved_toml
from echelon.config.load import load_job
from echelon.core.plan import Context, Plan
from tests.config.problems import SMALL, problems_of, write
from tests.config.suggestions import taken

RING_OF_PAIRS = ["mesh.cp=4", "context.kind=ulysses-ring", "context.ulysses_degree=2"]


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write(tmp_path, SMALL)


def plan_of(source: Path | str, *sets: str) -> Plan:
    return load_job(source, sets).plan


def test_masks_of_a_model(small: Path) -> None:
    model = plan_of(small).model
    assert (model.causal, model.window, model.soft_cap) == (True, None, None)
    assert plan_of(small).mathematics.documents == "joined"
    sets = ["model.causal=false", "model.window=8", "model.soft_cap=50"]
    plan = plan_of(small, *sets, "batch.documents=separate")
    assert (plan.model.causal, plan.model.window, plan.model.soft_cap) == (False, 8, 50.0)
    assert plan.mathematics.documents == "separate"


def test_masks_of_a_preset_can_be_taken_away(tmp_path: Path) -> None:
    run = write(tmp_path, 'extends = "nano"\n[model]\nwindow = 64\nsoft_cap = 30')
    assert plan_of(run).model.window == 64
    model = plan_of(run, 'model.window="none"', "model.soft_cap=none").model
    assert (model.window, model.soft_cap) == (None, None)


@pytest.mark.parametrize(
    ("setting", "rule"),
    [
        ("model.window=0", "out-of-range"),
        ("model.window=all", "wrong-type"),
        ("model.soft_cap=0", "out-of-range"),
        ("model.causal=1", "wrong-type"),
        ("batch.documents=apart", "unknown-choice"),
        ("context.kind=rings", "unknown-choice"),
        ("context.ulysses_degree=0", "out-of-range"),
        ("context.ulysses_degree=2.0", "wrong-type"),
    ],
)
def test_values_that_do_not_fit(small: Path, setting: str, rule: str) -> None:
    assert list(problems_of(small, [setting])) == [rule]


@pytest.mark.parametrize(
    ("sets", "context"),
    [
        ([], Context()),
        (["mesh.cp=4"], Context(kind="ring")),
        (["mesh.cp=4", "context.kind=striped"], Context(kind="striped")),
        (["mesh.cp=4", "context.kind=gathered"], Context(kind="gathered")),
        (["mesh.cp=4", "context.kind=ulysses"], Context(kind="ulysses", ulysses_degree=4)),
        (RING_OF_PAIRS, Context(kind="ulysses-ring", ulysses_degree=2)),
        ([*RING_OF_PAIRS[:2]], Context(kind="ulysses-ring", ulysses_degree=2)),
        ([*RING_OF_PAIRS[:2], "context.ulysses_degree=1"], Context(kind="ulysses-ring")),
        (
            [*RING_OF_PAIRS[:2], "context.ulysses_degree=4"],
            Context(kind="ulysses-ring", ulysses_degree=4),
        ),
        (["context.ulysses_degree=1"], Context()),
    ],
)
def test_each_kind_has_its_degree(small: Path, sets: list[str], context: Context) -> None:
    assert plan_of(small, *sets).layout.context == context


@pytest.mark.parametrize(
    ("sets", "degree", "why"),
    [
        (["mesh.cp=2"], 1, "no proper divisor of cp 2 divides 12 heads"),
        (["mesh.cp=8"], 4, "largest proper divisor of cp 8 that divides 12 heads"),
        (["mesh.cp=8", "model.heads=2", "model.kv_heads=2"], 2, "divides 2 heads"),
        (["mesh.cp=8", "mesh.tp=6", "cluster.preset=48xh100"], 1, "divides 2 heads"),
        (["mesh.cp=8", "mesh.tp=2", "cluster.preset=16xh100"], 2, "divides 6 heads"),
        (["mesh.cp=8", "mesh.tp=3", "cluster.preset=24xh100"], 1, "node of 8 devices"),
        (["mesh.cp=12", "cluster.preset=16xh100"], 4, "stays on a node of 8 devices"),
    ],
)
def test_a_degree_that_is_left_to_us_divides_heads_and_stays_on_a_node(
    small: Path, sets: list[str], degree: int, why: str
) -> None:
    job = load_job(small, [*sets, "context.kind=ulysses-ring", "batch.sequence_length=48"])
    assert job.plan.layout.context.ulysses_degree == degree
    (row,) = (row for row in job.sources if row.key == "context.ulysses_degree")
    assert row.value == str(degree)
    assert row.source.startswith("derived: ")
    assert why in row.source


def test_what_config_show_writes_is_the_same_job(small: Path, tmp_path: Path) -> None:
    masks = ["model.window=8", "batch.documents=separate"]
    kinds = ("ring", "striped", "gathered", "ulysses", "ulysses-ring")
    for sets in ([], *([*masks, "mesh.cp=4", f"context.kind={kind}"] for kind in kinds)):
        job = load_job(small, sets)
        again = load_job(write(tmp_path, resolved_toml(job), "resolved.toml"))
        assert again.plan.mathematics == job.plan.mathematics
        assert again.plan.layout == job.plan.layout


@pytest.mark.parametrize(
    ("sets", "rule", "says", "works"),
    [
        (
            ["mesh.cp=4", "batch.sequence_length=20"],
            "context-divides-sequence",
            "20 is not a multiple of 2 x 4",
            (
                "batch.sequence_length = 16",
                "batch.sequence_length = 24",
                "mesh.cp = 5",
                "mesh.cp = 2",
                'context.kind = "striped"',
                'context.kind = "ulysses"',
                'context.kind = "ulysses-ring"',
            ),
        ),
        (
            ["mesh.cp=4", "batch.sequence_length=22", "context.kind=striped"],
            "context-divides-sequence",
            "22 is not a multiple of mesh.cp = 4 (22 % 4 = 2)",
            ("batch.sequence_length = 20", "batch.sequence_length = 24", "mesh.cp = 2"),
        ),
        (
            ["mesh.cp=4", "batch.sequence_length=63"],
            "context-divides-sequence",
            "63 % 4 = 3",
            ("batch.sequence_length = 56", "batch.sequence_length = 64", "mesh.cp = 1"),
        ),
        (
            [*RING_OF_PAIRS[:2], "batch.sequence_length=22", "context.ulysses_degree=1"],
            "context-divides-sequence",
            "mesh.cp = 4",
            ("batch.sequence_length = 16", "batch.sequence_length = 24"),
        ),
        (
            ["mesh.cp=6", "mesh.tp=3", "context.kind=ulysses", "cluster.preset=32xh100"],
            "ulysses-divides-heads",
            "heads / tp = 12 / 3 = 4 on a tensor rank (4 % 6 = 4)",
            ("mesh.cp = 4", "mesh.cp = 2", 'context.kind = "ring"'),
        ),
        (
            ["mesh.cp=8", "context.kind=ulysses-ring", "context.ulysses_degree=8"],
            "ulysses-divides-heads",
            "12 % 8 = 4",
            ("context.ulysses_degree = 4", "context.ulysses_degree = 2"),
        ),
        (
            ["mesh.cp=4", "context.kind=ulysses-ring", "context.ulysses_degree=3"],
            "ulysses-divides-cp",
            "does not divide mesh.cp = 4 (4 % 3 = 1)",
            ("context.ulysses_degree = 2", "context.ulysses_degree = 4", "mesh.cp = 3"),
        ),
        (
            ["mesh.cp=4", "context.kind=ulysses", "context.ulysses_degree=2"],
            "ulysses-divides-cp",
            "among all of mesh.cp = 4",
            ("context.ulysses_degree = 4", 'context.kind = "ulysses-ring"', "mesh.cp = 2"),
        ),
        (
            ["mesh.cp=2", "mesh.tp=3", "mesh.sequence_parallel=true", "batch.sequence_length=20"],
            "sequence-parallel-divides-sequence",
            "mesh.cp x mesh.tp = 2 x 3 = 6 (20 % 6 = 2)",
            ("batch.sequence_length = 12", "batch.sequence_length = 24"),
        ),
        (
            ["context.ulysses_degree=2"],
            "no-effect",
            "ring exchanges no heads",
            ('context.ulysses_degree = "auto"',),
        ),
        (
            ["mesh.cp=4", "context.kind=striped", "context.ulysses_degree=2"],
            "no-effect",
            "striped exchanges no heads",
            ('context.kind = "ulysses-ring"',),
        ),
        (["context.kind=gathered"], "no-effect", "mesh.cp = 1", ("mesh.cp = 2",)),
    ],
)
def test_a_broken_rule_names_values_that_work(
    small: Path, sets: list[str], rule: str, says: str, works: tuple[str, ...]
) -> None:
    found = problems_of(small, sets)
    assert list(found) == [rule]
    assert says in found[rule].message
    named = [
        text if " = " in text else f"{found[rule].key} = {text}" for text in found[rule].suggestions
    ]
    assert set(works) <= set(named)
    for advice in named:
        assert problems_of(small, taken(advice, sets)) == {}, advice


@pytest.mark.parametrize(
    "sets",
    [
        ["zero.bucket_bytes=1000"],
        *([f"zero.stage={stage}"] for stage in (1, 2, 3)),
        ["zero.stage=1", "zero.accumulate=slices"],
        ["mesh.pp=2", "zero.stage=3", "recompute.policy=full"],
        ["mesh.tp=2", "mesh.sequence_parallel=true", "batch.sequence_length=32"],
        ["optimizer.kind=muon", "model.positions=learned"],
    ],
)
def test_context_ranks_share_out_and_sum_gradients_as_data_ranks_do(
    small: Path, sets: list[str]
) -> None:
    plan = plan_of(small, "mesh.cp=2", *sets)
    assert (plan.mesh.cp, plan.mesh.dp) == (2, 1)
    assert plan.num_microbatches == plan_of(small).num_microbatches


def test_slices_need_no_more_ranks_where_there_are_context_ranks(small: Path) -> None:
    found = problems_of(small, ["mesh.cp=2", "zero.accumulate=slices"])
    assert found["slices-need-stage"].suggestions == ('zero.accumulate = "whole"', "zero.stage = 1")
