# SPDX-License-Identifier: Apache-2.0
"""The formats of trainers by name: under which names their tensors are, and who writes them.

DeepSpeed's universal folder, which has a folder for each parameter of the module, is written here.
With the moments of Adam, if a checkpoint has them, an engine of any ZeRO stage goes on from it
(`checkpoint.load_universal`). Learning rate and weight decay are those of the engine.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch

from echelon.core.disk import disk_errors
from echelon.core.errors import ConfigError, Problem
from echelon.core.model_shape import ModelShape
from echelon.core.parameters import router_biases
from echelon.core.piece_sizes import TRAINING_PIECES, PieceSizes
from echelon.core.plan import DType
from echelon.core.rulebook.weights import WEIGHTS_HAVE_NAMES, WEIGHTS_RANKS_DIVIDE
from echelon.interop.hugging_face.folder import (
    OWN_WAY,
    FolderTensor,
    folder_tensors,
    hub_config,
    tensors_of,
)
from echelon.interop.weight_names import megatron, torchtitan
from echelon.interop.weight_names.names import find_naming
from echelon.models.precision import TORCH_DTYPES
from echelon.training.checkpoint.index import PARAMETERS, CheckpointIndex
from echelon.training.weights.export import StoredModel, filled, open_model
from echelon.training.weights.trainers.contents import MOMENTS
from echelon.training.weights.trainers.megatron import BY_WORDS
from echelon.training.weights.writers.archive import save_archive
from echelon.training.weights.writers.distributed import Chunk, num_files, write_distributed
from echelon.training.weights.writers.megatron import MegatronFolder, write_ranks, write_torch_dist
from echelon.training.weights.writers.shares import FolderPart, TensorRoom, Writers

TrainerFormat: TypeAlias = Literal["dcp", "deepspeed", "megatron", "megatron-legacy"]
VOCABULARY_MULTIPLE = 128
"""To so many words of each tensor rank Megatron-LM pads a vocabulary."""
_FUSED_EXPERTS = "model.layers.0.mlp.experts.gate_up_proj"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerRequest:
    """Say what is asked for."""

    to: TrainerFormat
    shape: ModelShape
    scale: float = 0.0
    """What adapters are merged by."""
    dtype: DType
    model_type: str | None
    tp: int
    pp: int
    sizes: PieceSizes = TRAINING_PIECES
    """Sizes of the pieces in which tensors are read and adapters merged."""

    @property
    def torch_dtype(self) -> torch.dtype:
        """Return the dtype of tensors, as torch has it."""
        return TORCH_DTYPES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerFolder:
    """Say what is written: whose names the tensors have, and the kinds: values, moments."""

    names: str
    tensors: Sequence[FolderTensor]
    kinds: Sequence[str]


def planned(request: TrainerRequest, index: CheckpointIndex) -> TrainerFolder:
    """Return what would be written; ConfigError with all that keeps it from being so."""
    names, tensors = _tensors(request)
    problems = list(_divide_problems(request)) if request.to == "megatron-legacy" else []
    if problems:
        raise ConfigError(problems)
    kinds = [PARAMETERS]
    if request.to == "deepspeed":
        wanted = [name for tensor in tensors for name, _ in tensor.parts]
        held = [index.tensors.get(f"optimizer.{kind}", {}) for kind in MOMENTS]
        if all(name in kind for kind in held for name in wanted):
            kinds += [f"optimizer.{kind}" for kind in MOMENTS]
    return TrainerFolder(names=names, tensors=tensors, kinds=kinds)


def write_trainer(
    request: TrainerRequest,
    found: TrainerFolder,
    checkpoint: Path,
    index: CheckpointIndex,
    folder: Path,
    writers: Writers,
) -> None:
    """Write a checkpoint into `folder` as a trainer has it; all ranks call it.

    CheckpointError where the checkpoint can't be read, EnvironmentProblem where the disk refuses.
    """
    model = open_model(checkpoint, index, found.tensors, scale=request.scale, sizes=request.sizes)
    if request.to == "dcp":
        chunks = [
            Chunk(
                key=one.key,
                whole=one.shape,
                offset=(0,) * len(one.shape),
                shape=one.shape,
                make=lambda one=one: filled(model, one, request.torch_dtype),
            )
            for one in found.tensors
        ]
        write_distributed(chunks, folder, request.torch_dtype, writers)
    elif request.to == "deepspeed":
        models = {VALUES: model} | {
            kind.removeprefix("optimizer."): open_model(
                checkpoint, index, found.tensors, kind, sizes=request.sizes
            )
            for kind in found.kinds[1:]
        }
        universal = UniversalFolder(tensors=found.tensors, models=models, step=index.step)
        tag = f"global_step{index.step}_universal"
        write_universal(universal, folder / tag, writers)
        writers.on_first(lambda: write_text(folder / "latest_universal", tag))
    else:
        megatron_folder = MegatronFolder(
            shape=request.shape,
            tensors=found.tensors,
            model=model,
            dtype=request.torch_dtype,
            step=index.step,
        )
        if request.to == "megatron":
            write_torch_dist(megatron_folder, folder, writers)
        else:
            write_ranks(megatron_folder, folder, request.tp, request.pp, writers)
    if found.names not in (_TORCHTITAN, _MEGATRON):
        keys = hub_config(request.shape, request.model_type).keys
        text = json.dumps(keys, indent=2) + "\n"
        writers.on_first(lambda: write_text(folder / "config.json", text))


def write_text(file: Path, text: str) -> None:
    """Write a small file; EnvironmentProblem where the disk refuses."""
    with disk_errors(f"to write into {file.parent}"):
        file.write_text(text, encoding="utf-8")


def num_parts(request: TrainerRequest, found: TrainerFolder) -> int:
    """Return the number of parts of a folder, each of which one rank writes."""
    if request.to == "megatron-legacy":
        return request.pp
    if request.to == "deepspeed":
        return len(found.tensors) * len(found.kinds)
    num_bytes = sum(one.numel for one in found.tensors) * request.torch_dtype.itemsize
    return num_files(len(found.tensors), num_bytes)


_TORCHTITAN, _MEGATRON = "torchtitan", "Megatron-core"


def _tensors(request: TrainerRequest) -> tuple[str, tuple[FolderTensor, ...]]:
    shape = request.shape
    if request.to == "deepspeed" or (request.to == "dcp" and request.model_type is not None):
        config = hub_config(shape, request.model_type)
        architecture = config.architecture
        if shape.experts is not None:
            # In the module the experts of a block are two tensors, whatever files have.
            architecture = replace(architecture, tensors=(*architecture.tensors, _FUSED_EXPERTS))
        tensors = folder_tensors(shape, architecture)
        biases = {spec.name for spec in router_biases(shape)}
        trained = tuple(one for one in tensors if one.parts[0][0] not in biases)
        return config.model_type, trained if request.to == "deepspeed" else tensors
    if request.to == "dcp":
        keys = {torchtitan.EMBEDDING_KEY, "layers.0.attention.qkv_linear.wq.weight"}
        if router_biases(shape):
            keys.add(f"layers.0{torchtitan.ROUTER_BIAS}")
        return _TORCHTITAN, _named(request, _TORCHTITAN, keys)
    tensors = _named(request, _MEGATRON, _megatron_keys(request))
    if request.to == "megatron-legacy":
        tensors = tuple(_padded(one, request.tp) for one in tensors)
    return _MEGATRON, tensors


def _megatron_keys(request: TrainerRequest) -> set[str]:
    """Return keys that say how Megatron-core has the model; ConfigError where not at all."""
    shape, keys = request.shape, {megatron.EMBEDDING_KEY}
    layers = range(shape.layers)
    with_experts = [layer for layer in layers if shape.layer_has_experts(layer)]
    if with_experts and len(with_experts) < shape.layers:
        raise ConfigError(
            WEIGHTS_HAVE_NAMES.problem(
                f"{shape.name} has experts in {len(with_experts)} of {shape.layers} layers, and "
                f"--to {request.to} writes models whose layers are all of one kind",
                key="--to",
                suggestions=_ways(request),
            )
        )
    if router_biases(shape):
        keys.add(f"{megatron.LAYERS}0{megatron.ROUTER_BIAS}")
    if request.to == "megatron":
        # All experts of a layer in one tensor.
        keys |= {
            f"{megatron.LAYERS}{layer}.mlp.experts.experts.{name}.weight"
            for layer in with_experts
            for name in ("linear_fc1", "linear_fc2")
        }
    return keys


def _named(request: TrainerRequest, kind: str, keys: set[str]) -> tuple[FolderTensor, ...]:
    naming = find_naming(request.shape, keys)
    assert naming is not None, f"the names of {kind} are known"
    if naming.nameless:
        shown = ", ".join(naming.nameless[:4])
        more = len(naming.nameless) - 4
        raise ConfigError(
            WEIGHTS_HAVE_NAMES.problem(
                f"{kind} has no name for {len(naming.nameless)} weights of {request.shape.name}: "
                f"{shown}" + (f" and {more} more" if more > 0 else ""),
                key="--to",
                suggestions=_ways(request),
            )
        )
    return tensors_of(naming)


def _ways(request: TrainerRequest) -> list[str]:
    """Return flags of formats that can take a model which a trainer has no names for."""
    try:
        model_type = hub_config(request.shape).model_type
    except ConfigError:
        return [OWN_WAY]
    return ["--to hf", f"--to dcp --model-type {model_type}", OWN_WAY]


def _padded(tensor: FolderTensor, tp: int) -> FolderTensor:
    if not tensor.key.endswith(BY_WORDS):
        return tensor
    multiple = VOCABULARY_MULTIPLE * tp
    words = -(-tensor.shape[0] // multiple) * multiple
    return replace(tensor, shape=(words, *tensor.shape[1:]))


def _divide_problems(request: TrainerRequest) -> Iterator[Problem]:
    shape = request.shape
    wanted: Mapping[str, tuple[int, Mapping[str, int]]] = {
        "--tp": (request.tp, {"model.kv_heads": shape.kv_heads, **_widths(shape)}),
        "--pp": (request.pp, {"model.layers": shape.layers}),
    }
    for key, (degree, sizes) in wanted.items():
        for name, size in sizes.items():
            if size % degree:
                works = [one for one in range(1, size + 1) if _all_divide(sizes, one)]
                yield WEIGHTS_RANKS_DIVIDE.problem(
                    f"{key} is {degree}, and {name} = {size} ({size} % {degree} = {size % degree})",
                    key=key,
                    suggestions=[f"{key} {one}" for one in works[:6]],
                )


def _widths(shape: ModelShape) -> Mapping[str, int]:
    """Return the widths that tensor ranks share out between the two layers of an MLP."""
    if shape.experts is None:
        return {"model.ffn": shape.ffn}
    shared = shape.experts.ffn * shape.experts.shared_experts
    widths = {"model.expert_ffn": shape.experts.ffn}
    return {**widths, "the shared expert's width": shared} if shared else widths


def _all_divide(sizes: Mapping[str, int], degree: int) -> bool:
    return all(size % degree == 0 for size in sizes.values())


VALUES = "fp32"
_VERSION = "0.19.8"
"""The version of DeepSpeed whose universal folders these are."""
_MODULE_FILES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
"""What an engine reads first: up to stage 2 the one, at stage 3 the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UniversalFolder:
    """Say what is written: tensors by kind (fp32, exp_avg, exp_avg_sq), after so many updates."""

    tensors: Sequence[FolderTensor]
    models: Mapping[str, StoredModel]
    step: int


def write_universal(found: UniversalFolder, folder: Path, writers: Writers) -> None:
    """Write the folder of one tag into `folder`; all ranks call it."""
    zero = folder / "zero"
    writers.on_first(lambda: _make_folders(found, zero))
    writers.write(
        [
            _part(
                model,
                tensor if kind == VALUES else _without_offset(tensor),
                zero / tensor.key / f"{kind}.pt",
            )
            for tensor in found.tensors
            for kind, model in found.models.items()
        ]
    )
    # Last, for this is what an engine looks for first.
    writers.on_first(lambda: _write_states(found, folder))


def _without_offset(tensor: FolderTensor) -> FolderTensor:
    """Return the tensor of a moment: files subtract the offset of a norm from its weight alone."""
    parts = tuple((name, replace(source, offset=0.0)) for name, source in tensor.parts)
    return replace(tensor, parts=parts)


def _make_folders(found: UniversalFolder, zero: Path) -> None:
    with disk_errors(f"to write into {zero}"):
        for tensor in found.tensors:
            (zero / tensor.key).mkdir(parents=True)


def _part(model: StoredModel, tensor: FolderTensor, file: Path) -> FolderPart:
    num_bytes = tensor.numel * torch.float32.itemsize
    name = f"{tensor.key}/{file.name}"

    def write(room: TensorRoom) -> None:
        with room.hold(num_bytes):
            save_archive(
                file,
                {tensor.key: lambda: filled(model, tensor, torch.float32)},
                {tensor.key: (tensor.shape, torch.float32)},
                lambda made: {"cat_dim": 0, "param": made[tensor.key]},
                lambda read: {tensor.key: read["param"]},
            )

    return FolderPart(name=name, file=name, num_bytes=num_bytes, largest=num_bytes, write=write)


def _write_states(found: UniversalFolder, folder: Path) -> None:
    with disk_errors(f"to write into {folder}"):
        _save_states(found, folder)


def _save_states(found: UniversalFolder, folder: Path) -> None:
    with_moments = len(found.models) > 1
    step = found.step if with_moments else 0
    shapes = {tensor.key: torch.Size(tensor.shape) for tensor in found.tensors}
    module: dict[str, Any] = {
        "module": {},
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": [shapes],
        "frozen_param_shapes": None,
        "shared_params": {},
        "frozen_param_fragments": None,
        "lr_scheduler": None,
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": 0,
        "global_steps": step,
        "global_samples": 0,
        "dp_world_size": 1,
        "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
        "ds_version": _VERSION,
    }
    for name in _MODULE_FILES:
        torch.save(module, folder / name)
    groups: list[dict[str, Any]] = [{"params": []}]
    state: dict[str, Any] = {
        "ds_version": _VERSION,
        "clip_grad": 0.0,
        "overflow": False,
        "dynamic_loss_scale": False,
        "param_groups": groups,
        # At stage 3 it is looked for one room further in.
        "optimizer_state_dict": {"state": {0: {"step": step}}, "param_groups": groups},
    }
    torch.save(state, folder / "zero" / "optimizer_state.pt")
    if with_moments:
        for tensor in found.tensors:
            torch.save(step, folder / "zero" / tensor.key / "step.pt")
