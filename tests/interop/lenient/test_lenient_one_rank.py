"""A stage of ZeRO that another tool takes for one rank becomes 0."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from echelon.api.converting import import_run
from echelon.config.load import load_job
from tests.interop.launcher.launch_lines import ACCELERATE, DEEPSPEED, MEGATRON


@pytest.mark.parametrize("tool", ["megatron", "deepspeed", "stage 3", "accelerate"])
def test_a_stage_of_one_rank_becomes_0_and_says_so(tool: str, tmp_path: Path) -> None:
    file, ranks = tmp_path / "file", None
    if tool == "megatron":
        file.write_text(f"{MEGATRON.format(ranks=1)} --use-distributed-optimizer\n")
    elif tool == "accelerate":
        file.write_text(ACCELERATE.format(ranks=1))
    else:
        zero = {"stage": 2}
        if tool == "stage 3":
            zero = {"stage": 3, "stage3_prefetch_bucket_size": 5e7, "zero_hpz_partition_size": 1}
        file.write_text(json.dumps({**DEEPSPEED, "zero_optimization": zero}))
        ranks = 1
    run = import_run(file, ranks=ranks)
    assert run.is_whole, run.invalid
    assert run.settings["zero.stage"].value == 0
    told = [row.why for row in run.rows if row.setting == "zero.stage"]
    stage = {"megatron": 1, "deepspeed": 2}.get(tool, 3)
    assert told == [f"stage {stage} of one rank shares nothing"]
    out = tmp_path / "run.toml"
    run.write(out)
    assert load_job(out).plan.layout.zero.stage == 0


def test_a_stage_that_the_user_sets_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(DEEPSPEED))
    run = import_run(file, ranks=1, settings=["zero.stage=1"])
    assert [one.rule for one in run.invalid] == ["zero-shares-out"]
