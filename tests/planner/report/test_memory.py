"""What rests where, what a step adds, and what the choices of ZeRO cost."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from echelon.cli.main import main
from echelon.config.load import load_job
from echelon.core.plan import Plan
from echelon.planner.predict.stage_rows import memory_bytes, stage_rows
from echelon.planner.report.report import plan_text


def nano(*settings: str) -> Plan:
    return load_job("nano", settings).plan


def _joined(text: str) -> str:
    """Return a page with its lines in one, as the sentences were before they were fitted."""
    return " ".join(text.split())


def test_state_that_does_not_fit_is_said() -> None:
    plan = load_job("llama3-8b").plan
    assert "THIS DOES NOT FIT" in plan_text(plan)
    assert "THIS DOES NOT FIT" not in plan_text(nano())


SHARDED = ("mesh.dp_shard=2", "mesh.dp_replicate=2", "mesh.tp=2")


def test_zero_is_shown_with_its_pools_and_its_choices() -> None:
    plan = nano(
        *SHARDED, "zero.stage=3", "zero.keep_whole_below=200", 'zero.parameter_offload="host"'
    )
    text = plan_text(plan)
    for part in (
        "stage 3, slices of 1/2, gradients of microbatches add up in slices, units freed after",
        "(host)",
        "whole units of parameters",
        "zero.accumulate             whole    ",
        "zero.accumulate             slices *",
        "zero.reshard_after_forward  always *",
        "dp_shard  [0 2]  [1 3]  [4 6]  [5 7]",
        "dp_replicate  [0 4]  [1 5]  [2 6]  [3 7]",
    ):
        assert part in text or part in _joined(text), part
    assert "zero " not in plan_text(nano("mesh.tp=2"))


def test_what_was_not_chosen_is_what_that_plan_would_cost(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = [word for setting in (*SHARDED, "zero.stage=2") for word in ("--set", setting)]

    def choices(*more: str) -> dict[str, dict[str, int]]:
        assert main(["plan", "nano", "--json", *flags, *more]) == 0
        (row,) = json.loads(capsys.readouterr().out)["stages"]
        return {choice.pop("value"): choice for choice in row["choices"]}

    slices, whole = choices(), choices("--set", "zero.accumulate=whole")
    assert slices["slices"].pop("chosen") > slices["whole"].pop("chosen")
    assert whole["whole"].pop("chosen") > whole["slices"].pop("chosen")
    assert slices == whole
    assert slices["slices"]["sent_bytes"] > slices["whole"]["sent_bytes"]
    assert slices["slices"]["held_bytes"] < slices["whole"]["held_bytes"]


def test_what_a_step_adds_may_not_fit() -> None:
    plan = nano(*SHARDED, "zero.stage=3")
    (row,) = stage_rows(plan)
    held = memory_bytes(plan, row.held)
    device = replace(plan.cluster.device, memory_bytes=held)
    tight = replace(plan, cluster=replace(plan.cluster, device=device))
    assert "this fits, but maybe not what a step adds" in _joined(plan_text(tight))
    assert "activations come on top" in plan_text(plan)
