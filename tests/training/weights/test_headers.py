"""Headers of safetensors files: one file and an index of several say the same."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from echelon.training.weights.headers import read_headers


def test_a_file_and_an_index_say_the_same_tensors(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}
    save_file(tensors, tmp_path / "whole.safetensors")
    for name, one in tensors.items():
        save_file({name: one}, tmp_path / f"{name}.safetensors")
    index = {"weight_map": {name: f"{name}.safetensors" for name in tensors}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    found = read_headers(tmp_path / "whole.safetensors")
    parts = read_headers(tmp_path)
    for name, one in found.items():
        assert (parts[name].dtype, parts[name].shape) == (one.dtype, one.shape)
        assert one.num_bytes == tensors[name].nbytes
        assert one.lacking == 0
    assert found["b"].dtype == "BF16"
