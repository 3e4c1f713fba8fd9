"""Every program of examples/wrong is named as the table says, and its mended form is proven."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from echelon.launch.local.supervisor import RankPool
from tests.examples.programs import WRONG, programs_in, proof_of_file


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Say what the prover must tell of a program; `always` ones run in `make test`.

    Those of a `framework` run in test_frameworks.py.
    """

    rule: str = "prove-gradients"
    tensor: str
    factor: str
    axis: str = ""
    always: bool = False
    framework: bool = False

    def text(self) -> str:
        """Return the verdict as the page has it."""
        over = f" over {self.axis}" if self.axis and self.axis not in self.factor else ""
        return f"`{self.tensor}`: {self.factor}{over} (`{self.rule}`)"


VERDICTS = {
    "accelerate_fsdp_on_cpu": Verdict(
        rule="verify-sharding",
        tensor="model.embed_tokens.weight",
        factor="not sharded",
        axis="dp",
        framework=True,
    ),
    "clip_each_shard": Verdict(tensor="head.weight", factor="partial norm", axis="dp"),
    "clip_each_stage": Verdict(tensor="head.weight", factor="partial norm", axis="pp"),
    "ddp_module_bypassed": Verdict(tensor="head.weight", factor="missing sum", axis="dp"),
    "dual_pipe_v_ddp": Verdict(tensor="blocks.2.down.weight", factor="missing sum", axis="dp"),
    "expert_gradients_doubled": Verdict(
        tensor="experts.w_EDD", factor="ep", axis="ep", always=True
    ),
    "final_norm_sequence_parallel": Verdict(
        tensor="norm.weight", factor="missing sum", axis="tp", always=True
    ),
    "fsdp2_divides_twice": Verdict(tensor="experts.w_EDD", factor="1/ep", axis="ep"),
    "gathered_keys_gloo": Verdict(
        rule="verify-local-gradients", tensor="blocks.3.v", factor="permuted", axis="cp"
    ),
    "labels_shifted_after_split": Verdict(
        rule="prove-loss", tensor="loss", factor="boundary labels missing", axis="cp"
    ),
    "loss_parallel_penalty": Verdict(tensor="head", factor="missing softmax term", axis="tp"),
    "megatron_strided_reduce": Verdict(
        tensor="norm.weight", factor="missing sum", axis="tp", framework=True
    ),
    "mean_of_means": Verdict(
        rule="verify-local-gradients", tensor="head.weight", factor="mean of means", axis="dp"
    ),
    "nested_fsdp2_zero_bubble": Verdict(
        tensor="head.weight", factor="weight gradient lost", axis="pp"
    ),
    "norm_counts_replicas": Verdict(tensor="head.weight", factor="partial norm", axis="tp"),
    "one_key_head_tp": Verdict(tensor="v.weight", factor="missing sum", axis="tp", always=True),
    "optimizer_before_fully_shard": Verdict(
        rule="prove-nothing-dropped", tensor="embed.weight", factor="missing"
    ),
    "optimizer_state_read_early": Verdict(
        rule="prove-clipped-update", tensor="embed.weight", factor="update count"
    ),
    "padded_vocabulary": Verdict(
        rule="prove-loss", tensor="loss", factor="padding in the softmax", axis="tp"
    ),
    "replicate_over_dtensor": Verdict(tensor="head.weight", factor="parameter replaced", axis="dp"),
    "tied_embedding_pipeline": Verdict(tensor="embed.weight", factor="missing sum", axis="pp"),
    "to_local_without_placements": Verdict(
        tensor="blocks.3.norm2", factor="missing sum", axis="tp"
    ),
    "trainer_mean_over_ranks": Verdict(
        rule="verify-local-gradients",
        tensor="lm_head.weight",
        factor="mean of means",
        axis="dp",
        framework=True,
    ),
    "zero2_last_microbatch": Verdict(
        tensor="lm_head.weight", factor="missing part", framework=True
    ),
    "zero_bubble_ddp": Verdict(tensor="head.weight", factor="missing sum", axis="dp"),
}


TORCH = [name for name, verdict in VERDICTS.items() if not verdict.framework]


def _marked(name: str) -> object:
    return pytest.param(name, marks=() if VERDICTS[name].always else pytest.mark.slow)


def test_every_program_has_a_verdict_and_a_row_on_the_page() -> None:
    page = (WRONG / "README.md").read_text(encoding="utf-8")
    assert programs_in(WRONG) == sorted(VERDICTS)
    rows = {
        name: f"]({name}.py)" in page and verdict.text() in page
        for name, verdict in VERDICTS.items()
    }
    assert [name for name, there in rows.items() if not there] == []
    urls = [
        (WRONG / f"{name}.py").read_text("utf-8").count("https://github.com/") for name in VERDICTS
    ]
    assert min(urls) >= 1
    weak = [name for name, verdict in VERDICTS.items() if verdict.factor in ("none", "zero")]
    assert weak == [], "every one has a cause"


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", [_marked(name) for name in TORCH])
def test_a_wrong_program_is_named(name: str, rank_pool: RankPool) -> None:
    wanted = VERDICTS[name]
    told = proof_of_file(rank_pool, WRONG / f"{name}.py").diagnosis
    assert told is not None
    found = (told.rule, told.tensor, told.factor, told.axis)
    assert found == (wanted.rule, wanted.tensor, wanted.factor, wanted.axis), told.says


@pytest.mark.slow
@pytest.mark.parametrize("name", TORCH)
def test_its_mended_form_is_proven(name: str, rank_pool: RankPool) -> None:
    proof = proof_of_file(rank_pool, WRONG / f"{name}.py:on_rank_fixed")
    assert proof.proven, proof.diagnosis
