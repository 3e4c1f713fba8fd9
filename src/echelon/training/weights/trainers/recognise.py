# SPDX-License-Identifier: Apache-2.0
"""Which trainer wrote a folder, by what is in it, and which of its saves is meant: the newest."""

from __future__ import annotations

from pathlib import Path

from echelon.core.disk import list_names
from echelon.core.model_shape import ModelShape
from echelon.core.rulebook.weights import WEIGHTS_FILE_EXISTS, WEIGHTS_FILE_READABLE
from echelon.training.weights.trainers.contents import TrainerCheckpoint, refuse
from echelon.training.weights.trainers.deepspeed import (
    MODEL_FILES,
    OPTIMIZER_FILES,
    PARAMETERS,
    read_deepspeed,
    read_universal,
)
from echelon.training.weights.trainers.distributed import METADATA, read_distributed
from echelon.training.weights.trainers.megatron import rank_folders, read_megatron

POINTERS = ("latest_universal", "latest", "latest_checkpointed_iteration.txt")
"""Files that name the folder of the newest save."""
_LONGEST_NAME = 200  # characters of such a file


def read_trainer(path: Path, shape: ModelShape) -> TrainerCheckpoint | None:
    """Return what the checkpoint of a trainer holds; None where no trainer wrote the folder.

    CheckpointError says what of it is missing or cannot be read.
    """
    if not path.is_dir():
        return None
    folder = _newest(path)
    if (folder / METADATA).is_file():
        return read_distributed(folder)
    if (folder / PARAMETERS).is_dir():
        return read_universal(folder)
    if rank_folders(folder):
        return read_megatron(folder, shape)
    if any(folder.glob(MODEL_FILES)) or any(folder.glob(OPTIMIZER_FILES)):
        return read_deepspeed(folder)
    if any(folder.glob("*.distcp")):
        raise refuse(
            WEIGHTS_FILE_EXISTS,
            f"{folder} has files of torch.distributed.checkpoint, and no {METADATA} that says what "
            f"is in them: {list_names(folder)}",
        )
    if folder != path:
        raise refuse(
            WEIGHTS_FILE_EXISTS,
            f"{folder}, the newest save in {path}, is of no trainer that is known: "
            f"{list_names(folder)}",
        )
    return None


def _newest(path: Path) -> Path:
    """Return the folder of the newest save, or `path` where it is one itself."""
    for name in POINTERS:
        file = path / name
        if not file.is_file():
            continue
        try:
            text = file.read_text(encoding="utf-8")[:_LONGEST_NAME].strip()
        except (OSError, UnicodeDecodeError) as error:
            raise refuse(WEIGHTS_FILE_READABLE, f"{file} cannot be read: {error}") from error
        tag = f"iter_{int(text):07d}" if name.endswith(".txt") and text.isdigit() else text
        folder = path / tag
        if not tag or Path(tag).name != tag or not folder.is_dir():
            there = sorted(one.name for one in path.iterdir() if one.is_dir())
            raise refuse(
                WEIGHTS_FILE_EXISTS,
                f"{file} points to {tag!r}, which is not there: {list_names(path)}",
                *(path / one for one in there[-4:]),
            )
        return folder
    return path
