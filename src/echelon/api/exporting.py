"""`ec.export_weights`: the weights of a run as a folder that other libraries read."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from echelon.api.training import TrainResult
from echelon.config.files.new_file import new_folder
from echelon.core.errors import ConfigError, DataError
from echelon.core.optional import optional_package
from echelon.core.plan import DType
from echelon.core.rulebook.command_line import BAD_ARGUMENT

if TYPE_CHECKING:
    from echelon.training.data.tokenizer import Tokenizer

FILE_BYTES = 5_000_000_000  # bytes of a file
"""Of a file, at most: what transformers writes, too."""
MOST_THREADS = 8
"""Files that are written at a time where nobody says: each holds a tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedWeights:
    """Say what was written."""

    folder: Path
    """The folder: config.json, safetensors files, and the tokenizer."""
    model_type: str
    """What transformers calls the architecture."""
    dtype: DType
    """The dtype of the tensors."""
    tensors: int
    """How many there are."""
    num_bytes: int
    """Bytes of all of them."""
    files: tuple[str, ...]
    """The files of weights."""
    tokenizer: str
    """The tokenizer that is beside them, or why there is none."""
    checkpoint: Path
    """What was read."""


def export_weights(
    run: TrainResult | str | Path,
    out: str | Path,
    *,
    dtype: DType | None = None,
    model_type: str | None = None,
    file_bytes: int = FILE_BYTES,
    threads: int | None = None,
) -> ExportedWeights:
    """Write the weights of a run as a folder of Hugging Face, and return what is in it.

        ec.export_weights("runs/nano", "nano")
        AutoModelForCausalLM.from_pretrained("nano")

    `run` is what `ec.train` returned, the folder of a run (its newest checkpoint is taken) or of a
    checkpoint in one; how it was split does not matter. `dtype` is that of the tensors, by default
    the one in which the run computed; fp32 keeps every bit of master copies in fp32.
    `model_type` is one of transformers, by default the first that says the model. Files have at
    most `file_bytes`, and `threads` of them are written at a time, each holding one tensor.

    The folder must be new, and gets its name when it is whole. Raises ConfigError where no
    architecture says the model, CheckpointError and EnvironmentProblem.
    """
    optional_package("torch", extra="train", purpose="writing weights")
    from echelon.interop.hugging_face.config_json import hub_config
    from echelon.interop.hugging_face.folder import (
        INDEX_NAME,
        SINGLE_NAME,
        folder_tensors,
        index_text,
        share_out,
    )
    from echelon.models.precision import TORCH_DTYPES
    from echelon.telemetry.run_directory import run_of
    from echelon.training.checkpoint.folder import find_checkpoint
    from echelon.training.checkpoint.load import check_checkpoint
    from echelon.training.data.tokenizer_files import tokenizer_files
    from echelon.training.weights.export import open_model, write_files
    from echelon.training.weights.files import find_weights

    _require_sizes(file_bytes, threads)
    path = run.run if isinstance(run, TrainResult) else Path(run)
    directory = run_of(path)
    plan = directory.plan()
    shape = plan.model
    config = hub_config(shape, model_type)
    chosen: DType = dtype or plan.mathematics.precision.parameters
    checkpoint = find_checkpoint(path).path
    folder = Path(out)
    with new_folder(folder, key="--out") as part:
        index = check_checkpoint(checkpoint)
        tensors = folder_tensors(shape, config.architecture)
        item = TORCH_DTYPES[chosen].itemsize
        files = share_out(tensors, item, file_bytes)
        model = open_model(checkpoint, index, tensors)
        write_files(model, files, part, TORCH_DTYPES[chosen], threads or _threads())
        if list(files) != [SINGLE_NAME]:
            _write(part, {INDEX_NAME: index_text(files, item)})
        tokenizer, said = _tokenizer(run, directory.run_file, index.tokenizer_hash)
        extra: dict[str, object] = {"torch_dtype": str(TORCH_DTYPES[chosen]).removeprefix("torch.")}
        if tokenizer is not None:
            _write(part, tokenizer_files(tokenizer, shape.max_positions))
            extra["eos_token_id"] = tokenizer.description.end_of_document
        keys = dict(sorted({**config.keys, **extra}.items()))
        _write(part, {"config.json": json.dumps(keys, indent=2) + "\n"})
        # What a run would start from is what was written: names, shapes, every file.
        find_weights(part, shape)
    return ExportedWeights(
        folder=folder,
        model_type=config.model_type,
        dtype=chosen,
        tensors=len(tensors),
        num_bytes=sum(tensor.numel for tensor in tensors) * item,
        files=tuple(files),
        tokenizer=said,
        checkpoint=checkpoint,
    )


def _require_sizes(file_bytes: int, threads: int | None) -> None:
    """Raise ConfigError for a number that can't be meant."""
    for key, value in (("--file-bytes", file_bytes), ("--threads", threads)):
        if value is not None and value < 1:
            raise ConfigError(BAD_ARGUMENT.problem(f"{key} is {value}, and at least 1", key=key))


def _threads() -> int:
    return min(MOST_THREADS, os.cpu_count() or 1)


def _write(folder: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")


def _tokenizer(
    run: TrainResult | str | Path, run_file: Path, wanted: str
) -> tuple[Tokenizer | None, str]:
    """Return the tokenizer that a checkpoint was trained with, and what is said of it."""
    from echelon.api.generating import data_of_run
    from echelon.training.data.mixed_dataset import open_data

    try:
        data = run.data if isinstance(run, TrainResult) else data_of_run(run_file)
        found = open_data(data).tokenizer()
    except (ConfigError, DataError, OSError) as error:
        return None, f"none, for the run's data is not there: {str(error).splitlines()[0]}"
    if found.description.hash != wanted:
        return None, "none: the data of the run was made anew with another tokenizer"
    return found, f"{found.description.name}, {found.description.vocabulary:,} ids"
