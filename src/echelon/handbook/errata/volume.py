# SPDX-License-Identifier: Apache-2.0
"""What holds of claims about what is sent: counts and bytes, by `cost/` and by small plans."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from echelon.config.load import load_job
from echelon.cost.bytes.model_sizes import (
    STAGES,
    communication_volume,
    expert_message_bytes,
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
