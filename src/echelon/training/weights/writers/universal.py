# SPDX-License-Identifier: Apache-2.0
"""Weights as a universal folder of DeepSpeed: a folder for each parameter of the module.

With what Adam keeps of each, where a checkpoint has it, an engine of any ZeRO stage goes on from it
(`checkpoint.load_universal`). Learning rate and weight decay are those of the engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from echelon.core.disk import disk_errors
from echelon.interop.hugging_face.folder import FolderTensor
from echelon.training.weights.export import StoredModel, filled
from echelon.training.weights.writers.archive import save_archive
from echelon.training.weights.writers.shares import FolderPart, TensorRoom, Writers

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
            _part(model, tensor, zero / tensor.key / f"{kind}.pt")
            for tensor in found.tensors
            for kind, model in found.models.items()
        ]
    )
    # Last, for this is what an engine looks for first.
    writers.on_first(lambda: _write_states(found, folder))


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
