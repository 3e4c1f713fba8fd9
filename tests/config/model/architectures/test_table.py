"""Each model_type says shapes in keys that its reader knows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from echelon.config.model.architectures.table import ARCHITECTURES
from echelon.config.model.hugging_face import config_entries
from echelon.core.rulebook.model import HF_CONFIG_MODEL_TYPE
from tests.parallel.layouts import NANO


def test_llama_and_gemma_want_whole_heads() -> None:
    odd = replace(NANO, heads=6)
    refusals = {name: one.why_not(odd) for name, one in ARCHITECTURES.items()}
    assert [name for name, why in refusals.items() if why] == ["llama", "gemma2", "gemma3_text"]
    assert "model.hidden = 16 is no multiple of model.heads = 6 (16 % 6 = 4)" in refusals["llama"]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_class_of_transformers_has_the_name(name: str) -> None:
    import transformers

    assert getattr(transformers, ARCHITECTURES[name].name).config_class.model_type == name


@pytest.mark.parametrize(
    ("kind", "lacks"),
    [
        ("llama4_text", ("chunks of the sequence", "scale queries by the position", "weighted")),
        ("qwen3_next", ("Gated DeltaNet", "a gate on the output", "its shared expert has a gate")),
    ],
)
def test_what_a_family_lacks_here_is_said(kind: str, lacks: tuple[str, ...]) -> None:
    config = {"model_type": kind, "num_hidden_layers": 4, "hidden_size": 64}
    entries, problems = config_entries(config, Path("config.json"), "test")
    assert entries == {}
    (problem,) = problems
    assert problem.rule == HF_CONFIG_MODEL_TYPE.id
    for part in (kind, "is not computed", "What there is", *lacks):
        assert part in problem.message
