"""What holds of claims about memory, by the formulas of `cost/model_states.py` and others.

psi is a number of weights, N of data ranks; GB is 10^9 bytes. Parameters of functions are the
letters of the guides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any

from echelon.config.load import load_job
from echelon.core.parameters import ParameterSpec
from echelon.core.plan import ZeroStage
from echelon.cost.context_facts import block_activation_bytes, kv_bytes
from echelon.cost.model_sizes import mlp_weights
from echelon.cost.model_states import (
    FP32,
    MIXED,
    STAGES,
    degree_for,
    largest_model,
    model_states,
    saving,
)
from echelon.cost.updates import STATE_KINDS

GB, GIB = 1e9, 2**30
SIZE = 2
"""Bytes of a 16-bit value."""


def _held(psi: float, stage: ZeroStage, degree: float) -> float:
    return model_states(psi, stage, degree).total / GB


def _bars(N: float) -> list[float]:
    return [model_states(1, stage, N).total for stage in STAGES]


def _figures(figures: Sequence[float]) -> dict[str, Any]:
    """Say which N gives each of the figures of a list, at stages 1, 2 and 3."""
    stages: tuple[ZeroStage, ...] = (1, 2, 3)
    needed = [degree_for(one, stage) or "never" for one, stage in zip(figures, stages, strict=True)]
    return {
        **dict(zip((f"N_of_stage_{stage}" for stage in stages), needed, strict=True)),
        "N_of_figure": degree_for(7, 1),
        "values_at_N16": _bars(16),
        "values_at_N64": _bars(64),
    }


def _copies(psi: float, N: int) -> dict[str, float]:
    stored = N * model_states(psi, 0, N).parameters / MIXED.parameters
    return {
        "total_B": stored / GB,
        "redundant_B": (stored - psi) / GB,
        "redundant_over_useful": (stored - psi) / psi,
        "total_over_useful": stored / psi,
    }


def _activations(s: int, b: int, h: int, a: int, t: int) -> dict[str, float]:
    """Return the megabytes of a block of GPT, with tensor parallelism and beside sequences."""
    return {
        "tp_only_MB": b * block_activation_bytes(s, h, a, tp=t) / 1e6,
        "tp_sp_MB": b * block_activation_bytes(s, h, a, tp=t, sequence_parallel=True) / 1e6,
        "no_tp_MB": b * block_activation_bytes(s, h, a) / 1e6,
    }


def _keys(T: int, d: int, L: int, kv_share: int) -> dict[str, float]:
    total = kv_bytes(T, d, L)
    return {
        "per_layer_GiB": kv_bytes(T, d, 1) / GIB,
        "total_GiB": total / GIB,
        "total_GB": total / GB,
        "with_8_of_64_kv_heads_GiB": kv_bytes(T, d // kv_share, L) / GIB,
    }


def _toy(d: int, dff: int, N: int) -> list[int]:
    """Return the weights of an MLP, and those of one of N tensor ranks."""
    up = ParameterSpec(name="up", shape=(dff, d), layer=0, split_dim=0)
    down = ParameterSpec(name="down", shape=(d, dff), layer=0, split_dim=1)
    return [mlp_weights(d, dff), up.local_numel(N) + down.local_numel(N)]


def _values(d: int) -> dict[str, float]:
    values = mlp_weights(d, 4 * d, matrices=1)
    return {"values": values, "MB": values * SIZE / 1e6, "MiB": values * SIZE / 2**20}


def _layers(L: int, d: int) -> dict[str, float]:
    size = L * mlp_weights(d, 4 * d) * SIZE
    return {"GB": size / GB, "GiB": size / GIB}


def _kv(T: int, d: int, L: int) -> dict[str, float]:
    return {"GiB": kv_bytes(T, d, L) / GIB, "GB": kv_bytes(T, d, L) / GB}


def _kv_and_weights(T: int, d: int, L: int, psi: float) -> dict[str, float]:
    keys = kv_bytes(T, d, L) / GB
    return {
        "KV_GB": keys,
        "with_weights_GB": keys + model_states(psi, 0, 1).parameters / GB,
    }


def _device_memory(clusters: Sequence[str]) -> list[float]:
    plans = (load_job("nano", (f"cluster.preset={name}",)).plan for name in clusters)
    return [plan.cluster.device.memory_bytes / GB for plan in plans]


MEMORY: Mapping[str, Callable[..., object]] = {
    "002-31": lambda psi, tp, pp: _held(psi / (tp * pp), 0, 1),
    "002-32": lambda: MIXED.total,
    "002-33": _bars,
    "002-34": lambda N: [model_states(1, 1, n).total for n in N],
    "002-35": lambda bytes_a_weight: saving(2, degree_for(bytes_a_weight, 2) or 1),
    "002-36": lambda N: model_states(1, 3, N).total,
    "002-37": _figures,
    "002-40": lambda N: saving(3, N),
    "002-42": lambda: MIXED.total / FP32.total,
    "002-44": lambda psi, N: _held(psi, 3, N),
    "002-46": lambda psi, N: model_states(psi / N, 0, 1).parameters / GB,
    "002-47": lambda memory_GB, N: largest_model(memory_GB * GB, 2, N, optimizer_offload=True) / GB,
    "003-01": lambda psi: model_states(psi, 0, 1).parameters / GB,
    "003-02": _device_memory,
    "003-04": lambda N: {
        "opt_states": [MIXED.optimizer / model_states(1, 1, n).optimizer for n in N],
        "total": [saving(1, n) for n in N],
    },
    "003-05": lambda N: {
        "grads_opt": [14 / (model_states(1, 2, n).total - MIXED.parameters) for n in N],
        "total": [saving(2, n) for n in N],
    },
    "003-06": lambda N: [saving(3, n) for n in N],
    "003-08": _activations,
    "003-12": lambda psi: _held(psi, 0, 1),
    "003-16": _copies,
    "003-17": lambda psi, N: model_states(psi, 3, N).parameters / MIXED.parameters / GB,
    "003-19": lambda psi: [MIXED.master * psi / GB, model_states(psi, 0, 1).optimizer / GB],
    "003-20": lambda: {"adam": len(STATE_KINDS["adamw"]), "master_copy": MIXED.master // 4},
    "003-21": lambda psi: model_states(psi, 0, 1).total / GIB,
    "003-22": lambda: MIXED.optimizer / MIXED.total,
    "003-23a": lambda psi, N, stage: [_held(psi, stage, N), saving(stage, N)],
    "003-23b": lambda psi, N, stage: [_held(psi, stage, N), saving(stage, N)],
    "003-23c": lambda psi, N, stage: [_held(psi, stage, N), saving(stage, N)],
    "003-24": lambda psi, N: model_states(psi, 1, N).optimizer / GB,
    "003-25": _values,
    "003-26": _layers,
    "003-28": _toy,
    "003-43": _kv,
    "003-44": _kv_and_weights,
    "003-55": _keys,
    "003-56": lambda T, d, L, N: {
        "per_gpu_all_layers": kv_bytes(T, d, L) / N / GIB,
        "per_gpu_per_layer": kv_bytes(T, d, 1) / N / GIB,
    },
    "003-66": lambda psi, N: [_held(psi, 2, n) for n in N],
    "003-67": lambda psi, N: [_held(psi, 3, n) for n in N],
    "003-68": lambda psi, tp, pp, dp: {
        "no_zero": _held(psi / (tp * pp), 0, dp),
        "zero1": _held(psi / (tp * pp), 1, dp),
    },
    "003-70": lambda psi, N: _held(psi, 3, N),
    "004-03": lambda: {
        "master_m_v_over_fp16": MIXED.optimizer / MIXED.parameters,
        "master_m_v_over_fp32": MIXED.optimizer / FP32.parameters,
        "m_v_over_fp32": FP32.optimizer / FP32.parameters,
    },
    "004-05": lambda: [saving(1, inf), saving(2, inf)],
    "X-04": lambda N: {
        "optimizer_state": MIXED.optimizer / model_states(1, 1, N).optimizer,
        "total_at_most": saving(1, inf),
    },
}
"""By the id of the claim."""
