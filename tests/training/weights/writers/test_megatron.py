"""Folders of Megatron-core, as its ranks hold them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch

from tests.parallel.layouts import NANO
from tests.training.weights.test_export import drawn
from tests.training.weights.trainer_folders import stored_with_moments, written


def test_each_rank_has_its_part_and_the_last_stage_a_copy_of_tied_words(tmp_path: Path) -> None:
    shape = replace(NANO, tied=True)
    tensors = drawn(shape, 3)
    index = stored_with_moments(tmp_path / "checkpoint", tensors, {}, step=4)
    out = written("megatron-legacy", shape, tmp_path, index, tp=2, pp=2)
    half = shape.ffn // 2
    for rank in range(2):
        file = out / f"iter_0000004/mp_rank_{rank:02d}_001/model_optim_rng.pt"
        found = torch.load(file, weights_only=True)
        assert (found["iteration"], found["checkpoint_version"]) == (4, 3.0)
        layer, mine = shape.layers // 2, slice(rank * half, (rank + 1) * half)
        gate, up = (tensors[f"layers.{layer}.mlp.{one}.weight"][mine] for one in ("gate", "up"))
        model = found["model"]
        assert torch.equal(model["decoder.layers.0.mlp.linear_fc1.weight"], torch.cat((gate, up)))
        down = tensors[f"layers.{layer}.mlp.down.weight"][:, mine]
        assert torch.equal(model["decoder.layers.0.mlp.linear_fc2.weight"], down)
        assert model["output_layer.weight"].shape == (128, shape.hidden)


def test_a_folder_without_layout_says_its_format(tmp_path: Path) -> None:
    index = stored_with_moments(tmp_path / "checkpoint", drawn(NANO, 3), {}, step=4)
    out = written("megatron", NANO, tmp_path, index)
    said = json.loads((out / "iter_0000004/metadata.json").read_text())
    assert said["sharded_backend"] == "torch_dist"
    assert (out / "latest_checkpointed_iteration.txt").read_text() == "4"
