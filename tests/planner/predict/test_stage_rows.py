"""Ranks that hold and send the same are one row."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from echelon.cli.main import main
from echelon.config.load import load_job
from echelon.core.plan import Plan
from echelon.cost.bytes.sent import bytes_sent_by_axis
from echelon.planner.predict.stage_rows import (
    group_equal_rows,
    memory_bytes,
    pool_bytes,
    stage_rows,
)
from echelon.planner.report.report import plan_text


def nano(*settings: str) -> Plan:
    return load_job("nano", settings).plan


def test_stages_that_are_alike_share_a_row() -> None:
    plan = nano("model.layers=8", "mesh.pp=4", 'model.name="deeper"')
    runs = group_equal_rows(stage_rows(plan))
    # A tied embedding makes both ends of the model differ from the middle.
    assert [[row.pp_rank for row in run] for run in runs] == [[0], [1, 2], [3]]
    text = plan_text(plan)
    assert "1-2" in text
    assert "2-5" in text


SHARDED = ("mesh.dp_shard=2", "mesh.dp_replicate=2", "mesh.tp=2")


def test_muon_is_told_rank_by_rank(capsys: pytest.CaptureFixture[str]) -> None:
    settings = (*SHARDED, "zero.stage=1", "optimizer.kind=muon")
    flags = [word for setting in settings for word in ("--set", setting)]
    assert main(["plan", "nano", "--json", *flags]) == 0
    result = json.loads(capsys.readouterr().out)
    plan = Plan.from_json(json.dumps(result["plan"]))
    (row,) = result["stages"]
    sent = {rank: bytes_sent_by_axis(plan, rank)["stage"] for rank in range(8)}
    assert row["muon_bytes_by_rank"] == {str(rank): number for rank, number in sent.items()}
    assert row["sent_bytes_by_axis"]["stage"] == max(sent.values())
    assert result["groups"]["stage"] == [list(range(8))]
    assert "matrices of Muon" in plan_text(plan)


def test_host_and_device_of_a_cpu_are_one_memory() -> None:
    plan = nano(*SHARDED, "zero.stage=1", 'zero.optimizer_offload="host"')
    (row,) = stage_rows(plan)
    assert memory_bytes(plan, row.held) == sum(term.bytes for term in row.held)
    on_gpu = replace(plan, cluster=replace(plan.cluster, backend="nccl"))
    assert memory_bytes(on_gpu, row.held) == pool_bytes(row.held, "device")
