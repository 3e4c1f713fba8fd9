# SPDX-License-Identifier: Apache-2.0
"""Under which name, and how laid out, files of weights keep the experts of a block.

Files of Qwen and DeepSeek have the matrices of each expert under the names of a dense MLP, those of
Mixtral call them w1, w3 and w2. transformers 5 holds the experts of a block in two tensors: gate
and up of an expert, one after the other, in [E, 2 F, D], and down in [E, D, F]. gpt-oss has
[in, out] there: gate and up by turns in the columns of [E, D, 2 F], down in [E, F, D], and biases
beside them.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from echelon.core.model_shape import Experts
from echelon.core.parameters import ParameterSpec
from echelon.interop.weight_names.source import ParameterSource

MixtureKind = Literal["each", "mixtral", "fused", "by-turns"]

ROUTER_BIAS = ".e_score_correction_bias"
"""How DeepSeek's files call what is added to scores for the choice of experts."""

_PREDICTOR = ".eh_proj.weight"
"""A part that only layers have that predict the token after the next one."""

_MIXTRAL = {"gate": "w1", "up": "w3", "down": "w2"}


def find_mixture_kind(keys: Collection[str]) -> MixtureKind:
    """Return how a file with these keys holds experts."""
    if any(key.endswith(".mlp.experts.gate_up_proj_bias") for key in keys):
        return "by-turns"
    if any(key.endswith(".mlp.experts.gate_up_proj") for key in keys):
        return "fused"
    if any(".block_sparse_moe." in key for key in keys):
        return "mixtral"
    return "each"


def find_predictors(prefix: str, layers: int, keys: Collection[str]) -> tuple[str, ...]:
    """Return how the keys of layers begin that follow a model of `layers`, to predict more tokens.

    They are no part of the decoder (DeepSeek-V3, 2024, section 2.2), and transformers drops them.
    """
    blocks = (key.removesuffix(_PREDICTOR) for key in keys if key.endswith(_PREDICTOR))
    after = {f"{prefix}layers.{layer}" for layer in range(layers, layers + 8)}
    return tuple(f"{block}." for block in blocks if block in after)


def mixture_source(
    kind: MixtureKind, experts: Experts, spec: ParameterSpec, block: str
) -> ParameterSource | None:
    """Return where a file keeps a part of the mixture of experts of a block; None if nowhere.

    `block` is how the keys of the block begin.
    """
    *_, name, leaf = spec.name.split(".")
    home = f"{block}block_sparse_moe" if kind == "mixtral" else f"{block}mlp"
    if kind == "by-turns" and spec.expert is None:
        keys = {"router": f"{home}.router.weight", "logit_bias": f"{home}.router.bias"}
        return ParameterSource(key=keys[name], shape=spec.shape) if name in keys else None
    if kind == "by-turns":
        return _by_turns(experts, spec, f"{home}.experts")
    if name == "logit_bias":
        return None
    if name == "router":
        key = f"{home}.gate.weight" if leaf == "weight" else f"{home}.gate{ROUTER_BIAS}"
        return ParameterSource(key=key, shape=spec.shape)
    if spec.expert is None:
        return ParameterSource(key=f"{home}.shared_experts.{name}_proj.{leaf}", shape=spec.shape)
    if kind == "fused":
        return _fused(experts, spec, f"{home}.experts") if leaf == "weight" else None
    part = _MIXTRAL[name] if kind == "mixtral" else f"{name}_proj"
    return ParameterSource(key=f"{home}.experts.{spec.expert}.{part}.{leaf}", shape=spec.shape)


def _fused(experts: Experts, spec: ParameterSpec, home: str) -> ParameterSource:
    assert spec.expert is not None
    out, inner = spec.shape
    if spec.name.endswith(".down.weight"):
        shape = (experts.num_experts, out, inner)
        return ParameterSource(key=f"{home}.down_proj", shape=shape, start=spec.expert * out)
    start = 2 * spec.expert * out + (out if spec.name.endswith(".up.weight") else 0)
    shape = (experts.num_experts, 2 * out, inner)
    return ParameterSource(key=f"{home}.gate_up_proj", shape=shape, start=start)


def _by_turns(experts: Experts, spec: ParameterSpec, home: str) -> ParameterSource:
    """Return where a part of an expert is in a tensor that has out as its last dim."""
    assert spec.expert is not None
    out, *inner = spec.shape
    *_, name, leaf = spec.name.split(".")
    turns, part = (1, "down") if name == "down" else (2, "gate_up")
    return ParameterSource(
        key=f"{home}.{part}_proj" + ("_bias" if leaf == "bias" else ""),
        shape=(experts.num_experts, *inner, turns * out),
        start=int(name == "up"),
        transposed=True,
        row=spec.expert * (inner[0] if inner else 1),
        step=turns,
    )
