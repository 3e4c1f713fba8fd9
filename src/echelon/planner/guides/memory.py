"""What the fullest rank of a split holds, by the formulas of `cost/lattice/memory.py`.

Guides speak of splits, not of plans: the rest is what the product would do by itself (1F1B,
sequence parallelism beside tensor parallelism).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from echelon.core.plan import DTYPE_BYTES, Plan, RecomputePolicy, ZeroStage
from echelon.cost.lattice.block import Work
from echelon.cost.lattice.memory import bytes_of_rank, kept_by_block
from echelon.cost.lattice.numbers import LayoutNumbers
from echelon.cost.lattice.of_cluster import machine_numbers
from echelon.cost.lattice.of_model import model_numbers
from echelon.cost.lattice.of_plan import software_of, work_of
from echelon.cost.lattice.pipeline import index_of
from echelon.cost.lattice.software import Software
from echelon.cost.model_states import StatePrecision
from echelon.cost.updates import STATE_KINDS

STATES = ("parameters", "gradients", "optimizer")
KEPT = ("activations", "working", "logits")
CONTEXT_BYTES = 2e9
SLACK = 0.04
WORKING = 16.0
"""See `Software`: a device's context, what an allocator holds beside, buffers of a block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
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
    plan: Plan, split: Split, recompute: RecomputePolicy | None = None
) -> RankMemory:
    """Return what the fullest rank holds of the model and batch of `plan`, split otherwise."""
    return _memory(work_of_split(plan, split, recompute))


def memory_of_plan(plan: Plan, **changes: float) -> RankMemory:
    """Return what the fullest rank of a plan holds, with `changes` of its `LayoutNumbers`."""
    work = work_of(plan, _software(plan))
    layout = replace(work.layout, **changes) if changes else work.layout
    model = model_numbers(plan.model, plan.mathematics.sequence_length, tp=layout.tp)
    return _memory(replace(work, layout=layout, model=model))


def block_activations(plan: Plan) -> float:
    """Return the bytes that the largest block keeps of one microbatch for backward, uncut."""
    work = work_of_split(plan, Split(), "none")
    mixture = plan.model.layer_has_experts(plan.model.layers - 1)
    return float(kept_by_block(work, mixture=mixture))


def state_precision(plan: Plan) -> StatePrecision:
    """Return the bytes that a weight takes of each kind in a plan."""
    precision = plan.mathematics.precision
    master = DTYPE_BYTES[precision.master]
    return StatePrecision(
        parameters=DTYPE_BYTES[precision.parameters],
        gradients=DTYPE_BYTES[precision.gradients],
        master=master if precision.has_master else 0,
        moments=len(STATE_KINDS[plan.mathematics.optimizer.kind]) * master,
    )


def work_of_split(plan: Plan, split: Split, recompute: RecomputePolicy | None = None) -> Work:
    """Return what the formulas of the lattice read of the model and batch of `plan`, so split."""
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
        schedule=index_of("1f1b"),
        zero=float(split.zero),
        recompute=float(policy == "full"),
        selective=float(policy == "selective"),
    )
    return Work(
        model=model_numbers(plan.model, mathematics.sequence_length, tp=layout.tp),
        machine=machine_numbers(plan.cluster, mathematics.precision.parameters),
        software=software_of(_software(plan), mathematics.precision, mathematics.optimizer.kind),
        layout=layout,
    )


def _software(plan: Plan) -> Software:
    """Return round figures of a trainer: what guides are measured by follows no fit.

    Nothing is taken before the first tensor where a device has no context.
    """
    context = 0.0 if plan.cluster.backend == "gloo" else CONTEXT_BYTES
    return Software(
        element_bytes=float(DTYPE_BYTES[plan.mathematics.precision.parameters]),
        working_width=WORKING,
        update_bytes=0.0,
        slack=SLACK,
        context_bytes=context,
    )


def _memory(work: Work) -> RankMemory:
    terms = {name: float(held) for name, held in bytes_of_rank(work).terms.items()}
    states = sum(terms[name] for name in STATES)
    whole = terms["gathered"] * (float(work.layout.shard) > 1)
    kept = sum(terms[name] for name in KEPT)
    rest = sum(held for name, held in terms.items() if name not in (*STATES, *KEPT, "gathered"))
    return RankMemory(states=states, gathered=whole, activations=kept, rest=rest)
