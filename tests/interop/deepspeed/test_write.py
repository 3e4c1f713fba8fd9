"""A plan becomes a JSON of DeepSpeed."""

from __future__ import annotations

from echelon.interop.deepspeed.write import WRITER
from tests.interop.plans import EXPERTS, job_of


def keys(*settings: str) -> dict[str, object]:
    return dict(WRITER.keys(job_of(settings).plan, {}))


def test_degrees() -> None:
    assert keys("mesh.pp=2")["pipeline.stages"] == 2
    assert keys("mesh.tp=2", "model.vocab=258")["tensor_parallel.autotp_size"] == 2
    assert keys("mesh.cp=2", "context.kind=ulysses", "zero.stage=1")["sequence_parallel_size"] == 2
    assert keys(*EXPERTS[2])["expert_parallel.autoep_size"] == 2


def test_stage_3_is_bounded_in_elements() -> None:
    found = keys("mesh.dp_shard=4", "zero.stage=3", "zero.keep_whole_below=300")
    assert found["zero_optimization.stage3_param_persistence_threshold"] == 299
    assert "zero_optimization.reduce_bucket_size" not in found


def test_secondary_slices_are_cut_over_the_ranks_of_a_node() -> None:
    wide = ("mesh.dp_shard=16", "cluster.preset=16xh100", "zero.stage=3", "zero.secondary=true")
    key = "zero_optimization.zero_hpz_partition_size"
    assert keys(*wide)[key] == 8
    assert key not in keys(*wide[:-1])


def test_what_rests_off_the_device() -> None:
    found = keys("mesh.dp_shard=4", "zero.stage=2", "zero.optimizer_offload=host")
    assert found["zero_optimization.offload_optimizer.device"] == "cpu"


def test_what_it_has_words_for_and_refuses() -> None:
    plan = job_of(("mesh.pp=2", "mesh.dp_shard=2", "zero.stage=2")).plan
    assert [one.setting for one in WRITER.unsupported(plan)] == ["zero.stage"]
    assert "PipelineModule(num_stages=2" in " ".join(WRITER.advice(plan))
