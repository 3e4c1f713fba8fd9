# SPDX-License-Identifier: Apache-2.0
"""Which tensors a folder of Hugging Face has for a model, of what shape, and in which files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from echelon.config.model.architectures.record import Architecture
from echelon.core.model_shape import ModelShape
from echelon.core.parameters import EMBEDDING, router_biases
from echelon.interop.weight_names.mixtures import ROUTER_BIAS
from echelon.interop.weight_names.names import WeightNaming, find_naming
from echelon.interop.weight_names.source import ParameterSource

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderTensor:
    """Say what a tensor of the folder is made of: parameters by name, and where each lies in it."""

    key: str
    shape: tuple[int, ...]
    parts: tuple[tuple[str, ParameterSource], ...]

    @property
    def numel(self) -> int:
        """Return the number of its elements."""
        return prod(self.shape)


def folder_tensors(shape: ModelShape, architecture: Architecture) -> tuple[FolderTensor, ...]:
    """Return the tensors of a model, each of which is filled whole by its parts.

    A tied head is not among them: whoever reads the folder takes the embedding.
    """
    keys = {*architecture.tensors, *architecture.more_tensors(shape)}
    if router_biases(shape):
        keys.add(f"model.layers.0.mlp.gate{ROUTER_BIAS}")
    naming = find_naming(shape, keys)
    assert naming is not None, "a tensor of each architecture is known"
    assert not naming.nameless, f"{architecture.name} has no name for {naming.nameless}"
    return tensors_of(naming)


def own_tensors(shape: ModelShape) -> tuple[FolderTensor, ...]:
    """Return the tensors of a model in Echelon's own names: one for each parameter."""
    naming = find_naming(shape, {EMBEDDING, *(spec.name for spec in router_biases(shape))})
    assert naming is not None, "a parameter's own name is known"
    return tensors_of(naming)


def tensors_of(naming: WeightNaming) -> tuple[FolderTensor, ...]:
    """Return the tensors that parameters with these names make up, whole and without padding."""
    parts: dict[str, list[tuple[str, ParameterSource]]] = {}
    for name, source in naming.sources.items():
        parts.setdefault(source.key, []).append((name, source))
    return tuple(
        FolderTensor(key=key, shape=found[0][1].shape, parts=tuple(found))
        for key, found in parts.items()
    )


def share_out(
    tensors: Sequence[FolderTensor], item_bytes: int, file_bytes: int
) -> Mapping[str, tuple[FolderTensor, ...]]:
    """Return the files of the folder, each of at most `file_bytes` or of one tensor, in order."""
    groups: list[list[FolderTensor]] = [[]]
    held = 0
    for tensor in tensors:
        size = tensor.numel * item_bytes
        if groups[-1] and held + size > file_bytes:
            groups.append([])
            held = 0
        groups[-1].append(tensor)
        held += size
    if len(groups) == 1:
        return {SINGLE_NAME: tuple(groups[0])}
    return {
        f"model-{place:05d}-of-{len(groups):05d}.safetensors": tuple(group)
        for place, group in enumerate(groups, start=1)
    }


def index_text(files: Mapping[str, Sequence[FolderTensor]], item_bytes: int) -> str:
    """Return the index of several files: which tensor is in which."""
    total = sum(tensor.numel for group in files.values() for tensor in group)
    table = {tensor.key: name for name, group in files.items() for tensor in group}
    content = {
        "metadata": {"total_parameters": total, "total_size": total * item_bytes},
        "weight_map": dict(sorted(table.items())),
    }
    return json.dumps(content, indent=2) + "\n"
