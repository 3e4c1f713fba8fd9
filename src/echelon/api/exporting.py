"""`ec.export_weights`: the weights of a run as a folder that other libraries and trainers read."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from echelon.api.training import TrainResult
from echelon.config.files.new_file import new_folder
from echelon.core.errors import ConfigError, DataError
from echelon.core.model_shape import ModelShape
from echelon.core.optional import optional_package
from echelon.core.plan import DType
from echelon.core.rulebook.command_line import BAD_ARGUMENT

if TYPE_CHECKING:
    from echelon.training.data.tokenizer import Tokenizer
    from echelon.training.weights.writers.formats import TrainerRequest

WeightFormat: TypeAlias = Literal["hf", "dcp", "deepspeed", "megatron", "megatron-legacy"]
"""Whose folder is written."""

FILE_BYTES = 5_000_000_000  # bytes of a file
"""Of a file, at most: what transformers writes, too."""
MOST_THREADS = 8
"""Files that are written at a time where nobody says: each holds a tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedWeights:
    """Say what was written."""

    folder: Path
    """The folder."""
    to: WeightFormat
    """Whose folder it is."""
    model_type: str
    """What transformers calls the architecture; torchtitan or Megatron-core with their names."""
    dtype: DType
    """The dtype of the tensors."""
    tensors: int
    """How many there are of weights."""
    num_bytes: int
    """Bytes of all of them, and of what an optimizer keeps."""
    files: tuple[str, ...]
    """The files of weights, below the folder."""
    tokenizer: str
    """The tokenizer that is beside them, or why there is none."""
    checkpoint: Path
    """What was read."""
    optimizer: bool = False
    """Whether what the optimizer keeps was written, too."""


def export_weights(  # noqa: PLR0913 - each is one choice of the caller, by its name
    run: TrainResult | str | Path,
    out: str | Path,
    *,
    to: WeightFormat = "hf",
    dtype: DType | None = None,
    model_type: str | None = None,
    file_bytes: int | None = None,
    threads: int | None = None,
    tp: int | None = None,
    pp: int | None = None,
    adapters: bool = False,
) -> ExportedWeights:
    """Write the weights of a run as the folder of another tool, and return what is in it.

        ec.export_weights("runs/nano", "nano")
        AutoModelForCausalLM.from_pretrained("nano")

    `run` is what `ec.train` returned, the folder of a run (its newest checkpoint is taken) or of a
    checkpoint in one; how it was split does not matter. `to` is "hf" for a folder of Hugging Face;
    "dcp" for torch.distributed.checkpoint, with torchtitan's names or, with a `model_type`, those
    of transformers; "deepspeed" for a universal folder, with what Adam keeps; "megatron" for
    Megatron-core's torch_dist; "megatron-legacy" for a file of each of `tp` x `pp` ranks.

    `dtype` is that of the tensors, by default the one in which the run computed; fp32 keeps every
    bit of master copies in fp32, and is what DeepSpeed has. `model_type` is one of transformers, by
    default the first that says the model. Files of Hugging Face have at most `file_bytes`, and
    `threads` files are written at a time, each holding one tensor.

    Adapters of a run with LoRA are merged into the weights that they stand beside. With `adapters`
    they alone are written, as PEFT keeps them:

        PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("base"), "nano-adapters")

    The folder must be new, and gets its name when it is whole. Raises ConfigError where no
    architecture says the model or a trainer has no names for it, CheckpointError and
    EnvironmentProblem.
    """
    optional_package("torch", extra="train", purpose="writing weights")
    _require_sizes({"--file-bytes": file_bytes, "--threads": threads, "--tp": tp, "--pp": pp})
    sizes = {"--file-bytes": file_bytes, "--tp": tp, "--pp": pp}
    _require_effect(to, dtype, model_type, {**sizes, "--adapters": adapters or None})
    from echelon.telemetry.run_directory import run_of

    if to == "hf":
        files = _HubFiles(
            file_bytes=file_bytes or FILE_BYTES, threads=threads or _threads(), adapters=adapters
        )
        return _to_hugging_face(run, Path(out), dtype, model_type, files)
    from echelon.core.parameters import base_shape
    from echelon.training.weights.writers.formats import TrainerRequest

    path = run.run if isinstance(run, TrainResult) else Path(run)
    plan = run_of(path).plan()
    chosen: DType = "fp32" if to == "deepspeed" else dtype or plan.mathematics.precision.parameters
    request = TrainerRequest(
        to=to,
        shape=base_shape(plan.model),
        scale=_merged_by(plan.model),
        dtype=chosen,
        model_type=model_type,
        threads=threads or _threads(),
        tp=tp or 1,
        pp=pp or 1,
    )
    return _to_trainer(path, Path(out), request)


@dataclass(frozen=True, slots=True, kw_only=True)
class _HubFiles:
    """Say how a folder of Hugging Face is written, and whether it has the adapters alone."""

    file_bytes: int
    threads: int
    adapters: bool


def _merged_by(shape: ModelShape) -> float:
    """Return what adapters are scaled by when they are merged; 0 where there are none."""
    return 0.0 if shape.lora is None else shape.lora.scale


def _to_hugging_face(
    run: TrainResult | str | Path,
    folder: Path,
    dtype: DType | None,
    model_type: str | None,
    asked: _HubFiles,
) -> ExportedWeights:
    from echelon.core.parameters import base_shape
    from echelon.interop.hugging_face.adapters import (
        ADAPTER_CONFIG,
        ADAPTER_WEIGHTS,
        adapter_config,
        adapter_tensors,
    )
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

    path = run.run if isinstance(run, TrainResult) else Path(run)
    directory = run_of(path)
    plan = directory.plan()
    shape = plan.model
    base = base_shape(shape)
    config = hub_config(base, model_type)
    chosen: DType = dtype or plan.mathematics.precision.parameters
    checkpoint = find_checkpoint(path).path
    with new_folder(folder, key="--out") as part:
        index = check_checkpoint(checkpoint)
        if asked.adapters:
            tensors = adapter_tensors(shape, config.architecture)
        else:
            tensors = folder_tensors(base, config.architecture)
        item = TORCH_DTYPES[chosen].itemsize
        if asked.adapters:
            files = {ADAPTER_WEIGHTS: tensors}
        else:
            files = share_out(tensors, item, asked.file_bytes)
        scale = 0.0 if asked.adapters else _merged_by(shape)
        model = open_model(checkpoint, index, tensors, scale=scale)
        write_files(model, files, part, TORCH_DTYPES[chosen], asked.threads)
        if not asked.adapters and list(files) != [SINGLE_NAME]:
            _write(part, {INDEX_NAME: index_text(files, item)})
        tokenizer, template, said = _tokenizer(run, directory.run_file, index.tokenizer_hash)
        extra: dict[str, object] = {"torch_dtype": str(TORCH_DTYPES[chosen]).removeprefix("torch.")}
        if tokenizer is not None:
            _write(part, {**tokenizer_files(tokenizer, shape.max_positions), **template})
            extra["eos_token_id"] = tokenizer.description.end_of_document
        if asked.adapters:
            _write(part, {ADAPTER_CONFIG: adapter_config(shape, config.architecture)})
        else:
            keys = dict(sorted({**config.keys, **extra}.items()))
            _write(part, {"config.json": json.dumps(keys, indent=2) + "\n"})
            # What a run would start from is what was written: names, shapes, every file.
            find_weights(part, base)
    return ExportedWeights(
        folder=folder,
        to="hf",
        model_type=config.model_type,
        dtype=chosen,
        tensors=len(tensors),
        num_bytes=sum(tensor.numel for tensor in tensors) * item,
        files=tuple(files),
        tokenizer=said,
        checkpoint=checkpoint,
    )


def _to_trainer(path: Path, folder: Path, request: TrainerRequest) -> ExportedWeights:
    from echelon.training.checkpoint.folder import find_checkpoint
    from echelon.training.checkpoint.load import check_checkpoint
    from echelon.training.weights.files import find_weights
    from echelon.training.weights.writers.formats import planned, write_trainer

    checkpoint = find_checkpoint(path).path
    with new_folder(folder, key="--out") as part:
        index = check_checkpoint(checkpoint)
        found = planned(request, index)
        write_trainer(request, found, checkpoint, index, part, index.step)
        # What a run would start from is what was written: names, shapes, every file.
        find_weights(part, request.shape)
        files = sorted(str(one.relative_to(part)) for one in part.rglob("*") if one.is_file())
    elements = sum(tensor.numel for tensor in found.tensors) * len(found.kinds)
    return ExportedWeights(
        folder=folder,
        to=request.to,
        model_type=found.names,
        dtype=request.dtype,
        tensors=len(found.tensors),
        num_bytes=elements * request.torch_dtype.itemsize,
        files=tuple(files),
        tokenizer="none: a checkpoint of a trainer has none",
        checkpoint=checkpoint,
        optimizer=len(found.kinds) > 1,
    )


def _require_sizes(sizes: Mapping[str, int | None]) -> None:
    """Raise ConfigError for a number that can't be meant."""
    for key, value in sizes.items():
        if value is not None and value < 1:
            raise ConfigError(BAD_ARGUMENT.problem(f"{key} is {value}, and at least 1", key=key))


def _require_effect(
    to: WeightFormat,
    dtype: DType | None,
    model_type: str | None,
    sizes: Mapping[str, int | bool | None],
) -> None:
    """Raise ConfigError for a flag that a format has no use for, and for a name that is none."""
    if to not in get_args(WeightFormat):
        known = list(get_args(WeightFormat))
        raise ConfigError(
            BAD_ARGUMENT.problem(f"--to is {to}, which is none", key="--to", suggestions=known)
        )
    ranks = ("megatron-legacy",)
    needs: Mapping[str, tuple[bool, tuple[str, ...]]] = {
        "--adapters": (sizes["--adapters"] is not None, ("hf",)),
        "--file-bytes": (sizes["--file-bytes"] is not None, ("hf",)),
        "--tp": (sizes["--tp"] is not None, ranks),
        "--pp": (sizes["--pp"] is not None, ranks),
        "--model-type": (model_type is not None, ("hf", "dcp", "deepspeed")),
        "--dtype": (dtype not in (None, "fp32"), ("hf", "dcp", "megatron", "megatron-legacy")),
    }
    problems = [
        BAD_ARGUMENT.problem(
            f"{key} has no effect with --to {to}"
            if key != "--dtype"
            else f"--dtype is {dtype}, and a universal folder of DeepSpeed has fp32",
            key=key,
            suggestions=[f"--to {one}" for one in formats],
        )
        for key, (given, formats) in needs.items()
        if given and to not in formats
    ]
    if problems:
        raise ConfigError(problems)


def _threads() -> int:
    return min(MOST_THREADS, os.cpu_count() or 1)


def _write(folder: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")


def _tokenizer(
    run: TrainResult | str | Path, run_file: Path, wanted: str
) -> tuple[Tokenizer | None, Mapping[str, str], str]:
    """Return the tokenizer that a checkpoint was trained with, and what is said of it.

    Between them is the template of its chats, by the name of its file, where data has one.
    """
    from echelon.api.generating import data_of_run
    from echelon.training.data.mixed_dataset import open_data
    from echelon.training.data.tokenizer import TEMPLATE_FILE_NAME

    try:
        data = Path(run.data) if isinstance(run, TrainResult) else data_of_run(run_file)
        found = open_data(data).tokenizer()
        place = data / TEMPLATE_FILE_NAME
        text = {place.name: place.read_text(encoding="utf-8")} if place.is_file() else {}
    except (ConfigError, DataError, OSError) as error:
        return None, {}, f"none, for the run's data is not there: {str(error).splitlines()[0]}"
    if found.description.hash != wanted:
        return None, {}, "none: the data of the run was made anew with another tokenizer"
    return found, text, f"{found.description.name}, {found.description.vocabulary:,} ids"
