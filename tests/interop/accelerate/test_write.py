"""A plan becomes a YAML of Accelerate: FSDP 2, the DeepSpeed plugin, or plain data parallelism."""

from __future__ import annotations

import pytest

from echelon.interop.accelerate.write import WRITER
from tests.interop.plans import job_of


def keys(*settings: str) -> dict[str, object]:
    return dict(WRITER.keys(job_of(settings).plan, {}))


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ((), "NO"),
        (("mesh.dp_shard=2", "zero.stage=2"), "DEEPSPEED"),
        (("mesh.dp_shard=2", "zero.stage=3"), "FSDP"),
    ],
)
def test_the_stage_says_how_it_trains(settings: tuple[str, ...], kind: str) -> None:
    assert keys(*settings)["distributed_type"] == kind


def test_fsdp_2_has_a_mesh() -> None:
    found = keys("mesh.cp=2", "context.kind=gathered", "zero.stage=3", "mesh.dp_shard=2")
    assert found["parallelism_config.parallelism_config_cp_comm_strategy"] == "allgather"
    assert found["fsdp_config.fsdp_version"] == 2


def test_what_it_has_words_for_and_refuses() -> None:
    plan = job_of(("mesh.pp=2", "mesh.tp=2", "model.vocab=258")).plan
    assert [one.setting for one in WRITER.unsupported(plan)] == ["mesh.pp", "mesh.tp"]
