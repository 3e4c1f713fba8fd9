"""What the fullest rank of a split holds, by the formulas of `cost/bytes/fullest_rank.py`.

Guides speak of splits, not of plans: the rest is what the product would do by itself (1F1B,
sequence parallelism beside tensor parallelism).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from echelon.core.choices.optimizers import OPTIMIZERS
from echelon.core.plan import DTYPE_BYTES, Plan, RecomputePolicy, ZeroStage
from echelon.cost.activations.closed_forms import saved_bytes_of_block
from echelon.cost.bytes.fullest_rank import fullest_rank_bytes
from echelon.cost.bytes.model_states import StatePrecision
from echelon.cost.seconds.from_plan import (
    constants_for_precision,
    cost_inputs_from_plan,
    machine_numbers_from_cluster,
    model_numbers_from_shape,
)
from echelon.cost.seconds.inputs import CostInputs, TrainerConstants
from echelon.cost.seconds.numbers import LayoutNumbers
from echelon.cost.seconds.pipeline import schedule_index
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


def memory_of_split(
    plan: Plan, split: GuideSplit, recompute: RecomputePolicy | None = None
) -> RankMemory:
    """Return what the fullest rank holds of the model and batch of `plan`, split otherwise."""
    return _memory(cost_inputs_from_split(plan, split, recompute))


def memory_of_plan(plan: Plan, **changes: float) -> RankMemory:
    """Return what the fullest rank of a plan holds, with `changes` of its `LayoutNumbers`."""
    work = cost_inputs_from_plan(plan, _software(plan))
    layout = replace(work.layout, **changes) if changes else work.layout
    model = model_numbers_from_shape(plan.model, plan.mathematics.sequence_length, tp=layout.tp)
    return _memory(replace(work, layout=layout, model=model))


def block_activations(plan: Plan) -> float:
    """Return the bytes that the largest block keeps of one microbatch for backward, uncut."""
    work = cost_inputs_from_split(plan, GuideSplit(), "none")
    mixture = plan.model.layer_has_experts(plan.model.layers - 1)
    return float(saved_bytes_of_block(work, mixture=mixture))


def state_precision(plan: Plan) -> StatePrecision:
    """Return the bytes that a weight takes of each kind in a plan."""
    precision = plan.mathematics.precision
    master = DTYPE_BYTES[precision.master]
    return StatePrecision(
        parameters=DTYPE_BYTES[precision.parameters],
        gradients=DTYPE_BYTES[precision.gradients],
        master=master if precision.has_master else 0,
        moments=len(OPTIMIZERS[plan.mathematics.optimizer.kind].state) * master,
    )


def cost_inputs_from_split(
    plan: Plan, split: GuideSplit, recompute: RecomputePolicy | None = None
) -> CostInputs:
    """Return what the formulas read of the model and batch of `plan`, so split."""
    mathematics, sequences = plan.mathematics, plan.layout.microbatch_sequences
    policy = recompute or plan.layout.recompute.policy
    layout = LayoutNumbers(
        tp=float(split.tp),
        cp=float(split.cp),
        pp=float(split.pp),
        dp_shard=float(split.dp),
        ep=float(split.ep),
        sequence_parallel=float(split.tp > 1),
        microbatch=float(sequences),
        microbatches=float(max(1, mathematics.global_sequences // (sequences * split.dp))),
        schedule=schedule_index(PLAIN_SCHEDULE),
        zero=float(split.zero),
        recompute=float(policy == "full"),
        selective=float(policy == "selective"),
    )
    return CostInputs(
        model=model_numbers_from_shape(plan.model, mathematics.sequence_length, tp=layout.tp),
        machine=machine_numbers_from_cluster(plan.cluster, mathematics.precision.parameters),
        software=constants_for_precision(
            _software(plan), mathematics.precision, mathematics.optimizer.kind
        ),
        layout=layout,
    )


def _software(plan: Plan) -> TrainerConstants:
    """Return round figures of a trainer: what guides are measured by follows no fit.

    Nothing is taken before the first tensor where a device has no context.
    """
    context = 0.0 if plan.cluster.backend == "gloo" else _CONTEXT_BYTES
    return TrainerConstants(
        element_bytes=float(DTYPE_BYTES[plan.mathematics.precision.parameters]),
        working_width=_WORKING,
        update_bytes=0.0,
        slack=_SLACK,
        context_bytes=context,
    )


def _memory(work: CostInputs) -> RankMemory:
    terms = {name: float(held) for name, held in fullest_rank_bytes(work).terms.items()}
    states = sum(terms[name] for name in _STATES)
    whole = terms["gathered"] * (float(work.layout.shard) > 1)
    kept = sum(terms[name] for name in KEPT)
    rest = sum(held for name, held in terms.items() if name not in (*_STATES, *KEPT, "gathered"))
    return RankMemory(states=states, gathered=whole, activations=kept, rest=rest)
