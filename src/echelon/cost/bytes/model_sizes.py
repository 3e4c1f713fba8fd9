# SPDX-License-Identifier: Apache-2.0
"""Closed forms without a plan: model state by ZeRO stage, weights, messages and rates.

Rajbhandari et al., "ZeRO", 2020, sections 3.1 and 5: psi weights, N data ranks, Adam in mixed
precision (2 bytes of parameter, 2 of gradient, 12 of fp32 copy and two moments):

    stage 0  16 psi        stage 1  4 psi + 12 psi/N
    stage 3  16 psi/N      stage 2  2 psi + 14 psi/N

There is no figure without N: the well-known "4x, 8x" are limits for N without end. What a certain
plan holds, padding included, is `cost/bytes/held.py`; without padding the two are equal.

The weights of a model stand by what they are for (`weights_by_part`). Routed experts are apart:
`ep` ranks share them out, and N tp / ep ranks hold the same ones.

Messages and rates are those of calculators and published claims: b sequences of s positions, D the
hidden width, L blocks, n ranks. Training keeps keys and values as activations for backward (with
recompute, those of one block at a time); generation keeps them in its cache. Their bytes are the
same formula. Bytes that a certain plan sends are in `cost/bytes/sent.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, cos, exp, inf, log, sin
from typing import get_args

import numpy as np

from echelon.core.model_shape import ModelShape
from echelon.core.parameters import EMBEDDING, HEAD, ParameterSpec, parameters
from echelon.core.plan import ZeroStage
from echelon.cost.inputs.cost_inputs import CostInputs, data_group_links
from echelon.cost.inputs.numbers import LayoutNumbers, ModelNumbers, Num

STAGES: tuple[ZeroStage, ...] = get_args(ZeroStage)


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePrecision:
    """Give the bytes that a weight takes of each kind; without `master`, parameters are updated."""

    parameters: int
    gradients: int
    master: int
    moments: int

    @property
    def optimizer(self) -> int:
        """Return the bytes that stage 1 shares out: the master copy and the moments."""
        return self.master + self.moments

    @property
    def total(self) -> int:
        """Return the bytes of a weight where nothing is shared out."""
        return self.parameters + self.gradients + self.optimizer


MIXED_PRECISION = StatePrecision(parameters=2, gradients=2, master=4, moments=8)
FP32_PRECISION = StatePrecision(parameters=4, gradients=4, master=0, moments=8)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStates:
    """Hold the bytes of each kind that one rank holds."""

    parameters: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        """Return the bytes of all kinds."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def without_optimizer(self) -> float:
        """Return what stays on the device where optimizer state is offloaded."""
        return self.parameters + self.gradients


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicationVolume:
    """Count the collectives over all weights that one step takes.

    A rank sends (N-1)/N of the weights in a reduce-scatter or an all-gather, twice that in an
    all-reduce, which is one of each.
    """

    all_reduces: int = 0
    reduce_scatters: int = 0
    all_gathers: int = 0

    @property
    def multiples(self) -> int:
        """Return what a rank sends, in units of (N-1)/N psi."""
        return 2 * self.all_reduces + self.reduce_scatters + self.all_gathers

    def sent_bytes(self, num_parameters: float, degree: float, size: int) -> float:
        """Return the bytes that one rank sends, `size` bytes a weight."""
        return self.multiples * num_parameters * size * (degree - 1) / degree


def model_states(
    num_parameters: float,
    stage: ZeroStage,
    degree: float,
    precision: StatePrecision = MIXED_PRECISION,
) -> ModelStates:
    """Return the bytes that each of `degree` data ranks holds of a model at a ZeRO stage.

    With tensor and pipeline parallelism, `num_parameters` are those of one rank's part. A `degree`
    of infinity gives the limit.
    """
    share = num_parameters / degree
    return ModelStates(
        parameters=precision.parameters * (share if stage >= 3 else num_parameters),
        gradients=precision.gradients * (share if stage >= 2 else num_parameters),
        optimizer=precision.optimizer * (share if stage >= 1 else num_parameters),
    )


def memory_saving(
    stage: ZeroStage, degree: float, precision: StatePrecision = MIXED_PRECISION
) -> float:
    """Return how many times less a rank holds than without ZeRO."""
    return precision.total / model_states(1, stage, degree, precision).total


def degree_for(
    bytes_a_weight: float, stage: ZeroStage, precision: StatePrecision = MIXED_PRECISION
) -> float | None:
    """Return the degree at which a stage takes so many bytes a weight; None where none does."""
    kept = model_states(1, stage, inf, precision).total
    shared = precision.total - kept
    if bytes_a_weight <= kept or shared == 0:
        return None
    return shared / (bytes_a_weight - kept)


def states_formula(stage: ZeroStage, precision: StatePrecision = MIXED_PRECISION) -> str:
    """Return the formula of a stage, such as ``4 psi + 12 psi/N``."""
    kept = round(model_states(1, stage, inf, precision).total)
    shared = precision.total - kept
    parts = [f"{kept} psi"] * (kept > 0) + [f"{shared} psi/N"] * (shared > 0)
    return " + ".join(parts)


def communication_volume(
    stage: ZeroStage, *, reshard_after_forward: bool = True
) -> CommunicationVolume:
    """Return the collectives of one step of one microbatch: 2, 2, 2 or 3 psi.

    Stages 1 and 2 send what stage 0 sends: its all-reduce is their reduce-scatter of gradients and
    all-gather of parameters. Stage 3 gathers for forward and again for backward, unless parameters
    stay whole in between.
    """
    if stage == 0:
        return CommunicationVolume(all_reduces=1)
    again = stage == 3 and reshard_after_forward
    return CommunicationVolume(reduce_scatters=1, all_gathers=2 if again else 1)


def largest_model(
    memory_bytes: float,
    stage: ZeroStage,
    degree: float,
    precision: StatePrecision = MIXED_PRECISION,
    *,
    optimizer_offload: bool = False,
) -> int:
    """Return the most parameters whose states fit, before activations."""
    states = model_states(1, stage, degree, precision)
    return int(memory_bytes // (states.without_optimizer if optimizer_offload else states.total))


def cheapest_stage(
    num_parameters: float,
    memory_bytes: float,
    degree: float,
    precision: StatePrecision = MIXED_PRECISION,
) -> ZeroStage | None:
    """Return the first stage whose states fit; None where none does.

    Lower stages come first: they send no more than higher ones, and stage 3 sends half as much
    again.
    """
    for stage in STAGES:
        if model_states(num_parameters, stage, degree, precision).total <= memory_bytes:
            return stage
    return None


ROUTED = "routed experts"


def weights_by_part(shape: ModelShape) -> Mapping[str, int]:
    """Return the number of weights of each part, those that a model has none of left out."""
    found: dict[str, int] = {}
    for spec in parameters(shape):
        part = _part(spec)
        found[part] = found.get(part, 0) + spec.numel
    return found


def states_of_rank(
    shape: ModelShape,
    stage: ZeroStage,
    degree: int,
    precision: StatePrecision,
    *,
    degrees: tuple[int, int, int] = (1, 1, 1),
) -> ModelStates:
    """Return the model states of one of tp x pp parts, over `degree` data ranks at a stage.

    `degrees` are tp, pp and ep. Stages are equal; routed experts are cut at the same stage, over
    the ranks that hold the same ones.
    """
    tp, pp, ep = degrees
    parts = weights_by_part(shape)
    routed = parts.get(ROUTED, 0)
    dense = model_states((sum(parts.values()) - routed) / (tp * pp), stage, degree, precision)
    alike = max(1, degree * tp // ep)
    experts = model_states(routed / (pp * ep), stage, alike, precision)
    return ModelStates(
        parameters=dense.parameters + experts.parameters,
        gradients=dense.gradients + experts.gradients,
        optimizer=dense.optimizer + experts.optimizer,
    )


def _part(spec: ParameterSpec) -> str:
    if spec.expert is not None:
        return ROUTED
    if spec.name == EMBEDDING or spec.name.startswith("positions"):
        return "embedding"
    if spec.name == HEAD:
        return "head"
    if len(spec.shape) == 1 or "norm" in spec.name:
        return "norms and biases"
    if ".router." in spec.name or ".shared." in spec.name:
        return "routers, shared"
    return "MLPs" if ".mlp." in spec.name else "attention"


ALL_REDUCES_PER_PASS = 2
"""Sums over tensor ranks in a forward pass of a block: behind attention and behind the MLP
(Shoeybi et al., 2019, section 3)."""

DISPATCH_AND_COMBINE = 2
"""Ways of a token in a forward pass: to its experts and back (Lepikhin et al., GShard, 2021)."""


def mlp_weights(hidden: int, ffn: int, matrices: int = 2) -> int:
    """Return the weights of an MLP without biases: D F for each of 2 matrices, 3 if gated."""
    return matrices * hidden * ffn


def tensor_message_bytes(
    layers: int, sequences: int, positions: int, hidden: int, *, size: int = 2
) -> int:
    """Return the bytes that all forward sums over tensor ranks add up: 2 L b s D times `size`.

    That is what the messages hold. A rank sends 2 (n-1)/n of it, and as much again in backward.
    """
    return ALL_REDUCES_PER_PASS * layers * sequences * positions * hidden * size


def expert_message_bytes(
    tokens: int, hidden: int, top_k: int, degree: int, *, size: int = 2
) -> float:
    """Return the bytes that leave a rank in a forward pass of a block: 2 b s D k (n-1)/n `size`.

    Loads are balanced, so 1/n of the rows stay where they are.
    """
    return DISPATCH_AND_COMBINE * tokens * hidden * top_k * size * (degree - 1) / degree


def num_buckets(num_bytes: float, bucket_bytes: int) -> int:
    """Return how many buckets gradients fill."""
    return ceil(num_bytes / bucket_bytes)


def ring_steps(degree: int) -> int:
    """Return the steps of a ring all-reduce: n - 1 to add up, n - 1 to hand around."""
    return 2 * (degree - 1)


def achieved_flops(num_devices: int, peak_flops: float, utilization: float) -> float:
    """Return the FLOP/s of a job at a model FLOPs utilization (Chowdhery et al., 2022, app. B)."""
    return num_devices * peak_flops * utilization


Vector = tuple[float, ...]


def kv_bytes(positions: int, kv_dim: int, layers: int, size: int = 2) -> int:
    """Return the bytes of keys and values of a sequence: 2 T K h L s.

    `kv_dim` is the width of all key heads together: grouped queries need kv_heads / heads of what
    as many key heads as query heads would.
    """
    return 2 * positions * kv_dim * layers * size


def attention_merge_errors(length: int = 16, ranks: int = 4) -> tuple[float, float, float]:
    """Return the largest error of the last rank's outputs of causal attention, by three ways.

    Each rank has a chunk of a small example. Against attention on one device: where a rank has its
    own keys only; where it meets all chunks and adds up their outputs with equal weights; where it
    merges them by their log-sum-exp.
    """
    angles = [0.7 * i for i in range(length)]
    q: list[Vector] = [(3 * sin(a), 2 * cos(2 * a)) for a in angles]
    k: list[Vector] = [(2 * cos(3 * a), 3 * sin(a + 1)) for a in angles]
    v: list[float] = [sin(5 * a) for a in angles]
    size = length // ranks
    worst = [0.0, 0.0, 0.0]
    for row in range(length - size, length):
        parts = [
            _attend(q[row], k[first : min(first + size, row + 1)], v[first:])
            for first in range(0, row + 1, size)
        ]
        whole, _ = _attend(q[row], k[: row + 1], v)
        total = log(sum(exp(lse) for _, lse in parts))
        ways = (
            parts[-1][0],
            sum(out for out, _ in parts) / len(parts),
            sum(out * exp(lse - total) for out, lse in parts),
        )
        worst = [max(old, abs(way - whole)) for old, way in zip(worst, ways, strict=True)]
    return worst[0], worst[1], worst[2]


def _attend(q: Vector, keys: Sequence[Vector], values: Sequence[float]) -> tuple[float, float]:
    """Return the output and the log-sum-exp of one query over some keys."""
    scores = [sum(a * b for a, b in zip(q, key, strict=True)) for key in keys]
    lse = log(sum(exp(score) for score in scores))
    return sum(exp(s - lse) * value for s, value in zip(scores, values, strict=False)), lse


def block_weights(model: ModelNumbers, layout: LayoutNumbers, *, mixture: bool) -> tuple[Num, Num]:
    """Return the weights of a block on a tensor and expert rank, those of routed experts apart."""
    hidden, tp = model.hidden, layout.tp
    latent = np.asarray(model.kv_rank) > 0
    plain = hidden * (model.query_dim + 2.0 * model.kv_dim) / tp
    width = np.where(latent, model.value_dim, model.query_dim)
    down = hidden * (model.query_rank + model.kv_rank)
    vectors = model.kv_rank - model.rope_dim
    into = np.where(np.asarray(model.query_rank) > 0, model.query_rank, hidden)
    up = (into * model.query_dim + vectors * model.kv_up_dim) / tp
    attention = np.where(latent, down + up, plain) + hidden * width / tp
    norms = (
        model.block_norms * hidden * model.norm_weights
        + model.head_norms
        + model.width_norms / tp
        + model.query_rank
        + vectors
    )
    biases = model.qkv_bias * (model.query_dim + 2.0 * model.kv_dim) / tp
    biases = biases + model.output_bias * hidden
    matrices = 1.0 + model.up
    if mixture:
        each = matrices * hidden * model.expert_ffn
        inner = each * model.shared_experts / tp + hidden * model.experts
        # Of an expert in pieces each has all of the bias of the output.
        vectors = model.expert_bias * (model.up * model.expert_ffn + hidden * layout.expert_tp)
        routed = (each + vectors) * model.experts / (layout.ep * layout.expert_tp)
        biases = biases + model.logit_bias * model.experts
    else:
        inner = matrices * hidden * model.ffn / tp
        biases = biases + model.mlp_bias * (model.up * model.ffn / tp + hidden)
        routed = 0.0
    adapters = model.adapters_whole + model.adapters_split / tp
    return attention + inner + norms + biases + adapters, routed


def embedding_weights(model: ModelNumbers, layout: LayoutNumbers) -> Num:
    """Return the weights of the embedding, and of learned positions, on a tensor rank."""
    return model.hidden * (model.vocab / layout.tp + model.positions)


def head_weights(model: ModelNumbers, layout: LayoutNumbers) -> Num:
    """Return the weights of the head and the last norm on a tensor rank; a tied one counts here."""
    return model.hidden * model.vocab / layout.tp + model.hidden * model.norm_weights


def embedding_and_head_weights(model: ModelNumbers, layout: LayoutNumbers) -> Num:
    """Return the weights of both ends where one rank holds them; a tied matrix is there once."""
    norm = model.hidden * model.norm_weights
    head = np.where(np.asarray(model.tied) > 0, norm, head_weights(model, layout))
    return embedding_weights(model, layout) + head


def node_slice_weights(work: CostInputs, shared: Num, routed: Num) -> Num:
    """Return how many weights a rank keeps for its node of so many, and of routed experts."""
    layout = work.layout
    if not np.any(np.asarray(layout.secondary) > 0.0):
        return 0.0
    ways, found = data_group_links(work), 0.0
    for way, weights in ((ways.shared, shared), (ways.routed, routed)):
        local = np.asarray(way.ranks_per_node)
        keeps = (local > 1.0) & (local < way.degree)
        found = found + np.where(keeps, weights / np.maximum(local, 1.0), 0.0)
    return np.where(np.asarray(layout.secondary) > 0.0, found, 0.0)
