"""Folders of torch.distributed.checkpoint, written by torch itself."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_saver import save

from echelon.core.errors import CheckpointError
from echelon.training.weights.files import find_weights
from tests.parallel.layouts import NANO
from tests.training.weights.hugging_face import llama_tensors
from tests.training.weights.rectangles import require_rectangles
from tests.training.weights.test_export import back, drawn
from tests.training.weights.trainer_folders import moments_back, stored_with_moments, written

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def saved(folder: Path, state: dict[str, Any]) -> Path:
    """Save a state as one process does."""
    save(state, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.mark.parametrize("wrapper", ["", "model"])
def test_names_of_transformers_and_of_our_own_are_read(wrapper: str, tmp_path: Path) -> None:
    for place, tensors in enumerate((llama_tensors(NANO), drawn(NANO, 3))):
        state: dict[str, Any] = {wrapper: tensors} if wrapper else dict(tensors)
        folder = saved(tmp_path / str(place), {**state, "train_state": {"step": 5}})
        whole = back(folder, NANO)
        key = "model.norm.weight" if place == 0 else "norm.weight"
        assert torch.equal(whole["norm.weight"], tensors[key])
        require_rectangles(folder, NANO, whole, Random(place), 2)


def test_moments_are_found_by_the_names_of_their_weights(tmp_path: Path) -> None:
    tensors = drawn(NANO, 3)
    state: dict[str, Any] = dict(tensors)
    for name, one in tensors.items():
        state[f"optimizer.state.{name}.exp_avg"] = one * 2
        state[f"optimizer.state.{name}.exp_avg_sq"] = one * 3
        state[f"optimizer.state.{name}.step"] = torch.tensor(9.0)
    folder = saved(tmp_path / "dcp", state)
    assert find_weights(folder, NANO).step == 9
    found = moments_back(folder, NANO)
    assert torch.equal(found["exp_avg_sq"]["norm.weight"], tensors["norm.weight"] * 3)
    assert torch.equal(found["exp_avg"]["embedding.weight"], tensors["embedding.weight"] * 2)


def test_layers_of_megatron_core_are_taken_apart(tmp_path: Path) -> None:
    tensors = drawn(NANO, 4)
    index = stored_with_moments(tmp_path / "checkpoint", tensors, {}, step=6)
    out = written("megatron", NANO, tmp_path, index)
    reader = FileSystemReader(out / "iter_0000006")
    sizes = reader.read_metadata().state_dict_metadata
    stacked: Any = sizes["decoder.layers.mlp.linear_fc1.weight"]
    assert tuple(stacked.size) == (NANO.layers, 2 * NANO.ffn, NANO.hidden)
    for name, one in back(out, NANO).items():
        assert torch.equal(one, tensors[name]), name
    assert find_weights(out, NANO).step == 6


def test_files_that_are_missing_are_named(tmp_path: Path) -> None:
    folder = saved(tmp_path / "dcp", dict(drawn(NANO, 3)))
    (folder / "__0_0.distcp").unlink()
    with pytest.raises(CheckpointError, match=r"missing: __0_0\.distcp") as caught:
        find_weights(folder, NANO)
    assert caught.value.rules == ("weights-file-exists",)


def test_a_file_that_was_cut_short_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "dcp", dict(drawn(NANO, 3)))
    file = folder / "__0_0.distcp"
    os.truncate(file, file.stat().st_size - 2000)
    with pytest.raises(CheckpointError, match="cut short") as caught:
        find_weights(folder, NANO)
    assert caught.value.rules == ("weights-file-readable",)


def test_metadata_that_is_none_is_refused_and_runs_nothing(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "ran"),)

    for content in (b"junk", pickle.dumps(Evil()), pickle.dumps({"a": 1})):
        (tmp_path / ".metadata").write_bytes(content)
        with pytest.raises(CheckpointError) as caught:
            find_weights(tmp_path, NANO)
        assert caught.value.rules == ("weights-file-readable",)
    assert not (tmp_path / "ran").exists()


def test_what_is_left_over_and_what_is_lacking_is_said_at_once(tmp_path: Path) -> None:
    tensors: dict[str, Any] = dict(drawn(NANO, 3))
    tensors["layers.0.attention.sinks"] = tensors.pop("norm.weight")
    with pytest.raises(CheckpointError) as caught:
        find_weights(saved(tmp_path / "dcp", tensors), NANO)
    assert caught.value.rules == ("weights-complete", "weights-known")


def test_names_of_nobody_are_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "dcp", {"encoder.weight": torch.zeros(2, 2)})
    with pytest.raises(CheckpointError, match="neither Llama's") as caught:
        find_weights(folder, NANO)
    assert caught.value.rules == ("weights-known",)


def test_other_dtypes_are_refused(tmp_path: Path) -> None:
    tensors: dict[str, Any] = dict(drawn(NANO, 3))
    tensors["norm.weight"] = tensors["norm.weight"].to(torch.int32)
    with pytest.raises(CheckpointError, match="not plain floating point") as caught:
        find_weights(saved(tmp_path / "dcp", tensors), NANO)
    assert caught.value.rules == ("weights-dtype",)


@pytest.mark.parametrize("damage", ["cut short", "another object", "no pickle"])
def test_a_step_that_cannot_be_read_is_one_clear_error(damage: str, tmp_path: Path) -> None:
    """A run that went on from such a folder would not know that it is no beginning."""
    index = stored_with_moments(tmp_path / "checkpoint", drawn(NANO, 3), {}, step=4)
    out = written("megatron", NANO, tmp_path, index)
    assert find_weights(out, NANO).step == 4
    common = out / "iter_0000004/common.pt"
    if damage == "another object":
        torch.save([1, 2], common)
    else:
        data = common.read_bytes()
        common.write_bytes(data[: len(data) // 2] if damage == "cut short" else b"x" * len(data))
    with pytest.raises(CheckpointError, match=r"common\.pt") as caught:
        find_weights(out, NANO)
    assert caught.value.rules == ("weights-file-readable",)


@pytest.mark.parametrize("key", ["train_state", "optimizer.state.norm.weight.step"])
def test_a_damaged_step_of_torchtitan_is_told(key: str, tmp_path: Path) -> None:
    state: dict[str, Any] = {**drawn(NANO, 3), key: torch.tensor(5.0)}
    if key == "train_state":
        state[key] = {"step": torch.tensor(5)}
    folder = saved(tmp_path / "dcp", state)
    assert find_weights(folder, NANO).step == 5
    metadata = FileSystemReader(folder).read_metadata()
    place = next(
        one for index, one in metadata.storage_data.items() if index.fqn in (key, f"{key}.step")
    )
    with (folder / place.relative_path).open("r+b") as stream:
        stream.seek(place.offset)
        stream.write(b"\0" * place.length)
    with pytest.raises(CheckpointError, match="says the step") as caught:
        find_weights(folder, NANO)
    assert caught.value.rules == ("weights-file-readable",)
