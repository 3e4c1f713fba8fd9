"""Which trainer wrote a folder, and which of its saves is meant."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.core.errors import CheckpointError
from echelon.training.weights.files import find_weights
from echelon.training.weights.trainers.recognise import read_trainer
from tests.parallel.layouts import NANO
from tests.training.weights.hugging_face import llama_tensors
from tests.training.weights.trainers.folders import deepspeed_zero


def test_a_pointer_to_nowhere_is_refused_with_what_is_there(tmp_path: Path) -> None:
    tag = deepspeed_zero(tmp_path, llama_tensors(NANO), 1, 2)
    for text in ("global_step9", "../elsewhere", ""):
        (tmp_path / "latest").write_text(text)
        with pytest.raises(CheckpointError, match="points to") as caught:
            find_weights(tmp_path, NANO)
        assert caught.value.rules == ("weights-file-exists",)
        assert str(tag) in str(caught.value)


def test_a_pointer_to_a_folder_of_nobody_is_refused(tmp_path: Path) -> None:
    (tmp_path / "iter_0000003").mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3\n")
    with pytest.raises(CheckpointError, match="of no trainer that is known") as caught:
        read_trainer(tmp_path, NANO)
    assert caught.value.rules == ("weights-file-exists",)


def test_shards_without_metadata_are_refused(tmp_path: Path) -> None:
    (tmp_path / "__0_0.distcp").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"no \.metadata") as caught:
        read_trainer(tmp_path, NANO)
    assert caught.value.rules == ("weights-file-exists",)


def test_other_folders_and_files_are_of_no_trainer(tmp_path: Path) -> None:
    assert read_trainer(tmp_path, NANO) is None
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert read_trainer(tmp_path / "model.safetensors", NANO) is None
