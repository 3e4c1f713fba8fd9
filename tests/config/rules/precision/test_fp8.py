"""Products of 8-bit numbers: which widths, dtypes and devices, and advice that can be taken."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.config.load import load_job
from tests.config.problems import SPARSE, problems_of, write
from tests.config.suggestions import taken

FP8 = ["precision.matmul=fp8"]
H100 = ["cluster.preset=8xh100", "precision.parameters=bf16"]


def said(run: str, sets: list[str], rule: str) -> str:
    """Return what the one broken rule says; every change that it names must mend it."""
    found = problems_of(run, sets)
    assert list(found) == [rule]
    for advice in found[rule].suggestions:
        text = advice if "=" in advice else f"{found[rule].key} = {advice}"
        assert rule not in problems_of(run, taken(text, sets)), text
    assert found[rule].suggestions
    return found[rule].message


def test_whole_tiles_are_accepted() -> None:
    plan = load_job("llama3-8b", [*FP8, *H100, "mesh.tp=8"]).plan
    assert plan.mathematics.precision.is_fp8
    assert plan.mathematics.precision.fp8_block == 128


@pytest.mark.parametrize(
    ("sets", "says"),
    [
        ([], "kv_heads x head_dim / mesh.tp = 64 / 1 is no multiple of precision.fp8_block = 128"),
        (["precision.fp8_block=64"], "ffn / mesh.tp = 352 / 1 is no multiple"),
        (["precision.fp8_block=32", "mesh.tp=2"], "ffn / mesh.tp = 352 / 2 is no multiple"),
        (["precision.fp8_block=48"], "hidden = 128 is no multiple of precision.fp8_block = 48"),
    ],
)
def test_a_tile_that_is_cut_is_refused(sets: list[str], says: str) -> None:
    assert says in said("nano", [*FP8, *sets], "fp8-block-divides")


def test_a_degree_that_cuts_tiles_names_those_that_do_not() -> None:
    sets = [*FP8, *H100, "mesh.tp=4", "model.kv_heads=4", "model.head_dim=96"]
    found = problems_of("llama3-8b", sets)["fp8-block-divides"]
    assert found.message.startswith("kv_heads x head_dim / mesh.tp = 384 / 4 is no multiple")
    assert "1" in found.suggestions


def test_widths_of_experts_count(tmp_path: Path) -> None:
    sparse = write(tmp_path, SPARSE)
    sets = [*FP8, "precision.fp8_block=24"]
    assert problems_of(str(sparse), sets) == {}
    cut = [*sets, "mesh.tp=2", "experts.expert_tp=2", "model.head_dim=8"]
    message = problems_of(str(sparse), cut)["fp8-block-divides"].message
    assert "experts.ffn / experts.expert_tp = 24 / 2" in message


def test_widths_of_latent_attention_count() -> None:
    assert "fp8-block-divides" not in problems_of("deepseek-v3", [*FP8, *H100])
    found = problems_of("deepseek-v3", [*FP8, *H100, "model.latent.kv_rank=500"])
    assert "latent.kv_rank = 500" in found["fp8-block-divides"].message


def test_fp16_is_refused() -> None:
    sets = [*FP8, "precision.fp8_block=32", "precision.parameters=fp16"]
    found = problems_of("nano", [*sets, "precision.loss_scaling=dynamic"])
    assert "2^-126" in found["fp8-parameters"].message


@pytest.mark.parametrize("device", ["8xa100-80gb", "8xv100-32gb", "8xt4"])
def test_a_device_without_8_bit_floats_is_refused(device: str) -> None:
    sets = [*FP8, f"cluster.preset={device}", "precision.parameters=bf16"]
    found = problems_of("llama3-8b", sets)
    assert "has no peak of fp8" in found["fp8-device"].message


def test_other_tiles_are_for_a_cpu() -> None:
    message = said("llama3-8b", [*FP8, *H100, "precision.fp8_block=64"], "fp8-block-of-kernels")
    assert "128 share a scale" in message


def test_a_block_without_8_bit_numbers_has_no_effect() -> None:
    assert "nothing is in 8 bits" in said("nano", ["precision.fp8_block=32"], "no-effect")


@pytest.mark.parametrize(
    "setting", ["fp8_scales=tensor", "fp8_history=8", "fp8_gradients=e5m2", "fp8_block=32"]
)
def test_settings_of_8_bit_numbers_need_such_numbers(setting: str) -> None:
    assert "nothing is in 8 bits" in said("nano", [f"precision.{setting}"], "no-effect")


def test_a_history_without_scales_of_tensors_has_no_effect() -> None:
    sets = [*FP8, *H100, "precision.fp8_history=8"]
    assert "its own largest number" in said("llama3-8b", sets, "no-effect")


def test_scales_of_tensors_need_a_device_with_8_bit_floats() -> None:
    sets = [*FP8, "precision.fp8_scales=tensor", "precision.parameters=bf16"]
    found = problems_of("llama3-8b", [*sets, "cluster.preset=8xa100-80gb"])
    assert "has no peak of fp8" in found["fp8-device"].message


def test_gradients_of_whole_tensors_are_e5m2_where_nothing_is_said() -> None:
    for scales, kind in (("block", "e4m3"), ("tensor", "e5m2")):
        job = load_job("llama3-8b", [*FP8, *H100, f"precision.fp8_scales={scales}"])
        assert job.plan.mathematics.precision.fp8_gradients == kind
    sets = [*FP8, *H100, "precision.fp8_gradients=e5m2"]
    assert load_job("llama3-8b", sets).plan.mathematics.precision.fp8_gradients == "e5m2"


@pytest.mark.parametrize("overlap", ["ring", "symmetric-memory"])
def test_rows_in_8_bits_travel_at_once(overlap: str) -> None:
    sets = [*FP8, *H100, "mesh.tp=2", "mesh.sequence_parallel=true", f"mesh.tp_overlap={overlap}"]
    message = said("llama3-8b", sets, "fp8-gathers-at-once")
    assert "in no chunks" in message


GATHER = ["zero.gather=fp8", "mesh.dp_shard=2"]
CODES = [*GATHER, "zero.stage=3", "precision.fp8_block=32"]


def test_codes_are_gathered_of_what_is_cut_and_multiplied_in_8_bits() -> None:
    assert load_job("nano", [*FP8, *CODES]).plan.layout.zero.gather == "fp8"
    bf16 = said("nano", CODES[:-1], "fp8-gather-needs-codes")
    assert bf16.endswith('precision.matmul = "parameters" multiplies no weight in 8 bits')
    low = [*FP8, *GATHER, "zero.stage=2", "precision.fp8_block=32"]
    whole = said("nano", low, "fp8-gather-needs-codes")
    assert whole.endswith("zero.stage = 2 keeps weights whole: 2 < 3")


def test_codes_are_gathered_of_experts_alone(tmp_path: Path) -> None:
    sparse = str(write(tmp_path, SPARSE))
    sets = [*FP8, *GATHER, "precision.fp8_block=8", "zero.stage=1"]
    assert problems_of(sparse, [*sets, "experts.zero_stage=3"]) == {}
    low = said(sparse, [*sets, "experts.zero_stage=2"], "fp8-gather-needs-codes")
    assert "zero.stage = 1 and experts.zero_stage = 2 keeps weights whole" in low


def test_codes_are_made_on_the_device_and_of_squares() -> None:
    away = [*FP8, *CODES, "zero.parameter_offload=host", "zero.optimizer_offload=host"]
    assert "slices that are on the device" in said("nano", away, "fp8-gather-on-device")
    whole = [*FP8, *CODES, "precision.fp8_scales=tensor"]
    assert "the scales of squares" in said("nano", whole, "fp8-gather-of-squares")


def test_scales_of_whole_tensors_want_gradients_of_one_scale() -> None:
    whole = [*FP8, "precision.fp8_block=32", "precision.fp8_scales=tensor"]
    assert load_job("nano", whole).plan.mathematics.precision.has_tensor_scales
    scaled = [*whole, "precision.reduction=fp16", "precision.loss_scaling=dynamic"]
    message = said("nano", scaled, "fp8-history-of-gradients")
    assert "a loss scale that doubles doubles gradients" in message


@pytest.mark.parametrize("extra", ["bias=true", "limit=7.0"])
def test_experts_in_8_bits_are_plain(extra: str) -> None:
    sets = [*FP8, *H100, f"model.experts.{extra}"]
    message = said("mixtral-8x7b", sets, "fp8-experts-are-plain")
    assert f"model.experts.{extra.replace('=', ' = ')}" in message
    assert "fp8-experts-are-plain" not in problems_of("mixtral-8x7b", [*FP8, *H100])


def test_queries_out_of_the_stream_have_no_width_of_their_own() -> None:
    sets = [*FP8, *H100, "model.latent.query_rank=none"]
    assert "fp8-block-divides" not in problems_of("deepseek-v3", sets)
