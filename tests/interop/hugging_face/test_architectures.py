"""Each model_type says shapes in keys that its reader knows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.config.model.hugging_face import ARCHITECTURES
from echelon.interop.hugging_face.architectures import HUB_ARCHITECTURES
from tests.parallel.layouts import NANO


def test_every_architecture_that_is_read_is_written() -> None:
    assert set(HUB_ARCHITECTURES) == set(ARCHITECTURES)


def test_only_llama_wants_whole_heads() -> None:
    odd = replace(NANO, heads=6)
    refusals = {name: one.why_not(odd) for name, one in HUB_ARCHITECTURES.items()}
    assert [name for name, why in refusals.items() if why] == ["llama"]
    assert "model.hidden = 16 is no multiple of model.heads = 6 (16 % 6 = 4)" in refusals["llama"]


@pytest.mark.parametrize("name", HUB_ARCHITECTURES)
def test_a_class_of_transformers_has_the_name(name: str) -> None:
    import transformers

    assert getattr(transformers, HUB_ARCHITECTURES[name].name).config_class.model_type == name
