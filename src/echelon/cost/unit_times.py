"""Seconds of each unit of a model for one microbatch on one rank, by formula.

A *unit* is what `cost/buckets.py` names: "embedding", one block ("layers.3"), or "head" (the last
norm and the logits). Stages are balanced, and automatic schedules searched, by these seconds or by
measured ones of the same type (`config/times_file.py`). Only their ratios matter for that.

N tokens are those of a microbatch on one context rank, P the weights of all matrices that a token
is multiplied by on one tensor rank, A the width of attention on it, V the (query, key) pairs that
the mask lets meet in a microbatch, c the context ranks, D the hidden width, s the bytes of an
element, R the FLOP/s and M the memory bytes/s of a device:

    block      forward 2 N P / R + 4 V A / (c R)  B 2 N P / R + 10 V A / (c R)  W 2 N P / R
    head       forward 2 N P / R                  B 2 N P / R                   W 2 N P / R
    embedding  forward 2 N D s / M                B 0                           W 3 N D s / M

A product costs 2 N P FLOPs forward, as much for the gradient of its input and as much for that of
its weight (Chowdhery et al., PaLM, 2022, appendix B). Attention has two products of 2 V A FLOPs;
its backward pass has five, and no weights (Dao, FlashAttention-2, 2023, section 2.3). A causal mask
halves T^2, so a query's own key counts half. Context ranks share attention equally
(`cost/context_work.py` says how nearly). A lookup reads N rows and writes them; its gradient reads
the rows' gradients and reads and writes the rows. A block that is recomputed has its forward pass
once more in B.

Of a block with experts a token meets k of E, so their share of P is k/E (a little more where rows
are padded, a little less where some are dropped); the load is balanced. Where experts are whole,
tensor ranks share out the tokens that they route: N / tp meet the router and its choices. So many
meet, under sequence parallelism, what leads down to latent vectors, which every tensor rank has
whole. What is waited for of rows on their way to experts is counted (`cost/expert_times.py`).

What is left out: norms, activation functions and the softmax of the loss, documents (they are
data), communication over tensor and context ranks, and that no device reaches its peak.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from echelon.core.axis import Axis
from echelon.core.cluster import Cluster
from echelon.core.parameters import EMBEDDING, HEAD, ROUTER, parameters
from echelon.core.plan import DTYPE_BYTES, Plan
from echelon.cost.buckets import UNIT_EMBEDDING, UNIT_HEAD
from echelon.cost.expert_memory import balanced_memory
from echelon.cost.expert_times import dispatch_seconds, waited_s
from echelon.cost.flops import attention_width
from echelon.cost.stage import pieces_of
from echelon.schedule.simulate import Durations

NOMINAL_FLOPS_PER_BYTE = 10.0
"""FLOP/s of a device whose peak is not known, for each byte/s of its memory: a core or a few."""


LATENT_DOWN = (".q_down.weight", ".kv_down.weight")
"""Matrices of latent attention that every tensor rank has whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitTimes:
    """Give the seconds of each unit of a model for one microbatch on one rank.

    `backward_s` is the whole backward pass at once (BW), where that is not the sum of its halves.
    `transfer_s` is one message between neighbour stages, of `message_bytes`. `where` names the
    file of measured times.
    """

    source: Literal["modelled", "measured"]
    forward_s: Mapping[str, float]
    input_gradient_s: Mapping[str, float]
    weight_gradient_s: Mapping[str, float]
    backward_s: Mapping[str, float] | None = None
    transfer_s: float = 0.0
    message_bytes: int = 0
    where: str = ""

    def total_s(self, unit: str) -> float:
        """Return the seconds of a unit: forward and backward."""
        return self.forward_s[unit] + self.whole_backward_s[unit]

    @property
    def whole_backward_s(self) -> Mapping[str, float]:
        """Return the seconds of BW of each unit."""
        if self.backward_s is not None:
            return self.backward_s
        weights = self.weight_gradient_s
        return {unit: s + weights[unit] for unit, s in self.input_gradient_s.items()}


def unit_names(num_layers: int) -> tuple[str, ...]:
    """Return the units of a model in the order of its forward pass."""
    return (UNIT_EMBEDDING, *(f"layers.{layer}" for layer in range(num_layers)), UNIT_HEAD)


def modelled_times(plan: Plan) -> UnitTimes:
    """Return the times of each unit by the formulas at the head of this file."""
    model = plan.model
    rate = flops_rate(plan)
    tokens = plan.local_tokens
    attention = attention_flops(plan) / rate
    forward: dict[str, float] = {}
    inputs: dict[str, float] = {}
    weights: dict[str, float] = {}
    multiplied, travelled = _multiplied(plan), expert_waits_s(plan)
    for layer in range(model.layers):
        unit = f"layers.{layer}"
        product = 2.0 * tokens * multiplied[unit] / rate
        forward[unit] = product + attention
        inputs[unit] = product + 2.5 * attention
        weights[unit] = product
        if model.layer_has_experts(layer):
            forward[unit] += travelled[0]
            inputs[unit] += travelled[1]
    product = 2.0 * tokens * multiplied[UNIT_HEAD] / rate
    forward[UNIT_HEAD] = inputs[UNIT_HEAD] = weights[UNIT_HEAD] = product
    row_bytes = tokens * model.hidden * DTYPE_BYTES[plan.mathematics.precision.parameters]
    bandwidth = plan.cluster.device.memory_bandwidth
    forward[UNIT_EMBEDDING] = 2.0 * row_bytes / bandwidth
    inputs[UNIT_EMBEDDING] = 0.0
    weights[UNIT_EMBEDDING] = 3.0 * row_bytes / bandwidth
    found = UnitTimes(
        source="modelled", forward_s=forward, input_gradient_s=inputs, weight_gradient_s=weights
    )
    return with_transfer(plan, with_recompute(plan, found))


def expert_waits_s(plan: Plan) -> tuple[float, float]:
    """Return the seconds, forward and backward, that a block with experts waits for its rows."""
    experts, seconds = plan.model.experts, dispatch_seconds(plan)
    if experts is None or seconds is None:
        return 0.0, 0.0
    each = 2.0 * 3 * plan.model.hidden * experts.ffn / flops_rate(plan)
    work = each * balanced_memory(plan).rows_here / plan.layout.experts.expert_tp
    beside = each * experts.shared_experts * plan.local_tokens / plan.mesh.tp
    chunks = plan.layout.experts.chunks
    return (
        waited_s(seconds.forward, work_s=work, beside_s=beside, chunks=chunks),
        waited_s(seconds.backward, work_s=work, beside_s=beside, chunks=chunks),
    )


def attention_flops(plan: Plan) -> float:
    """Return the forward FLOPs of attention of one block and microbatch on one rank."""
    model, mesh, length = plan.model, plan.mesh, plan.mathematics.sequence_length
    pairs = model.mask.num_pairs(length) - model.causal * length / 2
    width = attention_width(model) / mesh.tp
    return 4.0 * plan.layout.microbatch_sequences * pairs * width / mesh.cp


def stage_durations(plan: Plan, times: UnitTimes) -> Durations:
    """Return the seconds of F, B, W and BW of each stage of `plan`, and of the transfers."""
    return durations_of(plan.layout.pipeline.stages, times)


def durations_of(stages: Sequence[Sequence[int]], times: UnitTimes) -> Durations:
    """Return the seconds of stages that hold these blocks; the ends hold embedding and head."""
    forward, inputs, weights, backward = (
        tuple(_sum(stages, stage, by_unit) for stage in range(len(stages)))
        for by_unit in (
            times.forward_s,
            times.input_gradient_s,
            times.weight_gradient_s,
            times.whole_backward_s,
        )
    )
    return Durations(
        forward_s=forward,
        backward_s=backward,
        input_gradient_s=inputs,
        weight_gradient_s=weights,
        transfer_s=(times.transfer_s,) * (len(stages) - 1),
        message_bytes=times.message_bytes,
    )


def stage_seconds(stages: Sequence[Sequence[int]], times: UnitTimes) -> tuple[float, ...]:
    """Return the seconds of each stage for one microbatch: forward and backward."""
    durations = durations_of(stages, times)
    return tuple(f + b for f, b in zip(durations.forward_s, durations.backward_s, strict=True))


def with_recompute(plan: Plan, times: UnitTimes) -> UnitTimes:
    """Return `times` where B of every block that the plan recomputes has its forward in it."""
    recompute, again = plan.layout.recompute, dict.fromkeys(times.forward_s, 0.0)
    for layer in range(plan.model.layers):
        if recompute.recomputes(layer):
            again[f"layers.{layer}"] = times.forward_s[f"layers.{layer}"]
    inputs = {unit: s + again[unit] for unit, s in times.input_gradient_s.items()}
    if times.backward_s is None:
        return replace(times, input_gradient_s=inputs)
    whole = {unit: s + again[unit] for unit, s in times.backward_s.items()}
    return replace(times, input_gradient_s=inputs, backward_s=whole)


def with_transfer(plan: Plan, times: UnitTimes) -> UnitTimes:
    """Return `times` with the seconds of one message between neighbour stages, alpha + n / beta."""
    size = DTYPE_BYTES[plan.mathematics.precision.parameters]
    split = plan.mesh.tp if plan.layout.sequence_parallel else 1
    message = plan.local_tokens * plan.model.hidden * size // split
    seconds = transfer_seconds(plan, message) if plan.mesh.pp > 1 else 0.0
    return replace(times, transfer_s=seconds, message_bytes=message)


def transfer_seconds(plan: Plan, num_bytes: int) -> float:
    """Return the seconds of a message between pipeline ranks over the slowest link that joins any.

    The last and the first rank are neighbours too where ranks hold several stages in turn.
    """
    ranks = plan.mesh.group(0, Axis.PP)
    several = plan.layout.pipeline.virtual_stages > 1
    pairs = list(pairwise(ranks))
    if several:
        pairs.append((ranks[-1], ranks[0]))
    return max(_link_seconds(plan.cluster, first, second, num_bytes) for first, second in pairs)


def _link_seconds(cluster: Cluster, first: int, second: int, num_bytes: int) -> float:
    for link in cluster.links:
        if first // link.degree == second // link.degree:
            return link.latency_s + num_bytes / link.bandwidth
    return 0.0


def flops_rate(plan: Plan) -> float:
    """Return the peak FLOP/s of a device in the dtype of the run, or a nominal rate."""
    device = plan.cluster.device
    known = device.flops(plan.mathematics.precision.parameters)
    return known or NOMINAL_FLOPS_PER_BYTE * device.memory_bandwidth


def _multiplied(plan: Plan) -> Mapping[str, float]:
    """Return, for each unit, the weights that a token is multiplied by on one tensor rank."""
    model = plan.model
    found = dict.fromkeys(unit_names(model.layers), 0.0)
    routed = 0.0
    if model.experts is not None:
        routed = balanced_memory(plan).rows_here / (plan.local_tokens * model.experts.num_experts)
    shared_out = (ROUTER, *(LATENT_DOWN if plan.layout.sequence_parallel else ()))
    for spec in parameters(model):
        if len(spec.shape) < 2:
            continue
        if spec.layer is not None:
            met = 1.0 / plan.mesh.tp if spec.name.endswith(shared_out) else 1.0
            share = met if spec.expert is None else routed
            found[f"layers.{spec.layer}"] += spec.local_numel(pieces_of(plan, spec)) * share
        elif spec.name == HEAD or (spec.name == EMBEDDING and model.tied):
            found[UNIT_HEAD] += spec.local_numel(plan.mesh.tp)
    return found


def _sum(stages: Sequence[Sequence[int]], stage: int, by_unit: Mapping[str, float]) -> float:
    seconds = sum(by_unit[f"layers.{layer}"] for layer in stages[stage])
    seconds += by_unit[UNIT_EMBEDDING] * (stage == 0)
    return seconds + by_unit[UNIT_HEAD] * (stage == len(stages) - 1)
