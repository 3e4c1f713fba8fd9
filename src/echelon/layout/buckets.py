"""How the parameters of a rank are cut into flat buckets: names and sizes, no tensors.

The engine builds its buckets from this and the byte formulas add it up, so they cannot differ.
A *unit* is what a forward pass uses at a time: "embedding", one block ("layers.3"), or "head"
(the last norm and the matrix of the logits).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from echelon.core.axis import LOSS_AXES, SHARD_AXES
from echelon.core.choices.optimizers import PLAIN_OPTIMIZER
from echelon.core.parameters import EMBEDDING, ROUTER, ParameterSpec
from echelon.core.plan import DTYPE_BYTES, Optimizer, OptimizerKind, Plan, ZeroStage
from echelon.layout.fp8_groups import fp8_group_of
from echelon.layout.stage import (
    RankPart,
    StagePart,
    decays,
    held_experts,
    held_parameters,
    partial_over_tensor,
    pieces_of,
    shared_by_ends,
    stage_parameters,
    update_rule_of,
)

FIRST_BUCKET_BYTES = 2**20
"""The first bucket is small, so that the link has work as soon as backward begins."""

BucketKind = Literal["whole", "partial", "tied"]
"""whole: summed over data ranks; partial: over tensor ranks too; tied: over both ends too."""

UNIT_EMBEDDING = "embedding"
UNIT_HEAD = "head"


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketPlan:
    """Name the parameters of one bucket."""

    name: str
    """Its name in events and reports."""
    kind: BucketKind
    """Over which ranks its gradients are summed."""
    names: tuple[str, ...]
    """The parameters, in order."""
    num_elements: int
    """Elements, those of the padding at its end included."""
    update: OptimizerKind = PLAIN_OPTIMIZER
    """The rule of the optimizer for all of them."""
    units: tuple[str, ...] = ()
    """The units of the forward pass that use them, in its order."""
    sliced: bool = False
    """Whether parameters are held as slices between uses (stage 3), else whole."""
    stages: tuple[int, ...] = (0,)
    """The pipeline stages of this rank that these are in."""
    expert: bool = False
    """Whether it is summed over, and cut for, the ranks that hold the same experts."""
    fp8_squares: int = 0
    """Squares of its weights that have a scale each, where it is gathered as codes of 8 bits; 0
    where it is gathered in the dtype of parameters."""
    int8_blocks: int = 0
    """Blocks of its numbers that have a scale each, where it is gathered in int8; else 0."""

    @property
    def backward_units(self) -> tuple[str, ...]:
        """Return the units whose backward reads the values: all but the lookup of embeddings."""
        return tuple(unit for unit in self.units if unit != UNIT_EMBEDDING)

    @property
    def backward_stages(self) -> tuple[int, ...]:
        """Return the stages whose backward reads the values; the lookup is in the first one."""
        looked_up_alone = len(self.stages) > 1 and UNIT_EMBEDDING in self.units
        return (self.stages[1:] if looked_up_alone else self.stages) if self.backward_units else ()


def zero_stage(plan: Plan, *, expert: bool = False) -> ZeroStage:
    """Return the ZeRO stage of routed experts, or of all else."""
    return plan.layout.experts.zero_stage if expert else plan.layout.zero.stage


def shard_degree(plan: Plan, *, expert: bool = False) -> int:
    """Return into how many slices a bucket is cut: 1 at stage 0."""
    if not zero_stage(plan, expert=expert):
        return 1
    if expert:
        return plan.mesh.expert_shard_degree(expert_tp=plan.layout.experts.expert_tp)
    return plan.mesh.degree(*SHARD_AXES)


def data_degree(plan: Plan, *, expert: bool = False) -> int:
    """Return how many ranks a gradient is summed over."""
    if expert:
        copies = plan.mesh.expert_shard_degree(expert_tp=plan.layout.experts.expert_tp)
        return copies * plan.mesh.dp_replicate
    return plan.mesh.degree(*LOSS_AXES)


def slice_index(plan: Plan, rank: int, *, expert: bool = False) -> int:
    """Return which of the slices of a bucket `rank` owns."""
    if shard_degree(plan, expert=expert) == 1:
        return 0
    mesh, expert_tp = plan.mesh, plan.layout.experts.expert_tp
    if expert:
        fold = mesh.group(rank, *mesh.expert_fold(expert_tp=expert_tp))
        return fold.index(rank) // mesh.ep
    return mesh.group(rank, *SHARD_AXES).index(rank)


def slice_elements(plan: Plan, bucket: BucketPlan) -> int:
    """Return the elements of the slice of a bucket that one rank updates."""
    return bucket.num_elements // shard_degree(plan, expert=bucket.expert)


def accumulates_slices(plan: Plan, *, expert: bool = False) -> bool:
    """Return whether gradients are reduced after every microbatch and added up as slices.

    Experts follow `zero.accumulate`; where it says nothing, for all else is at stage 0, theirs add
    up in slices from stage 2 on.
    """
    stage, zero = zero_stage(plan, expert=expert), plan.layout.zero
    if expert and zero.stage == 0:
        return stage >= 2
    return stage > 0 and zero.accumulate == "slices"


@lru_cache(maxsize=64)
def plan_buckets(plan: Plan, part: RankPart) -> tuple[BucketPlan, ...]:
    """Return the buckets of a rank, in the order in which backward completes them.

    No bucket is of two stages, but that of an embedding that is the head of another stage here.
    """
    by_name = {spec.name: spec for spec in held_parameters(plan, part)}
    return tuple(
        BucketPlan(
            name=f"bucket{index}",
            kind=run.kind,
            names=tuple(run.names),
            num_elements=(elements := _padded(plan, [by_name[name] for name in run.names], run)),
            update=run.update,
            units=_units(plan, part, run.names),
            sliced=run.sliced and zero_stage(plan, expert=run.expert) == 3,
            stages=run.stages,
            expert=run.expert,
            fp8_squares=_squares(plan, [by_name[name] for name in run.names])
            * (run.coded and plan.layout.zero.gather == "fp8"),
            int8_blocks=_int8_blocks(plan, elements) * run.coded,
        )
        for index, run in enumerate(_runs(plan, part))
    )


def segment_order(
    names: Iterable[str], specs: Mapping[str, ParameterSpec], optimizer: Optimizer
) -> list[str]:
    """Return names with those that take weight decay first; otherwise the order is kept."""
    return sorted(names, key=lambda name: not decays(optimizer, specs[name]))


def unit_of(name: str) -> str:
    """Return the unit whose forward uses a parameter (a tied embedding: the first that does)."""
    if name.startswith("layers."):
        return ".".join(name.split(".")[:2])
    return UNIT_EMBEDDING if name in (EMBEDDING, "positions.weight") else UNIT_HEAD


def stage_units(part: StagePart | RankPart) -> tuple[str, ...]:
    """Return the units of a stage, or of all stages of a rank, in the order of the forward pass."""
    first = (UNIT_EMBEDDING,) if part.first else ()
    last = (UNIT_HEAD,) if part.last else ()
    return (*first, *(f"layers.{block}" for block in part.blocks), *last)


@dataclass(frozen=True, slots=True)
class _Run:
    kind: BucketKind
    update: OptimizerKind
    names: list[str]
    sliced: bool
    stages: tuple[int, ...]
    expert: bool = False
    coded: bool = False
    """Whether codes of these are gathered, of 8-bit floats or integers."""


def _runs(plan: Plan, part: RankPart) -> Iterator[_Run]:
    """Yield what goes into each bucket, in the order of backward: the last stage comes first.

    An embedding that two stages of the rank use is complete after the earlier one.
    """
    at_both_ends, experts = _at_both_ends(plan, part), held_experts(plan, part)
    closed = 0
    for stage in part.stages[::-1]:
        specs = [s for s in stage_parameters(plan, stage, experts) if s.name not in at_both_ends]
        for run in _stage_runs(plan, part, stage, specs, small=closed == 0):
            closed += 1
            yield run
    for name in at_both_ends:
        spec = next(s for s in held_parameters(plan, part) if s.name == name)
        stages = tuple(stage.stage for stage in part.stages if stage.first or stage.last)
        sliced = _local_numel(plan, spec) >= plan.layout.zero.keep_whole_below
        update = update_rule_of(plan.mathematics.optimizer, spec)
        yield _Run("whole", update, [name], sliced, stages, coded=_gathered_in_codes(plan, spec))


def _at_both_ends(plan: Plan, part: RankPart) -> tuple[str, ...]:
    """Return the name of a tied embedding whose two uses are in two stages of this rank."""
    two = any(s.first and not s.last for s in part.stages) and part.last
    return (EMBEDDING,) if plan.model.tied and two else ()


def _stage_runs(
    plan: Plan, part: RankPart, stage: StagePart, specs: Sequence[ParameterSpec], *, small: bool
) -> Iterator[_Run]:
    """Yield the buckets of one stage, the first of them `small`; side buckets come last."""
    zero, optimizer = plan.layout.zero, plan.mathematics.optimizer
    size = DTYPE_BYTES[plan.mathematics.precision.gradients]
    limit, first = zero.bucket_bytes // size, FIRST_BUCKET_BYTES // size
    filling: dict[tuple[OptimizerKind, bool, bool], list[ParameterSpec]] = {}
    aside: dict[tuple[BucketKind, OptimizerKind, bool, bool], list[str]] = {}
    tied_coded = False
    stages = (stage.stage,)

    def cut(expert: bool) -> bool:
        return zero_stage(plan, expert=expert) == 3

    for unit in _units_backward(plan, stage, specs):
        for spec in unit:
            update, expert = update_rule_of(optimizer, spec), spec.expert is not None
            if shared_by_ends(plan, part, spec):
                tied_coded = _gathered_in_codes(plan, spec)
                aside.setdefault(("tied", update, True, False), []).append(spec.name)
            elif partial_over_tensor(plan, spec):
                aside.setdefault(("partial", update, False, False), []).append(spec.name)
            elif cut(expert) and _local_numel(plan, spec) < zero.keep_whole_below:
                aside.setdefault(("whole", update, False, expert), []).append(spec.name)
            else:
                coded = _gathered_in_codes(plan, spec)
                filling.setdefault((update, expert, coded), []).append(spec)
        for (update, expert, coded), run in list(filling.items()):
            full = cut(expert) or sum(_local_numel(plan, spec) for spec in run) >= (
                min(limit, first) if small else limit
            )
            if full:
                small = False
                names = [spec.name for spec in filling.pop((update, expert, coded))]
                yield _Run("whole", update, names, True, stages, expert, coded)
    for (update, expert, coded), run in filling.items():
        yield _Run("whole", update, [spec.name for spec in run], True, stages, expert, coded)
    for kind in ("whole", "partial", "tied"):
        for (other, update, sliced, expert), names in aside.items():
            if other == kind:
                coded = tied_coded and kind == "tied"
                yield _Run(kind, update, names, sliced, stages, expert, coded)


def _local_numel(plan: Plan, spec: ParameterSpec) -> int:
    return spec.local_numel(pieces_of(plan, spec))


def _units_backward(
    plan: Plan, part: StagePart, specs: Sequence[ParameterSpec]
) -> list[list[ParameterSpec]]:
    """Group parameters by what is gathered together, the last group first, each in forward order.

    That is a unit or, at stage 3, `unit_blocks` consecutive blocks of the stage.
    """
    gathers = 3 in (plan.layout.zero.stage, plan.layout.experts.zero_stage)
    together = plan.layout.zero.unit_blocks if gathers else 1
    groups: dict[str, list[ParameterSpec]] = {}
    for spec in specs:
        key = unit_of(spec.name)
        if spec.layer is not None:
            key = f"blocks {part.blocks.index(spec.layer) // together}"
        groups.setdefault(key, []).append(spec)
    return list(groups.values())[::-1]


def _units(plan: Plan, part: RankPart, names: Iterable[str]) -> tuple[str, ...]:
    used: set[str] = set()
    for name in names:
        if name == EMBEDDING:
            used.update((UNIT_EMBEDDING,) * part.first)
            used.update((UNIT_HEAD,) * (part.last and plan.model.tied))
        else:
            used.add(unit_of(name))
    return tuple(unit for unit in stage_units(part) if unit in used)


def gathered_in_fp8(plan: Plan, spec: ParameterSpec) -> bool:
    """Return whether stage 3 gathers codes of a parameter: of a weight multiplied in 8 bits."""
    if not plan.mathematics.precision.is_fp8 or plan.layout.zero.gather != "fp8":
        return False
    return fp8_group_of(spec.name) is not None


def rounded_to_int8(plan: Plan, spec: ParameterSpec) -> bool:
    """Return whether forward and backward take a parameter rounded to int8.

    That is a matter of the model alone: all matrices but those of routers and learned positions,
    which tensor ranks have whole.
    """
    plain = spec.name.endswith(ROUTER) or spec.name == "positions.weight"
    return plan.mathematics.precision.int8_block > 0 and len(spec.shape) > 1 and not plain


def _gathered_in_codes(plan: Plan, spec: ParameterSpec) -> bool:
    """Return whether stage 3 gathers codes of a parameter, of floats or integers of 8 bits."""
    cut = zero_stage(plan, expert=spec.expert is not None) == 3
    return cut and (gathered_in_fp8(plan, spec) or rounded_to_int8(plan, spec))


def _int8_blocks(plan: Plan, elements: int) -> int:
    block = plan.mathematics.precision.int8_block
    return elements // block if block else 0


def _squares(plan: Plan, specs: Sequence[ParameterSpec]) -> int:
    """Return how many squares of `fp8_block` x `fp8_block` a rank has of these weights."""
    size = sum(_local_numel(plan, spec) for spec in specs)
    return size // plan.mathematics.precision.fp8_block**2


def _padded(plan: Plan, specs: Sequence[ParameterSpec], run: _Run) -> int:
    """Return the elements of a bucket: slices of slices (hybrid sharding) are equal too.

    In int8 no block of numbers with one scale is in two slices.
    """
    size = sum(_local_numel(plan, spec) for spec in specs)
    block = plan.mathematics.precision.int8_block if run.coded else 0
    return padded_elements(size, data_degree(plan, expert=run.expert) * max(1, block))


def padded_elements(size: int, degree: int) -> int:
    """Return the elements of a bucket that so many data ranks can share out evenly."""
    return -(-size // degree) * degree


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotRange:
    """Say that the local piece of a parameter is elements `start` to `stop` of its bucket."""

    spec: ParameterSpec
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SlicePart:
    """Say that slice `index` of a bucket holds elements `start` to `stop` of a local parameter.

    `bucket_start` is where `start` lies in the whole bucket.
    """

    index: int
    start: int
    stop: int
    bucket_start: int


def slot_ranges(
    plan: Plan, bucket: BucketPlan, specs: dict[str, ParameterSpec]
) -> tuple[SlotRange, ...]:
    """Return where the parameters of `bucket` lie; `specs` are those of the stage, by name."""
    ranges: list[SlotRange] = []
    start = 0
    for name in segment_order(bucket.names, specs, plan.mathematics.optimizer):
        stop = start + specs[name].local_numel(pieces_of(plan, specs[name]))
        ranges.append(SlotRange(spec=specs[name], start=start, stop=stop))
        start = stop
    return tuple(ranges)


def slice_parts(plan: Plan, bucket: BucketPlan, slot: SlotRange) -> tuple[SlicePart, ...]:
    """Return the part of a parameter in each slice of its bucket that touches it, in order."""
    size = slice_elements(plan, bucket)
    num_slices = shard_degree(plan, expert=bucket.expert)
    first, last = slot.start // size, min(-(-slot.stop // size), num_slices)
    parts: list[SlicePart] = []
    for index in range(first, last):
        start, stop = max(slot.start, index * size), min(slot.stop, (index + 1) * size)
        parts.append(
            SlicePart(
                index=index, start=start - slot.start, stop=stop - slot.start, bucket_start=start
            )
        )
    return tuple(parts)
