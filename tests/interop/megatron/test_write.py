"""A plan becomes flags of Megatron-LM."""

from __future__ import annotations

from echelon.interop.megatron.write import WRITER
from tests.interop.plans import job_of


def flags(*settings: str) -> dict[str, object]:
    return dict(WRITER.keys(job_of(settings).plan, {}))


def test_the_mesh_and_the_launcher() -> None:
    found = flags("mesh.tp=2", "model.vocab=258", "mesh.cp=2", "context.kind=gathered")
    assert (found["--tensor-model-parallel-size"], found["--context-parallel-size"]) == (2, 2)
    assert found["--cp-comm-type"] == "all_gather"
    assert found["--nproc-per-node"] == 4


def test_stages_are_listed_where_they_are_not_even() -> None:
    assert flags("mesh.pp=2", "pipeline.stages=[[0],[1,2,3]]")[
        "--pipeline-model-parallel-layout"
    ] == ("Et*1|t*3L")
    virtual = flags("mesh.pp=2", "pipeline.schedule=interleaved-1f1b", "pipeline.virtual_stages=2")
    assert virtual["--num-virtual-stages-per-pipeline-rank"] == 2


def test_each_stage_of_zero_has_its_flags() -> None:
    assert "--use-distributed-optimizer" in flags("mesh.dp_shard=2", "zero.stage=1")
    found = flags("mesh.dp_shard=2", "zero.stage=2")
    assert found["--data-parallel-sharding-strategy"] == "optim_grads"
    assert "--ddp-bucket-size" not in flags("mesh.dp_shard=2", "zero.stage=3")


def test_what_it_has_words_for_and_refuses() -> None:
    plan = job_of(("mesh.pp=2", "pipeline.schedule=zb-v")).plan
    assert [one.setting for one in WRITER.unsupported(plan)] == ["pipeline.schedule"]
    assert not list(WRITER.unsupported(job_of(()).plan))
