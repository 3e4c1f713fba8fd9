"""Folders of DeepSpeed: every stage, any number of ranks, and what is missing of them."""

from __future__ import annotations

import os
from pathlib import Path
from random import Random

import pytest
import torch

from echelon.core.errors import CheckpointError
from echelon.training.weights.files import find_weights
from tests.parallel.layouts import NANO
from tests.training.weights.hugging_face import llama_tensors
from tests.training.weights.rectangles import require_rectangles
from tests.training.weights.test_export import back
from tests.training.weights.trainer_folders import moments_back
from tests.training.weights.trainers.folders import deepspeed_zero, moment


@pytest.mark.parametrize(("stage", "ranks"), [(1, 2), (2, 3), (3, 2), (3, 5)])
def test_masters_and_moments_are_read_from_the_parts_of_all_ranks(
    stage: int, ranks: int, tmp_path: Path
) -> None:
    """Parameters begin and end in the middle of rows and of parts; padding is no part of them."""
    tensors = llama_tensors(NANO)
    deepspeed_zero(tmp_path, tensors, stage, ranks)
    whole = back(tmp_path, NANO)
    assert torch.equal(
        whole["layers.1.mlp.up.weight"], tensors["model.layers.1.mlp.up_proj.weight"]
    )
    assert torch.equal(whole["norm.weight"], tensors["model.norm.weight"])
    require_rectangles(tmp_path, NANO, whole, Random(ranks), 3)
    for kind, named in moments_back(tmp_path, NANO).items():
        for name, one in named.items():
            assert torch.equal(one, moment(whole[name], kind))
    assert find_weights(tmp_path, NANO).step == 3


def test_without_an_optimizer_the_values_of_the_module_are_read(tmp_path: Path) -> None:
    tensors = llama_tensors(NANO)
    tag = deepspeed_zero(tmp_path, tensors, 1, 2)
    for file in tag.glob("*_optim_states.pt"):
        file.unlink()
    expected = tensors["model.norm.weight"].bfloat16().float()
    assert torch.equal(back(tag, NANO)["norm.weight"], expected)


def test_the_files_of_missing_ranks_are_named(tmp_path: Path) -> None:
    tag = deepspeed_zero(tmp_path, llama_tensors(NANO), 3, 4)
    (tag / "zero_pp_rank_2_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(CheckpointError, match=r"written by 4 ranks.*those of rank 2") as caught:
        find_weights(tmp_path, NANO)
    assert caught.value.rules == ("weights-ranks-complete",)


def test_a_folder_without_states_of_the_module_is_refused(tmp_path: Path) -> None:
    tag = deepspeed_zero(tmp_path, llama_tensors(NANO), 1, 2)
    (tag / "mp_rank_00_model_states.pt").unlink()
    with pytest.raises(CheckpointError, match="no states of the module") as caught:
        find_weights(tmp_path, NANO)
    assert caught.value.rules == ("weights-ranks-complete",)


def test_a_file_that_was_cut_short_is_refused(tmp_path: Path) -> None:
    tag = deepspeed_zero(tmp_path, llama_tensors(NANO), 1, 2)
    file = tag / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(CheckpointError, match="was cut short") as caught:
        find_weights(tmp_path, NANO)
    assert caught.value.rules == ("weights-file-readable",)


def test_modules_that_are_cut_are_refused_by_name(tmp_path: Path) -> None:
    tag = deepspeed_zero(tmp_path, llama_tensors(NANO), 1, 2)
    torch.save({"module": {}}, tag / "mp_rank_01_model_states.pt")
    with pytest.raises(CheckpointError, match="cut over tensor ranks") as caught:
        find_weights(tmp_path, NANO)
    assert caught.value.rules == ("weights-trainer-known",)


def test_a_model_of_another_shape_lacks_what_the_folder_has_not(tmp_path: Path) -> None:
    from dataclasses import replace

    deepspeed_zero(tmp_path, llama_tensors(NANO), 1, 2)
    with pytest.raises(CheckpointError, match="of a model of another shape") as caught:
        find_weights(tmp_path, replace(NANO, ffn=NANO.ffn + 4))
    assert caught.value.rules == ("weights-shape",)


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
