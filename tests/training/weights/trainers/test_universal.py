"""Universal folders of DeepSpeed: with shapes and flat, and what is missing of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from echelon.core.errors import CheckpointError
from echelon.training.weights.files import find_weights
from tests.parallel.layouts import NANO
from tests.training.weights.hugging_face import llama_tensors
from tests.training.weights.test_export import back
from tests.training.weights.trainer_folders import moments_back


def universal(folder: Path, *, flat: bool) -> Path:
    """Write a folder as ds_to_universal does: of runs at stage 3 tensors are flat, alone."""
    tag = folder / "global_step5_universal"
    tensors = llama_tensors(NANO)
    for name, one in tensors.items():
        room = tag / "zero" / name
        room.mkdir(parents=True)
        for kind, value in (("fp32", one), ("exp_avg", one * 2), ("exp_avg_sq", one * 3)):
            torch.save(
                value.flatten() if flat else {"param": value, "cat_dim": 0}, room / f"{kind}.pt"
            )
        torch.save(5, room / "step.pt")
    shapes = {name: one.shape for name, one in tensors.items()}
    torch.save({"module": {}, "param_shapes": [shapes]}, tag / "mp_rank_00_model_states.pt")
    (folder / "latest_universal").write_text(tag.name)
    return tag


@pytest.mark.parametrize("flat", [False, True])
def test_weights_moments_and_the_step_are_read(flat: bool, tmp_path: Path) -> None:
    universal(tmp_path, flat=flat)
    whole = back(tmp_path, NANO)
    expected = llama_tensors(NANO)["model.layers.0.mlp.down_proj.weight"]
    assert torch.equal(whole["layers.0.mlp.down.weight"], expected)
    moments = moments_back(tmp_path, NANO)
    assert torch.equal(moments["exp_avg"]["layers.0.mlp.down.weight"], expected * 2)
    assert torch.equal(moments["exp_avg_sq"]["head.weight"], whole["head.weight"] * 3)
    assert find_weights(tmp_path, NANO).step == 5


def test_parameters_without_values_are_named(tmp_path: Path) -> None:
    tag = universal(tmp_path, flat=False)
    (tag / "zero" / "lm_head.weight" / "fp32.pt").unlink()
    with pytest.raises(CheckpointError, match=r"no fp32\.pt of lm_head\.weight") as caught:
        find_weights(tmp_path, NANO)
    assert caught.value.rules == ("weights-ranks-complete",)
