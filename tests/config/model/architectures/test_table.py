"""Each model_type says shapes in keys that its reader knows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.config.model.architectures.table import ARCHITECTURES
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
