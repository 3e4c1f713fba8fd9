"""The tensors of a folder are every parameter once, in files of the size that was asked for."""

from __future__ import annotations

import json
from math import prod

import pytest

from echelon.core.parameters import num_parameters, parameters, router_biases
from echelon.interop.hugging_face.config_json import hub_config
from echelon.interop.hugging_face.folder import folder_tensors, index_text, share_out
from tests.training.weights.test_export import SHAPES


@pytest.mark.parametrize("name", SHAPES)
def test_every_parameter_is_in_the_folder_once(name: str) -> None:
    shape = SHAPES[name]
    tensors = folder_tensors(shape, hub_config(shape).architecture)
    parts = [part for tensor in tensors for part, _ in tensor.parts]
    specs = (*parameters(shape), *router_biases(shape))
    assert sorted(parts) == sorted(spec.name for spec in specs)
    assert sum(tensor.numel for tensor in tensors) == num_parameters(shape)
    for tensor in tensors:
        sizes = {spec.name: prod(spec.shape) for spec in specs}
        assert sum(sizes[part] for part, _ in tensor.parts) == tensor.numel


def test_files_are_as_large_as_was_asked_for_and_the_index_names_all() -> None:
    shape = SHAPES["llama"]
    tensors = folder_tensors(shape, hub_config(shape).architecture)
    assert list(share_out(tensors, 2, 10**9)) == ["model.safetensors"]
    files = share_out(tensors, 4, 5_000)
    assert next(iter(files)) == f"model-00001-of-{len(files):05d}.safetensors"
    for group in files.values():
        assert sum(one.numel for one in group) * 4 <= 5_000 or len(group) == 1
    index = json.loads(index_text(files, 4))
    assert index["metadata"]["total_size"] == 4 * num_parameters(shape)
    assert index["weight_map"] == {t.key: name for name, group in files.items() for t in group}
