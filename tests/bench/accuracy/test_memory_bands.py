"""The band of a row's memory covers what the row does not say."""

from __future__ import annotations

from bench.accuracy.memory_bands import with_memory_bands
from bench.accuracy.predict import predict
from bench.accuracy.published.rows import Row

CELLS = {
    "model": "Llama-2 7B",
    "seq_len": "4096",
    "gpu": "H100-80GB",
    "n_gpus": "8",
    "tp": "2",
    "pp": "1",
    "micro_batch": "1",
    "global_batch": "64",
    "framework": "Megatron-LM",
    "year": "2023",
    "precision": "bf16",
    "mem_per_gpu_gb": "40",
}


def band(**cells: str) -> tuple[float, float, float]:
    """Return the least, the number and the most of a row's memory."""
    (one,) = with_memory_bands(predict([Row(id="r", cells={**CELLS, **cells})]))
    assert one.memory_gb is not None
    assert one.memory_band_gb is not None
    low, high = one.memory_band_gb
    return low, one.memory_gb, high


def test_unknown_recompute_widens_the_band_and_does_not_shrink_the_number() -> None:
    full = band(recompute="full", flash_attn="true")
    none = band(recompute="none", flash_attn="true")
    low, number, high = band(flash_attn="true")
    assert low <= full[1] < none[1] <= high
    assert number == none[1]


def test_unknown_attention_covers_scores_that_are_kept() -> None:
    unfused = band(recompute="none", flash_attn="false", seq_len="1024")
    low, number, high = band(recompute="none", seq_len="1024")
    assert low < number < unfused[1] <= high


def test_what_a_recipe_does_not_say_is_in_its_band() -> None:
    recipe = {"framework": "NeMo", "recompute": "none", "flash_attn": "true", "year": "2025"}
    named = {"gradient_dtype": "fp32", "loss": "whole"}
    low, _, high = band(**recipe)
    assert low < band(**recipe, **named)[1] <= high
    lean = {"gradient_dtype": "bf16", "state_dtype": "bf16", "master_dtype": "fp32"}
    assert low <= band(**recipe, **lean)[1]


def test_a_row_that_was_refused_has_no_band() -> None:
    (one,) = with_memory_bands(predict([Row(id="r", cells={"model": "?"})]))
    assert one.memory_band_gb is None
