# SPDX-License-Identifier: Apache-2.0
"""What the fullest rank of a split holds, by the formulas of `cost/peak/fullest_rank.py`.

Guides speak of splits, not of plans: the rest is what the product would do by itself (1F1B,
sequence parallelism beside tensor parallelism).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from echelon.core.model_shape import ModelShape
from echelon.core.plan import (
    DTYPE_BYTES,
    OptimizerKind,
    Plan,
    Precision,
    RecomputePolicy,
    ZeroStage,
)
from echelon.cost.activations.closed_forms import saved_bytes_of_block
from echelon.cost.bytes.model_sizes import StatePrecision
from echelon.cost.inputs.cost_inputs import CostInputs, TrainerConstants
from echelon.cost.inputs.numbers import LayoutNumbers
from echelon.cost.inputs.pipeline import schedule_index
from echelon.cost.peak.fullest_rank import fullest_rank_bytes
from echelon.cost.seconds.from_plan import (
    adapted_model_numbers,
    constants_for_precision,
    cost_inputs_from_plan,
    machine_numbers_from_cluster,
    num_states,
)
from echelon.schedule.build import PLAIN_SCHEDULE

_STATES = ("parameters", "gradients", "optimizer")
KEPT = ("activations", "working", "logits")
_CONTEXT_BYTES = 2e9
_SLACK = 0.04  # of the memory
_WORKING = 16.0
"""As in `TrainerConstants`: a context, what an allocator holds beside, buffers of a block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GuideSplit:
    """Give the degrees in which a model is cut: the world is tp x pp x cp x dp."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    zero: ZeroStage = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Hold the bytes of the fullest rank: states, whole units, activations, all else."""

    states: float
    gathered: float
    activations: float
    rest: float

    @property
    def total(self) -> float:
        """Return the bytes of all kinds."""
        return self.states + self.gathered + self.activations + self.rest


def memory_of_plan(plan: Plan, **changes: float) -> RankMemory:
    """Return what the fullest rank of a plan holds, with `changes` of its `LayoutNumbers`."""
    work = cost_inputs_from_plan(plan, _software(plan))
    layout = replace(work.layout, **changes) if changes else work.layout
    length = plan.mathematics.sequence_length
    model = adapted_model_numbers(plan.model, length, tp=layout.tp)
    return rank_memory(replace(work, layout=layout, model=model))


def block_activations(plan: Plan) -> float:
    """Return the bytes that the largest block keeps of one microbatch for backward, uncut."""
    return kept_of_block(cost_inputs_from_split(plan, GuideSplit(), "none"), plan.model)


def kept_of_block(work: CostInputs, shape: ModelShape) -> float:
    """Return the bytes that the largest block of a model keeps of a microbatch, so split."""
    mixture = shape.layer_has_experts(shape.layers - 1)
    return float(saved_bytes_of_block(work, mixture=mixture))


def state_precision(plan: Plan) -> StatePrecision:
    """Return the bytes that a weight takes of each kind in a plan."""
    return bytes_of_weight(plan.mathematics.precision, plan.mathematics.optimizer.kind)


def bytes_of_weight(precision: Precision, optimizer: OptimizerKind) -> StatePrecision:
    """Return the bytes that a weight takes of each kind."""
    master = DTYPE_BYTES[precision.master]
    return StatePrecision(
        parameters=DTYPE_BYTES[precision.parameters],
        gradients=DTYPE_BYTES[precision.gradients],
        master=master if precision.has_master else 0,
        moments=num_states(optimizer) * master,
    )


def cost_inputs_from_split(
    plan: Plan, split: GuideSplit, recompute: RecomputePolicy | None = None
) -> CostInputs:
    """Return what the formulas read of the model and batch of `plan`, so split."""
    mathematics = plan.mathematics
    layout = layout_of_split(
        split,
        global_sequences=mathematics.global_sequences,
        microbatch_sequences=plan.layout.microbatch_sequences,
        recompute=recompute or plan.layout.recompute.policy,
    )
    return CostInputs(
        model=adapted_model_numbers(plan.model, mathematics.sequence_length, tp=layout.tp),
        machine=machine_numbers_from_cluster(plan.cluster, mathematics.precision.parameters),
        software=_software(plan),
        layout=layout,
    )


def layout_of_split(
    split: GuideSplit,
    *,
    global_sequences: int,
    microbatch_sequences: int,
    recompute: RecomputePolicy,
) -> LayoutNumbers:
    """Return the numbers of a split of a batch."""
    whole = microbatch_sequences * split.dp
    return LayoutNumbers(
        tp=float(split.tp),
        cp=float(split.cp),
        pp=float(split.pp),
        dp_shard=float(split.dp),
        ep=float(split.ep),
        sequence_parallel=float(split.tp > 1),
        microbatch=float(microbatch_sequences),
        microbatches=float(max(1, global_sequences // whole)),
        schedule=schedule_index(PLAIN_SCHEDULE),
        zero=float(split.zero),
        recompute=float(recompute == "full"),
        selective=float(recompute == "selective"),
    )


def _software(plan: Plan) -> TrainerConstants:
    mathematics = plan.mathematics
    gpus = plan.cluster.backend != "gloo"
    return guide_constants(mathematics.precision, mathematics.optimizer.kind, gpus=gpus)


def guide_constants(
    precision: Precision, optimizer: OptimizerKind, *, gpus: bool
) -> TrainerConstants:
    """Return round figures of a trainer: what guides are measured by follows no fit.

    Nothing is taken before the first tensor where a device has no context.
    """
    software = TrainerConstants(
        element_bytes=float(DTYPE_BYTES[precision.parameters]),
        working_width=_WORKING,
        update_bytes=0.0,
        slack=_SLACK,
        context_bytes=_CONTEXT_BYTES if gpus else 0.0,
    )
    return constants_for_precision(software, precision, optimizer)


def rank_memory(work: CostInputs) -> RankMemory:
    """Return what the fullest rank holds, by kind."""
    terms = {name: float(held) for name, held in fullest_rank_bytes(work).terms.items()}
    states = sum(terms[name] for name in _STATES)
    whole = terms["gathered"] * (float(work.layout.shard) > 1)
    kept = sum(terms[name] for name in KEPT)
    rest = sum(held for name, held in terms.items() if name not in (*_STATES, *KEPT, "gathered"))
    return RankMemory(states=states, gathered=whole, activations=kept, rest=rest)
