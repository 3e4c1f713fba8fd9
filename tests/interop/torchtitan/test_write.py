"""A plan becomes a TOML of torchtitan."""

from __future__ import annotations

from math import inf

from echelon.config.load import load_job
from echelon.interop.torchtitan.write import WRITER, flavor_of
from tests.interop.plans import job_of


def keys(*settings: str) -> dict[str, object]:
    return dict(WRITER.keys(job_of(settings).plan, {}))


def test_a_pipeline_lists_its_modules() -> None:
    found = keys("mesh.pp=2", "pipeline.schedule=zb-v")
    assert found["parallelism.pipeline_parallel_schedule"] == "ZBVZeroBubble"
    parts = found["parallelism.module_fqns_per_model_part"]
    assert isinstance(parts, list)
    assert parts[0][0] == "tok_embeddings"
    assert parts[-1][-2:] == ["norm", "output"]


def test_the_rest_of_a_run() -> None:
    found = keys("optimizer.clip_norm=none", "recompute.policy=full", "recompute.every=2")
    assert found["training.max_norm"] == inf
    assert found["activation_checkpoint.selective_ac_option"] == "2"


def test_a_flavor_is_a_whole_model() -> None:
    assert flavor_of(load_job("qwen3-8b", ["cluster.preset=8xh100"]).plan) == ("qwen3", "8B")
    assert flavor_of(job_of(()).plan) is None


def test_what_it_has_words_for_and_refuses() -> None:
    plan = job_of(("mesh.cp=2", "context.kind=ulysses", "optimizer.kind=sgd")).plan
    refused = [one.setting for one in WRITER.unsupported(plan)]
    assert refused == ["context.kind", "optimizer.kind"]
