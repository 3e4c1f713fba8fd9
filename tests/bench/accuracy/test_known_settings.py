"""Where all is known that decides memory, and what the predictions of such rows hit."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.accuracy.errors import errors, memory_pair
from bench.accuracy.memory_bands import with_memory_bands
from bench.accuracy.predict import Prediction, predict
from bench.accuracy.published.rows import Row, read_rows
from bench.accuracy.report import all_settings_known, known_rows, summary_text, to_json

DATA = Path(__file__).parents[3] / "bench" / "data"
CELLS = {
    "model": "Llama-2 7B",
    "layers": "32",
    "hidden": "4096",
    "ffn_hidden": "11008",
    "heads": "32",
    "kv_heads": "32",
    "vocab": "32000",
    "gated_mlp": "true",
    "seq_len": "4096",
    "gpu": "H100-80GB",
    "n_gpus": "8",
    "dp": "4",
    "tp": "2",
    "sp": "true",
    "pp": "1",
    "zero_stage": "1",
    "micro_batch": "1",
    "global_batch": "64",
    "framework": "Megatron-LM",
    "year": "2025",
    "precision": "bf16",
    "recompute": "none",
    "flash_attn": "true",
    "mem_kind": "allocated",
    "mem_per_gpu_gb": "40",
}


def known(**cells: str) -> bool:
    (one,) = predict([Row(id="r", cells={**CELLS, **cells})])
    return all_settings_known(one)


def test_a_row_of_plain_megatron_needs_no_dtypes_as_its_code_has_them() -> None:
    assert known()
    assert not known(framework="NeMo")
    assert known(framework="NeMo", gradient_dtype="bf16", state_dtype="fp32", loss="in-place")


@pytest.mark.parametrize(
    "cells",
    [
        {"recompute": ""},
        {"micro_batch": ""},
        {"flash_attn": ""},
        {"mem_kind": ""},
        {"mem_kind": "driver"},
        {"compile_fusion_notes": "inferred: loss"},
        {"compile_fusion_notes": "CUDA graphs of attention"},
        {"moe_experts": "8", "moe_topk": "2", "moe_ffn": "1408", "ep": "1", "etp": "1"},
    ],
)
def test_what_is_not_said_is_not_known(cells: dict[str, str]) -> None:
    assert not known(**cells)


def test_a_mixture_is_known_where_it_is_balanced_by_force() -> None:
    cells = {"moe_experts": "8", "moe_topk": "2", "moe_ffn": "1408", "ep": "1", "etp": "1"}
    assert known(**cells, compile_fusion_notes="mock data, forced balance")


def predicted(name: str) -> list[Prediction]:
    return with_memory_bands(predict(read_rows(DATA / f"{name}.csv")))


@pytest.mark.slow
def test_allocators_peaks_of_large_scale_trainers_are_hit() -> None:
    """Mean error at most 3 %; nanotron's, counted from its code, within 2 % each."""
    some = [*predicted("memory_runs"), *predicted("further_runs")]
    found = errors(known_rows(some), memory_pair)
    assert found is not None
    assert found.rows >= 45
    assert found.mean <= 0.03
    nano = [one for one in known_rows(some) if one.row.id.startswith("NANO-")]
    off = errors(nano, memory_pair)
    assert off is not None
    assert off.rows == 13
    assert max(abs(said / real - 1.0) for said, real in map(_pair, nano)) <= 0.02


def _pair(one: Prediction) -> tuple[float, float]:
    pair = memory_pair(one)
    assert pair is not None
    return pair


def test_the_report_tells_known_rows_and_bands_of_the_others() -> None:
    rows = [
        Row(id="a", cells=CELLS),
        Row(id="b", cells={**CELLS, "recompute": "", "mem_per_gpu_gb": "30"}),
    ]
    some = with_memory_bands(predict(rows))
    text = summary_text(some)
    assert "memory with all settings known" in text
    assert "of 1 other rows have their memory inside of its band" in text
    told = to_json(some)["known_memory"]
    assert isinstance(told, dict)
    assert told["others"] == 1


def test_memory_is_of_the_stage_that_a_row_names() -> None:
    cells = {**CELLS, "pp": "4", "dp": "1", "tp": "2", "sp": "false", "schedule": "1F1B"}
    rows = [
        Row(id=stage, cells={**cells, "mem_rank": stage})
        for stage in ("first stage", "last stage", "fullest")
    ]
    first, last, fullest = (one.allocated_gb for one in predict(rows))
    assert first is not None
    assert last is not None
    assert fullest == max(first, last)
    assert last < first
