"""Blocks like those of gpt-oss in a Megatron-LM command: windows, sinks, gates and biases."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from echelon.core.model_shape import Experts
from echelon.interop.importer import import_file
from echelon.interop.megatron.read_model import layer_pattern
from echelon.interop.megatron.write import WRITER
from tests.interop.imports import Imports, rows_of
from tests.interop.megatron.commands import small
from tests.interop.plans import job_of

SPARSE = "--num-experts 8 --normalization RMSNorm --position-embedding-type rope"
CLAMPED = "--quick-geglu --activation-func-clamp-value 7.0 --glu-linear-offset 1.0"
GPT_OSS = (
    f"{SPARSE} {CLAMPED} --ffn-hidden-size 96 --moe-router-topk 4 --softmax-type learnable "
    "--moe-grouped-gemm --window-size 127,0 --window-attn-skip-freq 2 --group-query-attention "
    "--num-query-groups 2 --rotary-base 150000 --untie-embeddings-and-output-weights"
)


@pytest.fixture
def megatron(tmp_path: Path) -> Imports:
    return Imports(tmp_path, "megatron")


def test_a_command_of_the_shape_of_gpt_oss_plans(megatron: Imports) -> None:
    model = megatron(small(GPT_OSS)).job.plan.model
    assert model.experts == Experts(
        num_experts=8,
        top_k=4,
        ffn=96,
        renormalise=True,
        logit_bias=True,
        bias=True,
        limit=7.0,
        alpha=1.702,
    )
    assert (model.window, model.layer_kinds, model.sinks) == (128, ("local", "global"), True)
    assert (model.qkv_bias, model.output_bias, model.mlp_bias) == (True, True, False)
    assert (model.gated, model.kv_heads) == (True, 2)


def test_it_is_written_as_it_was_read(megatron: Imports) -> None:
    plan = megatron(small(GPT_OSS)).job.plan
    flags = WRITER.keys(plan, {})
    assert "--swiglu" not in flags
    assert "--disable-bias-linear" not in flags
    assert flags["--window-attn-skip-freq"] == "[1,0,1,0]"
    assert [flags[key] for key in ("--softmax-type", "--glu-linear-offset")] == ["learnable", 1.0]
    assert not list(WRITER.unsupported(plan))
    words = " ".join(
        f"{flag}" if value is True else f"{flag} '{value}'"
        for flag, value in flags.items()
        if value is not None and value is not False
    )
    again = megatron(f"torchrun pretrain_gpt.py {words}").job.plan.model
    assert again == replace(plan.model, name=again.name)


def test_what_experts_have_is_no_gate_of_a_dense_mlp(megatron: Imports) -> None:
    (row,) = megatron.refused(small(CLAMPED))
    assert row == ("import-not-honoured", "--quick-geglu")
    shared = f"{SPARSE} {CLAMPED} --disable-bias-linear"
    for more in (
        "--moe-shared-expert-intermediate-size 256",
        "--moe-layer-freq ([0]*1+[1]*3)",
    ):
        assert ("import-not-honoured", "--quick-geglu") in megatron.refused(
            small(f"{shared} {more}")
        )


@pytest.mark.parametrize(
    "more", ["", "--activation-func-clamp-value 7.0", "--glu-linear-offset 1.0"]
)
def test_a_gate_of_experts_is_clamped_and_has_an_offset_or_neither(
    megatron: Imports, more: str
) -> None:
    text = small(f"{SPARSE} --disable-bias-linear --quick-geglu {more}")
    assert ("import-not-honoured", "--quick-geglu") in megatron.refused(text)


@pytest.mark.parametrize("flag", ["--activation-func-clamp-value 7.0", "--glu-linear-offset 1.0"])
def test_silu_has_no_bound_and_no_offset(megatron: Imports, flag: str) -> None:
    assert megatron.refused(small(f"--swiglu {flag}")) == [
        ("import-not-honoured", flag.partition(" ")[0])
    ]
    found = megatron(small(flag))
    (row,) = rows_of(found, flag.partition(" ")[0])
    assert (row.fate, row.why) == ("without effect", "it is about gates")


def test_a_gate_without_silu_is_as_wide_as_no_gate_by_default(megatron: Imports) -> None:
    """Megatron-LM takes two thirds of 4 hidden with --swiglu only."""
    text = small(f"{SPARSE} {CLAMPED} --moe-router-topk 4 --disable-bias-linear")
    model = megatron(text).job.plan.model
    assert model.experts is not None
    assert (model.ffn, model.experts.ffn) == (256, 256)
    model = megatron(small(f"{SPARSE} --disable-bias-linear --swiglu")).job.plan.model
    assert model.ffn == 128


def test_biases_of_experts_are_added_before_their_gate_is_clamped(megatron: Imports) -> None:
    """Megatron-LM's fused kernel of one expert clamps first; grouped ones, and plain ones, last."""
    text = small(f"{SPARSE} {CLAMPED} --moe-router-topk 4")
    (problem,) = megatron.problems(text)
    assert problem.message.startswith("--quick-geglu = true: biases of experts are added before")
    assert problem.suggestions[:2] == ("--moe-grouped-gemm", "--no-bias-gelu-fusion")
    for flag in problem.suggestions[:2]:
        found = megatron(f"{text} {flag}")
        assert found.job.plan.model.experts is not None
        assert (found.job.plan.model.experts.bias, found.job.plan.model.experts.limit) == (True, 7)
        assert [row.fate for row in rows_of(found, flag)] == ["taken"]
        plain = megatron(f"{text} {flag} --disable-bias-linear")
        assert [row.fate for row in rows_of(plain, flag)] == ["without effect"]


def test_two_gates_are_a_conflict(megatron: Imports) -> None:
    refused = megatron.refused(small(f"{SPARSE} --disable-bias-linear --swiglu {CLAMPED}"))
    assert ("import-conflict", "--swiglu, --quick-geglu") in refused


def test_sinks_are_learned(megatron: Imports) -> None:
    assert megatron(small("--softmax-type learnable")).job.plan.model.sinks
    assert not megatron(small("--softmax-type vanilla")).job.plan.model.sinks
    (problem,) = megatron.problems(small("--softmax-type off-by-one"))
    assert problem.rule == "import-not-honoured"
    assert "none that stays 0" in problem.message
    latent = (
        "--multi-latent-attention --q-lora-rank 48 --qk-layernorm --rope-type rope "
        "--position-embedding-type rope --disable-bias-linear --softmax-type learnable"
    )
    assert megatron.refused(small(latent)) == [("import-not-honoured", "--softmax-type")]


def test_experts_and_their_router_have_the_biases_of_all_products(megatron: Imports) -> None:
    biased = megatron(small(f"{SPARSE} --swiglu")).job.plan.model
    assert biased.experts is not None
    assert (biased.experts.bias, biased.experts.logit_bias) == (True, True)
    assert (biased.output_bias, biased.mlp_bias) == (True, False)
    plain = megatron(small(f"{SPARSE} --swiglu --disable-bias-linear")).job.plan.model
    assert plain.experts is not None
    assert (plain.experts.bias, plain.experts.logit_bias) == (False, False)
    dense = small(f"{SPARSE} --swiglu --moe-layer-freq ([0]*1+[1]*3)")
    assert ("import-not-honoured", "--disable-bias-linear") in megatron.refused(dense)


@pytest.mark.parametrize("written", ["7,0", "(7,0)", "7, 0", "(7, 0)"])
def test_a_window_has_keys_before_the_query_and_its_own(megatron: Imports, written: str) -> None:
    assert megatron(small(f"--window-size '{written}'")).job.plan.model.window == 8


@pytest.mark.parametrize("written", ["-1,0", "(-1, 0)"])
def test_a_window_of_minus_one_is_none(megatron: Imports, written: str) -> None:
    found = megatron(small(f"--window-size '{written}' --window-attn-skip-freq 2"))
    assert found.job.plan.model.window is None


@pytest.mark.parametrize("written", ["7", "-1,-1", "-2,0", "7,7", "7,-1", "all"])
def test_a_window_behind_the_query_is_refused(megatron: Imports, written: str) -> None:
    refused = megatron.refused(small(f"--window-size {written}"))
    assert refused == [("import-not-honoured", "--window-size")]


@pytest.mark.parametrize(
    ("written", "kinds"),
    [
        ("2", ("local", "global")),
        ("4", ("local", "local", "local", "global")),
        ("[1,1,0,0]", ("local", "local", "global", "global")),
        ("([1,0]*2)", ("local", "global")),
        ("[1]*4", ()),
    ],
)
def test_layers_that_skip_the_window(
    megatron: Imports, written: str, kinds: tuple[str, ...]
) -> None:
    text = small(f"--window-size 7,0 --window-attn-skip-freq '{written}'")
    model = megatron(text).job.plan.model
    assert (model.window, model.layer_kinds) == (8, kinds)


@pytest.mark.parametrize("written", ["1", "[0]*4"])
def test_a_window_that_no_layer_has_is_none(megatron: Imports, written: str) -> None:
    text = small(f"--window-size 7,0 --window-attn-skip-freq '{written}'")
    assert megatron(text).job.plan.model.window is None


@pytest.mark.parametrize("written", ["[1,0]", "[1]*5", "[2,0,0,0]", "one"])
def test_a_pattern_is_one_bit_for_each_layer(megatron: Imports, written: str) -> None:
    refused = megatron.refused(small(f"--window-size 7,0 --window-attn-skip-freq '{written}'"))
    assert refused == [("import-not-honoured", "--window-attn-skip-freq")]


def test_skips_without_a_window_have_no_effect(megatron: Imports) -> None:
    (row,) = rows_of(megatron(small("--window-attn-skip-freq 2")), "--window-attn-skip-freq")
    assert row.fate == "without effect"


@pytest.mark.parametrize(
    ("text", "bits"),
    [
        ("[1,0]", (1, 0)),
        ("([1]*2+[0])*2", (1, 1, 0, 1, 1, 0)),
        ([0, 1], (0, 1)),
        ([True, False], None),
        ("[]", None),
        ("[1]*0", None),
        ("[1]*100000", None),
        ("([1]*10000)*10000", None),
        ("__import__('os')", None),
        ("(" * 5000, None),
    ],
)
def test_a_pattern_is_parsed_and_never_run(text: object, bits: tuple[int, ...] | None) -> None:
    assert layer_pattern(text) == bits


def test_a_window_of_some_layers_is_exported() -> None:
    settings = ("model.window=64", 'model.layer_kinds=["global","local"]', "model.sinks=true")
    plan = job_of(settings).plan
    found = WRITER.keys(plan, {})
    assert found["--window-attn-skip-freq"] == "[0,1,0,1]"
    assert found["--softmax-type"] == "learnable"


def test_the_stock_command_of_gpt_oss_keeps_its_blocks(tmp_path: Path) -> None:
    path = Path(__file__).parents[1] / "stock" / "megatron" / "gpt_oss.sh"
    found = import_file(path)
    values = {key: entry.value for key, entry in found.settings.items()}
    assert values["model.experts.limit"] == 7.0
    assert values["model.sinks"] is True
    assert values["model.layer_kinds"] == ["local", "global"]
    assert "layer_kinds" in found.to_toml(tmp_path)


LAUNCH = (
    "torchrun --nproc-per-node 4 pretrain_gpt.py --micro-batch-size 2 --lr 3e-4 --train-iters 100 "
    "--attention-dropout 0 --seq-length 32"
)
BASE = """
[model]
preset = "nano"
window = 32
layer_kinds = ["local", "global"]
"""
CLAMPED_BASE = """
[model]
preset = "nano"
tied = false
[model.experts]
num_experts = 8
top_k = 2
ffn = 64
limit = 5.0
alpha = 1.5
"""


@pytest.mark.parametrize(
    ("flags", "window"),
    [
        ("--window-size 63,0 --window-attn-skip-freq [1,1,1,1]", 64),
        ("--window-size 63,0 --window-attn-skip-freq 1", None),
        ("--window-size 63,0 --window-attn-skip-freq [0]*4", None),
        ("--window-size -1,0", None),
    ],
)
def test_layers_of_a_base_become_alike(
    megatron: Imports, tmp_path: Path, flags: str, window: int | None
) -> None:
    base = tmp_path / "base.toml"
    base.write_text(BASE, encoding="utf-8")
    model = megatron(f"{LAUNCH} {flags}", extends=str(base)).job.plan.model
    assert (model.window, model.layer_kinds) == (window, ())
    silent = megatron(f"{LAUNCH} --window-size 63,0", extends=str(base)).job.plan.model
    assert (silent.window, silent.layer_kinds) == (64, ("local", "global"))


def test_silu_takes_the_clamp_of_a_base_away(megatron: Imports, tmp_path: Path) -> None:
    base = tmp_path / "base.toml"
    base.write_text(CLAMPED_BASE, encoding="utf-8")
    before = megatron(LAUNCH, extends=str(base)).job.plan.model.experts
    after = megatron(f"{LAUNCH} --swiglu", extends=str(base)).job.plan.model.experts
    assert before is not None
    assert after is not None
    assert (before.limit, before.alpha) == (5.0, 1.5)
    assert (after.limit, after.alpha) == (None, 1.702)
