"""Findings are told in rows that fit a terminal, and racks that are wired as nodes are nodes."""

from __future__ import annotations

import pytest

from echelon.config.load import load_job
from echelon.handbook.guides.practices import PRACTICES
from echelon.planner.lint.checks import LINTS, lint, lint_rows, most_held_by_server, plan_fits
from tests.handbook.guides.situations import plan_of


def test_every_lint_is_named_once() -> None:
    assert len({each.id for each in LINTS}) == len(LINTS) >= 15


def test_rows_fit_a_terminal_and_name_the_lint() -> None:
    plan = plan_of("llama2-7b 8xh100 mesh.dp_shard=8 zero.stage=3")
    rows = lint_rows(plan)
    assert max(map(len, rows)) <= 80
    heads = [row.split(":")[0].strip() for row in rows if not row.startswith("   ")]
    assert heads == [finding.id for finding in lint(plan)]


def test_a_plan_without_fault_has_no_row() -> None:
    assert lint_rows(plan_of("gpt2 8xh100 mesh.dp_replicate=8 model.vocab=50304")) == []


def test_practices_name_lints_that_there_are_or_say_what_to_do() -> None:
    known = {each.id for each in LINTS}
    for practice in PRACTICES:
        assert set(practice.lints) <= known
        assert bool(practice.lints) != bool(practice.instead)


@pytest.mark.parametrize(
    ("lint_id", "inside", "beyond"),
    [
        (
            "tp-across-nodes",
            "gpt3-175b 64xgb200 mesh.tp=16",
            "gpt3-175b 128xgb200 mesh.tp=48 mesh.pp=2",
        ),
        (
            "experts-across-nodes",
            "qwen3-30b-a3b 128xgb200 mesh.dp_shard=64 mesh.ep=64 zero.stage=1",
            "qwen3-30b-a3b 128xgb200 mesh.dp_shard=128 mesh.ep=128 zero.stage=1",
        ),
        (
            "context-all-to-all-across-nodes",
            "gpt3-175b 72xgb200 mesh.cp=16 context.kind=gathered",
            "gpt3-175b 128xgb200 mesh.cp=128 context.kind=gathered",
        ),
    ],
)
def test_a_rack_that_is_wired_as_a_node_is_one(lint_id: str, inside: str, beyond: str) -> None:
    assert lint_id not in {finding.id for finding in lint(plan_of(inside))}
    (found,) = [finding for finding in lint(plan_of(beyond)) if finding.id == lint_id]
    assert "NVLink 5 domains of 64" in found.message
    assert "InfiniBand" in found.message or lint_id.startswith("context")


EIGHT = "cluster.preset=8xh100"
SHARDED = (EIGHT, "mesh.dp_shard=8", "zero.stage=3")


@pytest.mark.parametrize(
    ("settings", "fits"),
    [
        ((*SHARDED, "recompute.policy=full"), True),
        # Parameters, gradients and optimizer of each replica: 128 GB of 85.
        ((EIGHT, "mesh.dp_replicate=8"), False),
        # What is held between steps fits; activations of a microbatch do not.
        ((*SHARDED, "batch.microbatch_sequences=8"), False),
    ],
)
def test_all_that_a_step_needs_must_fit(settings: tuple[str, ...], fits: bool) -> None:
    assert plan_fits(load_job("llama3-8b", settings).plan) is fits


def test_the_fullest_server_counts() -> None:
    plan = load_job("nano", ("servers.count=2", "mesh.dp_replicate=2")).plan
    assert most_held_by_server(plan) > 0
    assert most_held_by_server(load_job("nano", ()).plan) == 0
