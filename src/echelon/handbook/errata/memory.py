# SPDX-License-Identifier: Apache-2.0
"""Facts behind claims about memory and about messages: bytes by `cost/` and by small plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import inf
from typing import Any

from echelon.config.load import load_job
from echelon.core.choices.optimizers import OPTIMIZERS
from echelon.core.parameters import ParameterSpec
from echelon.core.plan import ZeroStage
from echelon.core.units import GB, GIB
from echelon.cost.activations.closed_forms import gpt_block_bytes
from echelon.cost.bytes.model_sizes import (
    FP32_PRECISION,
    MIXED_PRECISION,
    STAGES,
    communication_volume,
    degree_for,
    expert_message_bytes,
    kv_bytes,
    largest_model,
    memory_saving,
    mlp_weights,
    model_states,
    num_buckets,
    ring_steps,
    tensor_message_bytes,
)
from echelon.cost.bytes.sent import bytes_sent
from echelon.cost.bytes.terms import (
    all_gather_bytes,
    all_reduce_bytes,
    all_to_all_bytes,
    reduce_scatter_bytes,
)
from echelon.handbook.errata.claims import Formula, with_named_inputs

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
    stored = N * model_states(psi, 0, N).parameters / MIXED_PRECISION.parameters
    return {
        "total_B": stored / GB,
        "redundant_B": (stored - psi) / GB,
        "redundant_over_useful": (stored - psi) / psi,
        "total_over_useful": stored / psi,
    }


def _activations(s: int, b: int, h: int, a: int, t: int) -> dict[str, float]:
    """Return the megabytes of a block of GPT, with tensor parallelism and beside sequences."""
    return {
        "tp_only_MB": b * gpt_block_bytes(s, h, a, tp=t) / 1e6,
        "tp_sp_MB": b * gpt_block_bytes(s, h, a, tp=t, sequence_parallel=True) / 1e6,
        "no_tp_MB": b * gpt_block_bytes(s, h, a) / 1e6,
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
    return {"KV_GB": keys, "with_weights_GB": keys + model_states(psi, 0, 1).parameters / GB}


MEMORY: Mapping[str, Formula] = {
    "distributed-31": lambda i: _held(i.psi / (i.tp * i.pp), 0, 1),
    "distributed-32": lambda _: MIXED_PRECISION.total,
    "distributed-33": with_named_inputs(_bars),
    "distributed-34": lambda i: [model_states(1, 1, n).total for n in i.N],
    "distributed-35": lambda i: memory_saving(2, degree_for(i.bytes_a_weight, 2) or 1),
    "distributed-36": lambda i: model_states(1, 3, i.N).total,
    "distributed-37": with_named_inputs(_figures),
    "distributed-40": lambda i: memory_saving(3, i.N),
    "distributed-42": lambda _: MIXED_PRECISION.total / FP32_PRECISION.total,
    "distributed-44": lambda i: _held(i.psi, 3, i.N),
    "distributed-46": lambda i: model_states(i.psi / i.N, 0, 1).parameters / GB,
    "distributed-47": lambda i: (
        largest_model(i.memory_GB * GB, 2, i.N, optimizer_offload=True) / GB
    ),
    "llm-training-01": lambda i: model_states(i.psi, 0, 1).parameters / GB,
    "llm-training-04": lambda i: {
        "opt_states": [MIXED_PRECISION.optimizer / model_states(1, 1, n).optimizer for n in i.N],
        "total": [memory_saving(1, n) for n in i.N],
    },
    "llm-training-05": lambda i: {
        "grads_opt": [14 / (model_states(1, 2, n).total - MIXED_PRECISION.parameters) for n in i.N],
        "total": [memory_saving(2, n) for n in i.N],
    },
    "llm-training-06": lambda i: [memory_saving(3, n) for n in i.N],
    "llm-training-08": with_named_inputs(_activations),
    "llm-training-12": lambda i: _held(i.psi, 0, 1),
    "llm-training-16": with_named_inputs(_copies),
    "llm-training-17": lambda i: (
        model_states(i.psi, 3, i.N).parameters / MIXED_PRECISION.parameters / GB
    ),
    "llm-training-19": lambda i: [
        MIXED_PRECISION.master * i.psi / GB,
        model_states(i.psi, 0, 1).optimizer / GB,
    ],
    "llm-training-20": lambda _: {
        "adam": len(OPTIMIZERS["adamw"].state),
        "master_copy": MIXED_PRECISION.master // 4,
    },
    "llm-training-21": lambda i: model_states(i.psi, 0, 1).total / GIB,
    "llm-training-22": lambda _: MIXED_PRECISION.optimizer / MIXED_PRECISION.total,
    "llm-training-23a": lambda i: [_held(i.psi, i.stage, i.N), memory_saving(i.stage, i.N)],
    "llm-training-23b": lambda i: [_held(i.psi, i.stage, i.N), memory_saving(i.stage, i.N)],
    "llm-training-23c": lambda i: [_held(i.psi, i.stage, i.N), memory_saving(i.stage, i.N)],
    "llm-training-24": lambda i: model_states(i.psi, 1, i.N).optimizer / GB,
    "llm-training-25": with_named_inputs(_values),
    "llm-training-26": with_named_inputs(_layers),
    "llm-training-28": with_named_inputs(_toy),
    "llm-training-43": with_named_inputs(_kv),
    "llm-training-44": with_named_inputs(_kv_and_weights),
    "llm-training-55": with_named_inputs(_keys),
    "llm-training-56": lambda i: {
        "per_gpu_all_layers": kv_bytes(i.T, i.d, i.L) / i.N / GIB,
        "per_gpu_per_layer": kv_bytes(i.T, i.d, 1) / i.N / GIB,
    },
    "llm-training-66": lambda i: [_held(i.psi, 2, n) for n in i.N],
    "llm-training-67": lambda i: [_held(i.psi, 3, n) for n in i.N],
    "llm-training-68": lambda i: {
        "no_zero": _held(i.psi / (i.tp * i.pp), 0, i.dp),
        "zero1": _held(i.psi / (i.tp * i.pp), 1, i.dp),
    },
    "llm-training-70": lambda i: _held(i.psi, 3, i.N),
    "scaling-03": lambda _: {
        "master_m_v_over_fp16": MIXED_PRECISION.optimizer / MIXED_PRECISION.parameters,
        "master_m_v_over_fp32": MIXED_PRECISION.optimizer / FP32_PRECISION.parameters,
        "m_v_over_fp32": FP32_PRECISION.optimizer / FP32_PRECISION.parameters,
    },
    "scaling-05": lambda _: [memory_saving(1, inf), memory_saving(2, inf)],
    "between-04": lambda i: {
        "optimizer_state": MIXED_PRECISION.optimizer / model_states(1, 1, i.N).optimizer,
        "total_at_most": memory_saving(1, inf),
    },
}
"""By the id of the claim."""


WHOLE = 64 * 10**6
"""Bytes of a buffer of which shares are told; every degree of a claim divides it."""

HALVES = 2
"""A block has attention and an MLP, which send alike."""


def _gathered(N: int) -> float:
    return all_gather_bytes(WHOLE // N, N) / WHOLE


def _reduced(degree: int) -> float:
    return all_reduce_bytes(WHOLE, degree) / WHOLE


@lru_cache(maxsize=4)
def _sums_of_a_block(sequence_parallel: bool) -> tuple[float, float]:
    """Return the collectives over tensor ranks of one block and microbatch: forward, backward."""
    flag = str(sequence_parallel).lower()
    sets = ("model.layers=1", "mesh.tp=2", f"mesh.sequence_parallel={flag}")
    plan = load_job("nano", sets).plan
    counts = {term.name: term.count / plan.num_microbatches for term in bytes_sent(plan, 0)}
    return counts["blocks forward"], counts["blocks backward"]


def _of_an_mlp() -> dict[str, dict[str, float]]:
    (forward, backward), (cut, _) = _sums_of_a_block(False), _sums_of_a_block(True)
    # With sequence parallelism a gather and a reduce-scatter take the place of each sum.
    pair = cut / HALVES / 2
    return {
        "forward": {"all_gather": 0, "all_reduce": forward / HALVES},
        "backward": {"all_gather": 0, "all_reduce": backward / HALVES},
        "sequence_parallel": {"all_gather": pair, "reduce_scatter": pair},
    }


def _of_a_block() -> dict[str, float]:
    forward, backward = _sums_of_a_block(False)
    return {"forward": forward, "backward": backward}


def _tensor_traffic(L: int, d: int, s: int, b: int, N: int) -> dict[str, float]:
    message = tensor_message_bytes(L, b, s, d)
    sent = all_reduce_bytes(message, N)
    return {
        "a_rank_sends_GB": sent / 1e9,
        "all_send_GB": N * sent / 1e9,
        "with_backward_GB": 2 * sent / 1e9,
        "ms_at_300_GBps": 1e3 * sent / 300e9,
        "ms_at_25_GBps": 1e3 * sent / 25e9,
    }


@lru_cache(maxsize=1)
def _exchanges() -> dict[str, int]:
    """Return the all-to-alls of a block with experts: forward and backward."""
    sets = ("cluster.preset=2xh100", "mesh.dp_shard=2", "mesh.ep=2", "zero.stage=1")
    batch = ("model.layers=1", "batch.global_sequences=2")
    terms = bytes_sent(load_job("mixtral-8x7b", (*sets, *batch)).plan, 0)
    moved = [term for term in terms if term.name.startswith(("dispatch", "combine"))]
    return {
        way: sum(term.count for term in moved if term.name.endswith(way))
        for way in ("forward", "backward")
    }


VOLUME: Mapping[str, Formula] = {
    "distributed-13": with_named_inputs(_of_an_mlp),
    "distributed-14": lambda _: _of_a_block()["forward"] / HALVES,
    "distributed-15": with_named_inputs(_gathered),
    "distributed-16": lambda i: [_gathered(n) for n in i.N],
    "distributed-17": lambda i: [_reduced(n) for n in i.N],
    "distributed-18": lambda _: _reduced(8) / _gathered(8),
    "distributed-19": lambda i: {
        "gather_of_inner": i.expansion * _gathered(i.N),
        "sum_of_output": _reduced(i.N),
    },
    "distributed-38": lambda _: {
        name: communication_volume(stage).multiples
        for name, stage in zip(("DDP", "ZeRO1", "ZeRO2", "ZeRO3"), STAGES, strict=True)
    },
    "distributed-39": lambda _: (
        communication_volume(3).multiples / communication_volume(0).multiples - 1
    ),
    "llm-training-07": lambda _: {
        "all_gather": communication_volume(3).all_gathers,
        "reduce_scatter": communication_volume(3).reduce_scatters,
        "volume_psi": communication_volume(3).multiples,
    },
    "llm-training-14": lambda i: num_buckets(i.bytes, bucket_bytes=i.bucket),
    "llm-training-29": lambda i: tensor_message_bytes(i.L, i.b, i.s, i.d),
    "llm-training-30": with_named_inputs(_tensor_traffic),
    "llm-training-33": with_named_inputs(_of_a_block),
    "llm-training-51": lambda i: expert_message_bytes(i.b * i.s, i.d, i.k, i.N, size=i.bytes),
    "llm-training-53": with_named_inputs(_exchanges),
    "llm-training-64": lambda i: [
        _reduced(i.N),
        _gathered(i.N),
        reduce_scatter_bytes(WHOLE // i.N, i.N) / WHOLE,
        all_to_all_bytes(WHOLE, i.N) / WHOLE,
    ],
    "llm-training-65": lambda i: {
        "a2a_messages": i.N * (i.N - 1),
        "ring_allgather_messages": i.N * ring_steps(i.N) // 2,
        "ring_allreduce_messages": i.N * ring_steps(i.N),
        "a2a_volume": all_to_all_bytes(WHOLE, i.N) / WHOLE,
        "allreduce_volume": _reduced(i.N),
    },
    "scaling-01": lambda i: ring_steps(degree=i.N),
}
"""By the id of the claim."""
