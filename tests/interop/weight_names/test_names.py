"""A family is known by its keys, and norms of Gemma have an offset in files."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.core.parameters import parameters
from echelon.interop.weight_names.names import find_naming
from tests.parallel.layouts import NANO

KEYS = {
    "Llama": "model.embed_tokens.weight",
    "GPT-NeoX": "gpt_neox.embed_in.weight",
    "Falcon": "transformer.word_embeddings.weight",
    "GPT-2": "transformer.wte.weight",
    "Echelon": "embedding.weight",
}


@pytest.mark.parametrize("kind", KEYS)
def test_the_embedding_says_the_family(kind: str) -> None:
    naming = find_naming(NANO, [KEYS[kind]])
    assert naming is not None
    assert naming.kind == kind


def test_norms_have_the_offset_of_the_shape_in_files_of_others_alone() -> None:
    shape = replace(NANO, norm_offset=1.0)
    for kind, offset in (("Llama", 1.0), ("Echelon", 0.0)):
        naming = find_naming(shape, [KEYS[kind]])
        assert naming is not None
        for spec in parameters(shape):
            expected = offset if spec.name.endswith("norm.weight") else 0.0
            assert naming.sources[spec.name].offset == expected


def test_unknown_keys_are_no_family() -> None:
    assert find_naming(NANO, ["encoder.weight"]) is None
