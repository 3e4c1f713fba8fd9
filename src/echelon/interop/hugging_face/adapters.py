# SPDX-License-Identifier: Apache-2.0
"""Adapters as PEFT keeps them: `adapter_config.json` and the names of its tensors.

PEFT names the layers of the model that is adapted (`q_proj`, `down_proj`), and a tensor by the path
of its layer below `base_model.model.`, with `lora_A` and `lora_B`. The rows of a B lie in the order
of the rows of its layer, which files may have in another order than we do.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from echelon.config.model.architectures.common import Architecture
from echelon.config.model.architectures.table import ARCHITECTURES
from echelon.core.choices.lora import LORA_A, LORA_B, LORA_LINEARS, Lora
from echelon.core.errors import ConfigError
from echelon.core.model_shape import ModelShape
from echelon.core.parameters import base_shape, is_adapter, parameters
from echelon.core.rulebook.weights import EXPORT_ADAPTERS
from echelon.interop.hugging_face.folder import FolderTensor, folder_tensors, tensors_of
from echelon.interop.weight_names.names import find_naming
from echelon.interop.weight_names.source import ParameterSource

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

BELOW = "base_model.model."
"""How the keys of PEFT begin; the path of a layer in the model that is adapted follows."""

LEAVES: Mapping[str, str] = {LORA_A: "lora_A", LORA_B: "lora_B"}
"""What PEFT calls the two matrices."""


def adapter_tensors(shape: ModelShape, architecture: Architecture) -> tuple[FolderTensor, ...]:
    """Return the tensors of the adapters of a model; ConfigError where PEFT has no such layers."""
    require_adapters(shape)
    places = adapter_places(shape, _layers_of(shape, architecture))
    return tuple(
        FolderTensor(key=source.key, shape=source.shape, parts=((name, source),))
        for name, source in places.items()
    )


def adapter_places(
    shape: ModelShape, layers: Mapping[str, ParameterSource]
) -> dict[str, ParameterSource]:
    """Return where PEFT keeps each matrix of an adapter, by our name of it.

    `layers` says where the weight of each layer is; adapters of others are left out.
    """
    found: dict[str, ParameterSource] = {}
    for spec in parameters(shape):
        layer, leaf, _ = spec.name.rsplit(".", 2) if is_adapter(spec.name) else ("", "", "")
        if layer in layers:
            weight = layers[layer]
            key = f"{BELOW}{weight.key.removesuffix('.weight')}.{LEAVES[leaf]}.weight"
            order = weight.order if leaf == LORA_B else None
            found[spec.name] = ParameterSource(key=key, shape=spec.shape, order=order)
    return found


def layers_named_by(
    shape: ModelShape, keys: Collection[str]
) -> tuple[dict[str, ParameterSource], dict[str, tuple[str, ...]]]:
    """Return the layers that may have an adapter, by the names that fit most of `keys`.

    By our name of each where its weight is, and by their path those that are several of ours in
    one. `keys` are those of PEFT's tensors.
    """
    best: tuple[dict[str, ParameterSource], dict[str, tuple[str, ...]]] = {}, {}
    most = -1
    for tensors in _namings(base_shape(shape)):
        alone, together = _layers(tensors)
        paths = {one.key.removesuffix(".weight") for one in alone.values()} | set(together)
        count = sum(layer_path(key) in paths for key in keys)
        if count > most:
            best, most = (alone, together), count
    return best


def layer_path(key: str) -> str:
    """Return the path of the layer that a tensor of PEFT belongs to; "" for other tensors."""
    path, _, leaf = key.removesuffix(".weight").rpartition(".")
    return path.removeprefix(BELOW) if leaf in LEAVES.values() and path.startswith(BELOW) else ""


def adapter_config(shape: ModelShape, architecture: Architecture) -> str:
    """Return the text of adapter_config.json."""
    lora = require_adapters(shape)
    layers = _layers_of(shape, architecture)
    modules = {one.key.removesuffix(".weight").rpartition(".")[2] for one in layers.values()}
    keys: dict[str, object] = {
        "base_model_name_or_path": None,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "r": lora.rank,
        "target_modules": sorted(modules),
        "task_type": "CAUSAL_LM",
        "use_rslora": lora.rslora,
    }
    return json.dumps(keys, indent=2) + "\n"


def require_adapters(shape: ModelShape) -> Lora:
    """Return the adapters of a model; ConfigError where it has none."""
    if shape.lora is None:
        raise ConfigError(
            EXPORT_ADAPTERS.problem(
                f"{shape.name} was trained whole: there are no adapters apart",
                key="--adapters",
                suggestions=("without --adapters",),
            )
        )
    return shape.lora


def _layers_of(shape: ModelShape, architecture: Architecture) -> dict[str, ParameterSource]:
    """Return where the weight of each adapted layer is in the model that PEFT adapts."""
    adapted = {spec.name.rsplit(".", 2)[0] for spec in parameters(shape) if is_adapter(spec.name)}
    alone, together = _layers(folder_tensors(base_shape(shape), architecture))
    for path, layers in together.items():
        if inside := [layer for layer in layers if layer in adapted]:
            raise ConfigError(
                EXPORT_ADAPTERS.problem(
                    f"{path}.weight of {architecture.name} is several layers in one, and "
                    f"{inside[0]} of the run has an adapter of its own",
                    key="--adapters",
                )
            )
    return {layer: source for layer, source in alone.items() if layer in adapted}


def _layers(
    tensors: Sequence[FolderTensor],
) -> tuple[dict[str, ParameterSource], dict[str, tuple[str, ...]]]:
    """Return the layers that are tensors of their own, and by path those that share one."""
    alone: dict[str, ParameterSource] = {}
    together: dict[str, tuple[str, ...]] = {}
    for tensor in tensors:
        names = [name.removesuffix(".weight") for name, _ in tensor.parts]
        linears = [one for one in names if one.rpartition(".")[2] in LORA_LINEARS]
        if not linears or not tensor.key.endswith(".weight"):
            continue
        if len(names) > 1:
            together[tensor.key.removesuffix(".weight")] = tuple(linears)
        else:
            alone[linears[0]] = replace(tensor.parts[0][1], shape=tensor.shape)
    return alone, together


def _namings(base: ModelShape) -> Iterator[tuple[FolderTensor, ...]]:
    """Yield the tensors of a model by each set of names that has one for all of them."""
    parts = (base.experts is not None, base.latent is not None)
    tried: set[tuple[str, ...]] = set()
    for one in ARCHITECTURES.values():
        keys = (*one.tensors, *one.more_tensors(base))
        if (one.experts, one.latent) != parts or keys in tried:
            continue
        tried.add(keys)
        naming = find_naming(base, set(keys))
        if naming is not None and not naming.nameless:
            yield tensors_of(naming)
