"""A plan becomes flags of Megatron-LM."""

from __future__ import annotations

from echelon.interop.megatron.write import WRITER, model_flags, unsupported_by_model
from tests.interop.plans import EXPERTS, job_of


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


def test_sizes_norms_and_positions() -> None:
    plan = job_of(("model.window=64",)).plan
    found = model_flags(plan)
    assert found["--num-layers"] == plan.model.layers
    assert found["--window-size"] == "63,0"
    assert found["--make-vocab-size-divisible-by"] == 1


def test_experts_and_latent_attention() -> None:
    found = model_flags(job_of(EXPERTS[0]).plan)
    assert (found["--num-experts"], found["--moe-router-topk"]) == (8, 2)
    assert (found["--q-lora-rank"], found["--v-head-dim"]) == (48, 16)


def test_a_vocabulary_that_would_be_padded_is_named() -> None:
    (refusal,) = unsupported_by_model(job_of(("mesh.tp=2", "model.vocab=257")).plan)
    assert (refusal.setting, refusal.suggestions) == ("model.vocab", ({"model.vocab": 258},))


def test_biased_experts_are_not_fused_with_dropout() -> None:
    """Megatron-LM's grouped experts assert that they are not."""
    biased = (*EXPERTS[1], "model.experts.bias=true", "model.output_bias=true")
    flag = "--no-bias-dropout-fusion"
    assert model_flags(job_of(biased).plan)[flag] is True
    assert model_flags(job_of(EXPERTS[1]).plan)[flag] is None
