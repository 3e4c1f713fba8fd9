# SPDX-License-Identifier: Apache-2.0
"""How the parameters of a rank are cut into flat buckets: names and sizes, no tensors.

The engine builds its buckets from this and the byte formulas add it up, so they cannot differ.
A *unit* is what a forward pass uses at a time: "embedding", one block ("layers.3"), or "head"
(the last norm and the matrix of the logits).

Linear layers that read the same input share the scales of whole tensors (`fp8_groups`). A group has
one scale for its input, one for the gradient of its outputs side by side, one for its weights side
by side: so one product on a rank has one scale on either side. All experts of a layer share theirs,
for which rank has which expert, and how many rows it gets, is no part of the mathematics.

A variable that is whole in several places is mirrored (`variables`): ranks update their copies
alike, and their bits stay the same.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Literal

from echelon.core.axis import LOSS_AXES, SHARD_AXES
from echelon.core.choices.optimizers import PLAIN_OPTIMIZER
from echelon.core.model_shape import ModelShape
from echelon.core.parameters import EMBEDDING, ROUTER, ParameterSpec, parameters
from echelon.core.plan import DTYPE_BYTES, Optimizer, OptimizerKind, Plan, ZeroStage
from echelon.layout.stage import (
    RankPart,
    StagePart,
    decays,
    held_experts,
    held_parameters,
    part_of,
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
    frozen: bool = False
    """Whether it has values only, and neither gradients nor state."""

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
    return tuple(
        BucketPlan(
            name=f"bucket{index}",
            kind=run.kind,
            names=tuple(spec.name for spec in run.specs),
            num_elements=(elements := _padded(plan, run)),
            update=run.update,
            units=_units(plan, part, run.specs),
            sliced=run.sliced and zero_stage(plan, expert=run.expert) == 3,
            stages=run.stages,
            expert=run.expert,
            fp8_squares=_squares(plan, run) * (run.coded and plan.layout.zero.gather == "fp8"),
            int8_blocks=_int8_blocks(plan, elements) * run.coded,
            frozen=run.specs[0].frozen,
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
    specs: Sequence[ParameterSpec]
    size: int  # elements of a rank, without padding
    sliced: bool
    stages: tuple[int, ...]
    expert: bool = False
    coded: bool = False  # codes of these are gathered, of 8-bit floats or integers


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
        size, coded = _local_numel(plan, spec), _gathered_in_codes(plan, spec)
        sliced = size >= plan.layout.zero.keep_whole_below
        update = update_rule_of(plan.mathematics.optimizer, spec)
        yield _Run("whole", update, [spec], size, sliced, stages, coded=coded)


def _at_both_ends(plan: Plan, part: RankPart) -> tuple[str, ...]:
    """Return the name of a tied embedding whose two uses are in two stages of this rank."""
    two = any(s.first and not s.last for s in part.stages) and part.last
    return (EMBEDDING,) if plan.model.tied and two else ()


@dataclass(frozen=True, slots=True)
class _Fate:
    """Say into which bucket a parameter goes, and how many elements of it a rank has."""

    aside: BucketKind | None
    """The kind of a side bucket; None: it fills the buckets of its kind."""
    update: OptimizerKind
    expert: bool
    coded: bool
    frozen: bool
    size: int

    @classmethod
    def of(cls, plan: Plan, part: RankPart, spec: ParameterSpec) -> _Fate:
        """Return that of a parameter."""
        expert, size = spec.expert is not None, _local_numel(plan, spec)
        aside: BucketKind | None = None
        if not spec.frozen and shared_by_ends(plan, part, spec):
            aside = "tied"
        elif partial_over_tensor(plan, spec):
            aside = "partial"
        elif zero_stage(plan, expert=expert) == 3 and size < plan.layout.zero.keep_whole_below:
            aside = "whole"
        update = update_rule_of(plan.mathematics.optimizer, spec)
        return cls(aside, update, expert, _gathered_in_codes(plan, spec), spec.frozen, size)


class _Fates:
    """Say the fate of every parameter of a stage: blocks of a kind are alike, and their experts."""

    def __init__(self, plan: Plan, part: RankPart) -> None:
        self._plan, self._part = plan, part
        self._known: dict[tuple[bool, str], _Fate] = {}

    def of(self, specs: Iterable[ParameterSpec]) -> Iterator[tuple[ParameterSpec, _Fate]]:
        """Yield each of some parameters with its fate."""
        for layer, alike in groupby(specs, key=lambda spec: spec.layer):
            mixture = layer is not None and self._plan.model.layer_has_experts(layer)
            for spec in alike:
                key = mixture, _family(spec)
                if key not in self._known:
                    self._known[key] = _Fate.of(self._plan, self._part, spec)
                yield spec, self._known[key]


def _family(spec: ParameterSpec) -> str:
    """Return the end of a name that parameters have in common which are alike in a kind of block:
    that without the number of a routed expert, or of a block."""
    if spec.expert is not None:
        return spec.name.rpartition(f".{spec.expert}.")[2]
    return spec.name if spec.layer is None else spec.name.split(".", 2)[2]


def _stage_runs(
    plan: Plan, part: RankPart, stage: StagePart, specs: Sequence[ParameterSpec], *, small: bool
) -> Iterator[_Run]:
    """Yield the buckets of one stage, the first of them `small`; side buckets come last."""
    zero = plan.layout.zero
    width = DTYPE_BYTES[plan.mathematics.precision.gradients]
    limit, first = zero.bucket_bytes // width, FIRST_BUCKET_BYTES // width
    filling: dict[tuple[OptimizerKind, bool, bool, bool], list[ParameterSpec]] = {}
    aside: dict[tuple[BucketKind, OptimizerKind, bool, bool, bool], list[ParameterSpec]] = {}
    sizes: Counter[tuple[object, ...]] = Counter()
    tied_coded = False
    stages, fates = (stage.stage,), _Fates(plan, part)
    cut = {expert: zero_stage(plan, expert=expert) == 3 for expert in (False, True)}
    for unit in _units_backward(plan, stage, specs):
        for spec, fate in fates.of(unit):
            if fate.aside is not None:
                tied = fate.aside == "tied"
                tied_coded = fate.coded if tied else tied_coded
                expert = fate.expert and fate.aside == "whole"
                side = (fate.aside, fate.update, tied, expert, fate.frozen)
                aside.setdefault(side, []).append(spec)
                sizes[side] += fate.size
            else:
                key = (fate.update, fate.expert, fate.coded, fate.frozen)
                filling.setdefault(key, []).append(spec)
                sizes[key] += fate.size
        for key in list(filling):
            update, expert, coded, _ = key
            if cut[expert] or sizes[key] >= (min(limit, first) if small else limit):
                small = False
                run, size = filling.pop(key), sizes.pop(key)
                yield _Run("whole", update, run, size, True, stages, expert, coded)
    for key, run in filling.items():
        update, expert, coded, _ = key
        yield _Run("whole", update, run, sizes[key], True, stages, expert, coded)
    for kind in ("whole", "partial", "tied"):
        for side, run in aside.items():
            other, update, sliced, expert, _ = side
            if other == kind:
                coded = tied_coded and kind == "tied"
                yield _Run(kind, update, run, sizes[side], sliced, stages, expert, coded)


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
    place = {layer: index // together for index, layer in enumerate(part.blocks)}
    groups: dict[str | int, list[ParameterSpec]] = {}
    for layer, alike in groupby(specs, key=lambda spec: spec.layer):
        if layer is not None:
            groups.setdefault(place[layer], []).extend(alike)
            continue
        for spec in alike:
            groups.setdefault(unit_of(spec.name), []).append(spec)
    return list(groups.values())[::-1]


def _units(plan: Plan, part: RankPart, specs: Sequence[ParameterSpec]) -> tuple[str, ...]:
    used: set[str] = set()
    layers = {spec.layer for spec in specs}
    used.update(f"layers.{layer}" for layer in layers if layer is not None)
    for spec in specs if None in layers else ():
        if spec.name == EMBEDDING:
            used.update((UNIT_EMBEDDING,) * part.first)
            used.update((UNIT_HEAD,) * (part.last and plan.model.tied))
        elif spec.layer is None:
            used.add(unit_of(spec.name))
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


def _squares(plan: Plan, run: _Run) -> int:
    """Return how many squares of `fp8_block` x `fp8_block` a rank has of the weights of a run."""
    return run.size // plan.mathematics.precision.fp8_block**2


def _padded(plan: Plan, run: _Run) -> int:
    """Return the elements of a bucket: slices of slices (hybrid sharding) are equal too.

    In int8 no block of numbers with one scale is in two slices.
    """
    block = plan.mathematics.precision.int8_block if run.coded else 0
    return padded_elements(run.size, data_degree(plan, expert=run.expert) * max(1, block))


def padded_elements(size: int, degree: int) -> int:
    """Return the elements of a bucket that so many data ranks can share out evenly."""
    return -(-size // degree) * degree


_WEIGHT = re.compile(
    r"(?P<block>layers\.\d+)\.(?P<part>attention|mlp|mlp\.shared|mlp\.experts)(?:\.\d+)?"
    r"\.(?P<layer>q|k|v|o|q_up|kv_up|gate|up|down)\.weight"
)
_TOGETHER = {"q": "qkv", "k": "qkv", "v": "qkv", "gate": "gate_up", "up": "gate_up"}


def fp8_group_of(weight: str) -> str | None:
    """Return the group of a weight by its canonical name; None where it is never in 8 bits."""
    found = _WEIGHT.fullmatch(weight)
    if found is None:
        return None
    layer = found["layer"]
    return f"{found['block']}.{found['part']}.{_TOGETHER.get(layer, layer)}"


def fp8_groups(model: ModelShape) -> tuple[str, ...]:
    """Return the groups of a model in forward order, the same on every rank."""
    found = (fp8_group_of(spec.name) for spec in parameters(model))
    return tuple(dict.fromkeys(name for name in found if name is not None))


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """Say where one parameter is.

    It is cut into `pieces` (by tensor parallelism) and each of them into `slices` (by ZeRO 3);
    `copies` ranks have the same piece or slice, or replicas on threads have it for a step.
    """

    name: str
    shape: tuple[int, ...]
    copies: int
    pieces: int = 1
    slices: int = 1

    @property
    def mirrored(self) -> bool:
        """Return whether each place that has it has all of it, and there are several."""
        return self.copies > 1 and self.pieces == self.slices == 1


def variables_of(plan: Plan) -> tuple[Variable, ...]:
    """Return every parameter of the model of a plan, and where it is."""
    holders: Counter[str] = Counter()
    sliced: set[str] = set()
    for rank in range(plan.mesh.world_size):
        part = part_of(plan, rank)
        holders.update(spec.name for spec in held_parameters(plan, part))
        buckets = plan_buckets(plan, part)
        sliced.update(name for bucket in buckets if bucket.sliced for name in bucket.names)
    found: list[Variable] = []
    for spec in parameters(plan.model):
        pieces = pieces_of(plan, spec) if spec.split_dim is not None else 1
        slices = shard_degree(plan, expert=spec.expert is not None) if spec.name in sliced else 1
        copies = holders[spec.name] // (pieces * slices)
        found.append(
            Variable(name=spec.name, shape=spec.shape, copies=copies, pieces=pieces, slices=slices)
        )
    return tuple(found)
