"""`echelon explain memory`: every line a formula, nothing without N."""

from __future__ import annotations

import json
import re

import pytest

from echelon.cli.main import main
from echelon.core.parameters import num_parameters
from echelon.cost.bytes.model_sizes import (
    MIXED_PRECISION,
    ROUTED,
    model_states,
    states_of_rank,
    weights_by_part,
)
from echelon.layout.stage import held_parameters, rank_part
from tests.handbook.guides.situations import plan_of

BF16 = ("--set", "precision.parameters=bf16", "--set", "precision.gradients=bf16")
SEVEN = ("llama2-7b", "--set", "cluster.preset=4xa100-80gb", "--memory-bytes", "80e9", *BF16)


def page(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return what the command prints."""
    assert main(["explain", *words]) == 0
    output = capsys.readouterr()
    assert output.err == ""
    assert "--json" in words or max(map(len, output.out.splitlines())) <= 120
    return output.out


def test_a_model_is_derived_line_by_line(capsys: pytest.CaptureFixture[str]) -> None:
    text = page(capsys, "memory", *SEVEN, "--dp", "4")
    for line in (
        "  an MLP: 3 x 4,096 x 11,008 = 135,266,304 weights, 258.00 MiB",
        "  together      16 x 6,738,415,616 = 100.41 GiB",
        "1      4 psi + 12 psi/N   43.93 GiB   59 % of 74.51 GiB  fits",
        "0                16 psi  100.41 GiB  135 % of 74.51 GiB  does not fit",
        "  a layer    2 x 4,096 x 4,096 x 2 = 64.00 MiB",
        "  32 layers  2.00 GiB",
    ):
        assert line in text


def test_the_largest_model_and_grouped_keys(capsys: pytest.CaptureFixture[str]) -> None:
    long = ("--set", "batch.sequence_length=131072", "--set", "model.max_positions=131072")
    words = ("memory", "llama3-70b", *long, *BF16, "--dp", "8", "--memory-bytes", "32e9")
    found = json.loads(page(capsys, *words, "--json"))["memory"]
    assert found["kv_bytes"] == 40 * 2**30
    assert [stage["largest_model"] for stage in found["stages"]] == [
        2_000_000_000,
        5_818_181_818,
        8_533_333_333,
        16_000_000_000,
    ]
    assert found["stages"][2]["largest_model_optimizer_offloaded"] == 14_222_222_222
    text = page(capsys, *words)
    assert "  8 of 64 heads have keys: as many as heads would take 320.00 GiB" in text


def test_experts_are_shared_out_and_context_ranks_share_keys(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = ("mixtral-8x7b", "--set", "cluster.preset=16xh100", "--set", "zero.stage=1", *BF16)
    mesh = ("--set", "mesh.dp_shard=8", "--set", "mesh.ep=8", "--set", "mesh.cp=2")
    text = page(capsys, "memory", *run, *mesh)
    assert "A rank holds of the model, N = 16 data ranks (tp 1, pp 1, ep 8)" in text
    assert "one of 8 experts: 3 x 4,096 x 14,336 = 176,160,768 weights" in text
    assert re.search(r"on a rank +\S+ MiB \(cp 2 x tp 1\)", text)


@pytest.mark.parametrize("model", ["gpt2", "llama3-8b", "qwen3-30b-a3b"])
def test_parts_are_the_whole_model_and_a_rank_holds_its_part(model: str) -> None:
    plan = plan_of(f"{model} 8xh100 mesh.dp_shard=8 zero.stage=1")
    parts = weights_by_part(plan.model)
    assert sum(parts.values()) == num_parameters(plan.model)
    assert states_of_rank(plan.model, 1, 8, MIXED_PRECISION) == model_states(
        sum(parts.values()), 1, 8
    )


def test_an_expert_rank_holds_what_a_plan_gives_it() -> None:
    plan = plan_of("qwen3-30b-a3b 8xh100 mesh.dp_shard=8 mesh.ep=4 zero.stage=1")
    held = sum(spec.numel for spec in held_parameters(plan, rank_part(plan, 0)))
    parts = weights_by_part(plan.model)
    states = states_of_rank(plan.model, 0, 8, MIXED_PRECISION, degrees=(1, 1, 4))
    assert states.parameters == 2 * held == 2 * (sum(parts.values()) - 0.75 * parts[ROUTED])


def test_without_n_or_a_run_there_is_no_figure(capsys: pytest.CaptureFixture[str]) -> None:
    for words, rule in (
        (["memory"], "bad-argument"),
        (["memory", "nano"], "zero-needs-degree"),
        (["memory", "nano", "--dp", "0"], "prediction-in-range"),
        (["memory", "nano", "--dp", "4", "--memory-bytes", "0"], "out-of-range"),
        (["memory", "nano", "--dp", "4", "--pp", "2"], "bad-argument"),
        (["units"], "bad-argument"),
    ):
        assert main(["explain", *words]) == 2
        output = capsys.readouterr()
        assert output.out == ""
        assert output.err.startswith(f"error[{rule}]")
