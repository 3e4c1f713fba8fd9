"""Adapters as PEFT keeps them: `adapter_config.json` and the names of its tensors.

PEFT names the layers of the model that is adapted (`q_proj`, `down_proj`), and a tensor by the path
of its layer below `base_model.model.`, with `lora_A` and `lora_B`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from echelon.config.model.architectures.record import Architecture
from echelon.core.choices.lora import LORA_A, LORA_B, Lora
from echelon.core.errors import ConfigError
from echelon.core.model_shape import ModelShape
from echelon.core.parameters import base_shape, is_adapter, parameters
from echelon.core.rulebook.export_weights import EXPORT_ADAPTERS
from echelon.interop.hugging_face.folder import FolderTensor, folder_tensors
from echelon.interop.weight_names.source import ParameterSource

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

_BELOW = "base_model.model."
_LEAVES: Mapping[str, str] = {LORA_A: "lora_A", LORA_B: "lora_B"}


def adapter_tensors(shape: ModelShape, architecture: Architecture) -> tuple[FolderTensor, ...]:
    """Return the tensors of the adapters of a model; ConfigError where PEFT has no such layers."""
    require_adapters(shape)
    layers = _layer_keys(shape, architecture)
    found: list[FolderTensor] = []
    for spec in parameters(shape):
        if is_adapter(spec.name):
            layer, leaf, _ = spec.name.rsplit(".", 2)
            key = f"{_BELOW}{layers[layer]}.{_LEAVES[leaf]}.weight"
            source = ParameterSource(key=key, shape=spec.shape)
            found.append(FolderTensor(key=key, shape=spec.shape, parts=((spec.name, source),)))
    return tuple(found)


def adapter_config(shape: ModelShape, architecture: Architecture) -> str:
    """Return the text of adapter_config.json."""
    lora = require_adapters(shape)
    modules = {key.rpartition(".")[2] for key in _layer_keys(shape, architecture).values()}
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
                f"{shape.name} was trained whole: there are no adapters apart", key="--adapters"
            )
        )
    return shape.lora


def _layer_keys(shape: ModelShape, architecture: Architecture) -> dict[str, str]:
    """Return the path of each adapted layer in the model that PEFT adapts, by our own name."""
    adapted = {spec.name.rsplit(".", 2)[0] for spec in parameters(shape) if is_adapter(spec.name)}
    found: dict[str, str] = {}
    for tensor in folder_tensors(base_shape(shape), architecture):
        for name, _ in tensor.parts:
            layer, _, leaf = name.rpartition(".")
            if leaf != "weight" or layer not in adapted:
                continue
            whole = len(tensor.parts) == 1
            if not whole:
                raise ConfigError(
                    EXPORT_ADAPTERS.problem(
                        f"{tensor.key} of {architecture.name} is several layers in one, and "
                        f"{layer} of the run has an adapter of its own",
                        key="--adapters",
                    )
                )
            found[layer] = tensor.key.removesuffix(".weight")
    return found
