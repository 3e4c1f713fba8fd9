# SPDX-License-Identifier: Apache-2.0
"""`ec.export_weights`: the weights of a run as a folder that other libraries and trainers read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from echelon.api.training import TrainResult, launched_world_size
from echelon.config.files.new_file import holding, new_folder
from echelon.core.errors import ConfigError
from echelon.core.optional import optional_package
from echelon.core.plan import DType
from echelon.core.rulebook.config import BAD_ARGUMENT

if TYPE_CHECKING:
    from echelon.launch.context import RankContext
    from echelon.launch.local.supervisor import LaunchOptions
    from echelon.training.weights.writers.task import ExportTask, WrittenWeights

WeightFormat: TypeAlias = Literal[
    "hf", "echelon", "dcp", "deepspeed", "megatron", "megatron-legacy"
]
"""Whose folder is written."""
_FILES = ("hf", "echelon")
"""Formats of safetensors files, with an index, a config.json and the tokenizer."""

FILE_BYTES = 5_000_000_000  # bytes of a file
"""Of a file, at most: what transformers writes, too."""
TENSOR_TIMEOUT_S = 1800.0
"""Seconds that a rank may take for a tensor, or to check a file, before it counts as stuck."""
JOINED_RANK = "echelon.api.exporting:export_joined_rank"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedWeights:
    """Say what was written."""

    folder: Path
    """The folder."""
    to: WeightFormat
    """Whose folder it is."""
    model_type: str
    """What transformers calls the architecture; echelon, torchtitan, Megatron-core for theirs."""
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
    ranks: int = 1
    """How many ranks wrote it."""
    rank: int = 0
    """Which of those that a launcher started this process is."""


def export_weights(  # noqa: PLR0913 - each is one choice of the caller, by its name
    run: TrainResult | str | Path,
    out: str | Path,
    *,
    to: WeightFormat = "hf",
    dtype: DType | None = None,
    model_type: str | None = None,
    file_bytes: int | None = None,
    threads: int | None = None,
    ranks: int | None = None,
    tp: int | None = None,
    pp: int | None = None,
    adapters: bool = False,
) -> ExportedWeights:
    """Write the weights of a run as the folder of another tool, and return what is in it.

        ec.export_weights("runs/nano", "nano")
        AutoModelForCausalLM.from_pretrained("nano")

    `run` is what `ec.train` returned, the folder of a run (its newest checkpoint is taken) or of a
    checkpoint in one; how it was split does not matter. `to` is "hf" for a folder of Hugging Face;
    "echelon" for the same files in Echelon's own names, which every model has; "dcp" for
    torch.distributed.checkpoint, with torchtitan's names or, with a `model_type`, names of
    transformers; "deepspeed" for a universal folder, with what Adam keeps; "megatron" for
    Megatron-core's torch_dist; "megatron-legacy" for a file of each of `tp` x `pp` ranks.

    `dtype` is that of the tensors, by default the one in which the run computed; fp32 keeps every
    bit of master copies in fp32, and is what DeepSpeed has. `model_type` is one of transformers, by
    default the first that says the model. Safetensors files have at most `file_bytes`.

    `ranks` processes of this machine write it together, or those that torchrun has started, each
    with `threads` threads. What is written is the same however many they are. Each of them holds no
    more than the largest tensor and 50 MB.

    Adapters of a run with LoRA are merged into the weights that they stand beside. With `adapters`
    they alone are written, as PEFT keeps them:

        PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("base"), "nano-adapters")

    The folder must be new, and gets its name when it is whole: a rank that fails leaves nothing,
    and the error says which (of those that torchrun has started, a hidden folder `.echelon-*` may
    stay beside it until the next call for this folder on this machine, or for good where it has
    started again or the file system has no locks for folders). Raises ConfigError where no
    architecture says the model or a trainer has no names for it, CheckpointError and
    EnvironmentProblem; RankFailure for a rank that died.
    """
    _require_sizes(
        {"--file-bytes": file_bytes, "--threads": threads, "--ranks": ranks, "--tp": tp, "--pp": pp}
    )
    sizes = {"--file-bytes": file_bytes, "--tp": tp, "--pp": pp}
    _require_effect(to, dtype, model_type, {**sizes, "--adapters": adapters or None})
    from echelon.telemetry.run_directory import run_of
    from echelon.training.checkpoint.folder import find_checkpoint

    path = run.run if isinstance(run, TrainResult) else Path(run)
    plan = run_of(path).plan()
    checkpoint = find_checkpoint(path).path
    optional_package("torch", extra="train", purpose="writing weights")
    from echelon.training.weights.writers.task import ExportTask, require_ranks

    world = _num_ranks(ranks)
    task = ExportTask(
        checkpoint=str(checkpoint),
        folder="",
        to=to,
        shape=plan.model,
        dtype="fp32" if to == "deepspeed" else dtype or plan.mathematics.precision.parameters,
        model_type=model_type,
        file_bytes=file_bytes or FILE_BYTES,
        threads=threads,
        tp=tp or 1,
        pp=pp or 1,
        adapters=adapters,
    )
    require_ranks(task, world)
    data = run.data if isinstance(run, TrainResult) else None
    if launched_world_size() is not None:
        return _export_joined(task, path, data, Path(out), world)
    with new_folder(Path(out), key="--out") as part:
        written = _write_here(replace(task, folder=str(part)), world)
        tokenizer = _finish(task, path, data, part)
    return _exported(task, Path(out), written, tokenizer, world)


def _num_ranks(wanted: int | None) -> int:
    """Return how many ranks write; ConfigError where a launcher has started other ones."""
    launched = launched_world_size()
    if launched is not None and wanted not in (None, launched):
        raise ConfigError(
            BAD_ARGUMENT.problem(
                f"--ranks is {wanted}, and {launched} were started",
                key="--ranks",
                suggestions=[f"--ranks {launched}", f"--nproc-per-node {wanted}"],
            )
        )
    return launched or wanted or 1


def _write_here(task: ExportTask, ranks: int) -> WrittenWeights:
    from echelon.core.serialize import to_json
    from echelon.launch.host import require_memory_for_ranks
    from echelon.launch.local.supervisor import run_ranks
    from echelon.training.weights.writers.shares import Writers
    from echelon.training.weights.writers.task import WRITE_RANK, write_weights

    if ranks == 1:
        return write_weights(task, Writers(task.threads))
    require_memory_for_ranks(ranks)
    found = run_ranks(WRITE_RANK, to_json(task), world_size=ranks, options=_options())
    return found.require()[0]


def _options() -> LaunchOptions:
    from echelon.launch.local.messages import Limits
    from echelon.launch.local.supervisor import LaunchOptions

    return LaunchOptions(limits=Limits(step_s=TENSOR_TIMEOUT_S), shown_rank=None)


def _export_joined(
    task: ExportTask, run: Path, data: Path | None, out: Path, ranks: int
) -> ExportedWeights:
    from echelon.core.serialize import to_json
    from echelon.launch.launched.rank import run_launched_rank

    outcome = run_launched_rank(
        JOINED_RANK,
        {
            "task": to_json(task),
            "run": str(run),
            "data": None if data is None else str(data),
            "out": str(out),
        },
        labels=("",) * ranks,
        options=_options(),
    )
    return replace(outcome.require()[0], rank=outcome.rank)


def export_joined_rank(context: RankContext, argument: Mapping[str, Any]) -> ExportedWeights:
    """Write this rank's share; the target of every rank under torchrun.

    Rank 0 makes the folder, and gives it its name when all have written.
    """
    from echelon.core.serialize import from_json
    from echelon.training.weights.writers.task import ExportTask, write_weights, writers_of

    task, out = from_json(ExportTask, argument["task"]), Path(argument["out"])
    writers = writers_of(context, task.threads)
    if context.rank != 0:
        folder = str(writers.on_first(str))
        with holding(Path(folder)):
            written = write_weights(replace(task, folder=folder), writers)
        tokenizer = writers.on_first(str)
        return _exported(task, out, written, str(tokenizer), context.world_size)
    with new_folder(out, key="--out") as part:
        writers.on_first(lambda: str(part))
        written = write_weights(replace(task, folder=str(part)), writers)
        data = None if argument["data"] is None else Path(argument["data"])
        tokenizer = _finish(task, Path(argument["run"]), data, part)
    writers.on_first(lambda: tokenizer)
    return _exported(task, out, written, tokenizer, context.world_size)


def _finish(task: ExportTask, run: Path, data: Path | None, folder: Path) -> str:
    """Write what stands beside weights, and read what was written; return what is said of it."""
    from echelon.core.parameters import base_shape
    from echelon.interop.hugging_face.adapters import ADAPTER_CONFIG, adapter_config
    from echelon.interop.hugging_face.folder import hub_config
    from echelon.telemetry.run_directory import run_of
    from echelon.training.checkpoint.index import read_index
    from echelon.training.data.beside_weights import files_beside
    from echelon.training.weights.files import find_weights
    from echelon.training.weights.writers.task import write_config

    base = base_shape(task.shape)
    if task.to not in _FILES:
        # What a run would start from is what was written: names, shapes, every file.
        find_weights(folder, base)
        return "none: a checkpoint of a trainer has none"
    wanted = read_index(Path(task.checkpoint)).tokenizer_hash
    beside = files_beside(run_of(run).run_file, data, wanted, task.shape.max_positions)
    beside.write(folder)
    if task.adapters:
        architecture = hub_config(base, task.model_type).architecture
        text = adapter_config(task.shape, architecture)
        (folder / ADAPTER_CONFIG).write_text(text, encoding="utf-8")
        return beside.said
    write_config(replace(task, folder=str(folder)), beside.config)
    find_weights(folder, base)
    return beside.said


def _exported(
    task: ExportTask, folder: Path, written: WrittenWeights, tokenizer: str, ranks: int
) -> ExportedWeights:
    files = written.files
    if task.to not in _FILES:
        there = [one for one in folder.rglob("*") if one.is_file()]
        files = tuple(sorted(str(one.relative_to(folder)) for one in there))
    return ExportedWeights(
        folder=folder,
        to=task.to,
        model_type=written.names,
        dtype=task.dtype,
        tensors=written.tensors,
        num_bytes=written.num_bytes,
        files=files,
        tokenizer=tokenizer,
        checkpoint=Path(task.checkpoint),
        optimizer=written.optimizer,
        ranks=ranks,
    )


def _require_sizes(sizes: Mapping[str, int | None]) -> None:
    """Raise ConfigError for a number that can't be meant."""
    for key, value in sizes.items():
        if value is not None and value < 1:
            raise ConfigError(
                BAD_ARGUMENT.problem(
                    f"{key} is {value}, and at least 1", key=key, suggestions=(f"{key} 1",)
                )
            )


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
        "--file-bytes": (sizes["--file-bytes"] is not None, _FILES),
        "--tp": (sizes["--tp"] is not None, ranks),
        "--pp": (sizes["--pp"] is not None, ranks),
        "--model-type": (model_type is not None, ("hf", "dcp", "deepspeed")),
        "--dtype": (dtype not in (None, "fp32"), (*_FILES, "dcp", "megatron", *ranks)),
    }
    problems = [
        BAD_ARGUMENT.problem(
            f"{key} has no effect with --to {to}"
            if key != "--dtype"
            else f"--dtype is {dtype}, and a universal folder of DeepSpeed has fp32",
            key=key,
            suggestions=[*(f"--to {name}" for name in formats), f"no {key}"],
        )
        for key, (given, formats) in needs.items()
        if given and to not in formats
    ]
    if problems:
        raise ConfigError(problems)
