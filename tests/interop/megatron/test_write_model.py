"""The model of a plan becomes flags of Megatron-LM."""

from __future__ import annotations

from echelon.interop.megatron.write_model import model_flags, unsupported_by_model
from tests.interop.plans import EXPERTS, job_of


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
