# SPDX-License-Identifier: Apache-2.0
"""Parts of a module of one's own that a rank holds: flat buckets, stages, tensor pieces.

A *unit* is a part of the module that is gathered at a time at stage 3. What no unit owns is the
root's: it stays whole from the forward pass to the end of backward.

Of a pipeline rank, no bucket is of two stages, but that of a parameter which the first and the last
stage of a rank share. Parameters that two ranks share (a tied embedding) have buckets of their own,
summed over both.

Over tensor ranks a rule gives a layer a kind:

    column           outputs are cut: each rank computes its own
    row              inputs are cut: outputs are partial sums, which are added up
    column-gathered  outputs are cut, and gathered again at once
    row-scattered    inputs are whole, and each rank takes its part of them
    vocabulary       the rows of an embedding, or of a head whose outputs are gathered
    expert           a module whose parameters are stacks of experts: each rank has some, whole
    replicated       whole on every rank, used on values that all ranks have
    summed           whole on every rank, used on values that ranks have parts of
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

from echelon.core.axis import LOSS_AXES
from echelon.core.parameters import ParameterSpec
from echelon.core.plan import DTYPE_BYTES, Plan
from echelon.layout.buckets import FIRST_BUCKET_BYTES, BucketPlan, padded_elements
from echelon.layout.stage import update_rule_of

ROOT = "(root)"
"""The unit of everything that no other unit owns; a name that no module has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleParameter:
    """Say of one parameter which units use it, and whether it is trained.

    Its shape is that of what a tensor rank holds; `cut` says that others hold other parts, `summed`
    that its gradient is added up over them.
    """

    spec: ParameterSpec
    users: tuple[str, ...]
    trained: bool
    cut: bool = False
    summed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleBuckets:
    """Hold the buckets of what is trained, in the order of their reduction, and of what is frozen.

    Frozen parameters are in buckets at stage 3 only, where they are cut like the others.
    """

    trained: tuple[BucketPlan, ...]
    frozen: tuple[BucketPlan, ...]

    @property
    def sliced(self) -> tuple[BucketPlan, ...]:
        """Return the buckets whose parameters rest as slices."""
        return tuple(bucket for bucket in (*self.trained, *self.frozen) if bucket.sliced)


def plan_module_buckets(
    plan: Plan, parameters: Sequence[ModuleParameter], units: Sequence[str]
) -> ModuleBuckets:
    """Return the buckets of `parameters`, which stand in the order in which they were registered.

    `units` are all units in that order, the root too. At stage 3, `unit_blocks` consecutive units
    share a bucket; below, buckets are filled from the last parameter to the first.
    """
    trained = [one for one in parameters if one.trained]
    frozen = [one for one in parameters if not one.trained]
    if plan.layout.zero.stage < 3:
        runs = [
            run
            for summed in (False, True)
            for run in _filled(plan, [one for one in trained if one.summed is summed])
        ]
        return ModuleBuckets(trained=_named(plan, "bucket", runs, units), frozen=())
    keep = plan.layout.zero.keep_whole_below
    small = [one for one in trained if one.spec.numel < keep]
    large = [one for one in trained if one.spec.numel >= keep]
    whole = [run for summed in (False, True) if (run := [p for p in small if p.summed is summed])]
    runs = [*_by_unit(plan, large, units), *whole]
    rest = _by_unit(plan, [one for one in frozen if one.spec.numel >= keep], units)
    return ModuleBuckets(
        trained=_named(plan, "bucket", runs, units, whole=whole),
        frozen=_named(plan, "frozen", rest, units),
    )


def _filled(plan: Plan, parameters: Sequence[ModuleParameter]) -> Iterator[list[ModuleParameter]]:
    size = DTYPE_BYTES[plan.mathematics.precision.gradients]
    limit = plan.layout.zero.bucket_bytes // size
    wanted, run = min(limit, FIRST_BUCKET_BYTES // size), list[ModuleParameter]()
    for parameter in reversed(parameters):
        run.insert(0, parameter)
        if sum(one.spec.numel for one in run) >= wanted:
            yield run
            wanted, run = limit, []
    if run:
        yield run


def _by_unit(
    plan: Plan, parameters: Sequence[ModuleParameter], units: Sequence[str]
) -> list[list[ModuleParameter]]:
    """Return what is gathered together, in reverse: what has the same users, or users as near.

    The root's parameters before a unit and those after it are not: backward needs them apart.
    """
    together = plan.layout.zero.unit_blocks
    others = [unit for unit in units if unit != ROOT]
    group = {unit: index // together for index, unit in enumerate(others)}
    runs: dict[tuple[object, ...], list[ModuleParameter]] = {}
    rooted, before = 0, ()
    for one in parameters:
        if one.users == (ROOT,) and before != one.users:
            rooted += 1
        before = one.users
        key: tuple[object, ...] = tuple(sorted({group.get(user, -1) for user in one.users}))
        key = (*key, rooted) if one.users == (ROOT,) else key
        runs.setdefault((one.summed, *key), []).append(one)
    return list(runs.values())[::-1]


def _named(
    plan: Plan,
    prefix: str,
    runs: Iterable[Sequence[ModuleParameter]],
    units: Sequence[str],
    *,
    whole: Sequence[Sequence[ModuleParameter]] = (),
) -> tuple[BucketPlan, ...]:
    data = plan.mesh.degree(*LOSS_AXES)
    return tuple(
        BucketPlan(
            name=f"{prefix}{index}",
            kind="partial" if run[0].summed else "whole",
            names=tuple(one.spec.name for one in run),
            num_elements=padded_elements(sum(one.spec.numel for one in run), data),
            update=update_rule_of(plan.mathematics.optimizer, run[0].spec),
            units=tuple(unit for unit in units if any(unit in one.users for one in run)),
            sliced=plan.layout.zero.stage == 3 and not any(run is one for one in whole),
        )
        for index, run in enumerate(runs)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedParameter:
    """Say of a parameter which stages of the whole module use it."""

    parameter: ModuleParameter
    stages: tuple[int, ...]


def plan_stage_buckets(
    plan: Plan, parameters: Sequence[StagedParameter], units: Sequence[str], here: Sequence[int]
) -> ModuleBuckets:
    """Return the buckets of a rank that has the stages `here`, in the order of their reduction.

    `parameters` are those of the whole module in the order of registration, `units` its blocks and
    its root. Tied parameters come after all others of their stage.
    """
    groups: dict[tuple[tuple[int, ...], bool], list[ModuleParameter]] = {}
    for one in parameters:
        mine = tuple(stage for stage in one.stages if stage in here)
        if mine:
            tied = len(mine) < len(one.stages)
            groups.setdefault((mine, tied), []).append(one.parameter)
    trained: list[BucketPlan] = []
    frozen: list[BucketPlan] = []
    for (stages, tied), held in sorted(groups.items(), key=_order):
        found = plan_module_buckets(plan, held, units)
        for kept, buckets in ((trained, found.trained), (frozen, found.frozen)):
            prefix = "bucket" if kept is trained else "frozen"
            kept += [
                replace(
                    bucket,
                    name=f"{prefix}{len(kept) + index}",
                    kind="tied" if tied and kept is trained else bucket.kind,
                    stages=stages,
                )
                for index, bucket in enumerate(buckets)
            ]
    return ModuleBuckets(trained=tuple(trained), frozen=tuple(frozen))


def _order(
    group: tuple[tuple[tuple[int, ...], bool], list[ModuleParameter]],
) -> tuple[int, int, int]:
    """Sort the last stage first; what two of its stages share, or two ranks, comes at the end."""
    (stages, tied), _ = group
    return (len(stages), -stages[0], int(tied))


Kind = Literal[
    "column",
    "row",
    "column-gathered",
    "row-scattered",
    "vocabulary",
    "expert",
    "replicated",
    "summed",
]
"""What tensor ranks do with a layer."""

CUT_OUTPUTS = ("column", "column-gathered")
CUT_INPUTS = ("row", "row-scattered")

Layer = Literal["linear", "embedding"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPiece:
    """Say which part of a whole parameter a tensor rank holds: of each of `parts` its share.

    `parts` are sizes along `dim` that are cut one by one (q, k and v of one matrix); together they
    are all of it. Only a single part may need padding (a vocabulary).
    """

    name: str
    shape: tuple[int, ...]
    dim: int
    parts: tuple[int, ...]

    def local_shape(self, degree: int) -> tuple[int, ...]:
        """Return the shape of the piece of one of `degree` ranks, padding included."""
        size = sum(-(-part // degree) for part in self.parts)
        return (*self.shape[: self.dim], size, *self.shape[self.dim + 1 :])

    def ranges(self, degree: int, index: int) -> tuple[tuple[int, int], ...]:
        """Return the ranges of `dim` that rank `index` holds, one for each part; no padding."""
        found: list[tuple[int, int]] = []
        start = 0
        for part in self.parts:
            size = -(-part // degree)
            found.append((start + min(part, index * size), start + min(part, (index + 1) * size)))
            start += part
        return tuple(found)

    @property
    def numel(self) -> int:
        """Return the number of elements of the whole."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitLayer:
    """Say what a layer sends for each token.

    `inputs` and `outputs` are its whole widths (`outputs` padded, where it is). Layers that read
    one input share its `entry`: the sum of the gradients of that input is sent once.
    """

    name: str
    kind: Kind
    layer: Layer
    inputs: int
    outputs: int
    entry: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StackedExperts:
    """Say of a module with stacks of experts how many there are on all ranks.

    `cut`: it is given this rank's positions, so that rows travel to their experts; otherwise all
    ranks have all of them, and add up what their experts make of these.
    """

    name: str
    num_experts: int
    cut: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceRegion:
    """Say which blocks see only this rank's part of each sequence, and how wide the stream is.

    `blocks` are the modules in the order in which they run; the stream is cut before the first and
    whole again after the last.
    """

    blocks: tuple[str, ...]
    width: int

    def holds(self, name: str) -> bool:
        """Return whether a module is in one of the blocks."""
        return any(name == block or name.startswith(f"{block}.") for block in self.blocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleSplit:
    """Hold how a module lies on its tensor ranks, and what it sends."""

    degree: int
    pieces: Sequence[TensorPiece]
    layers: Sequence[SplitLayer]
    summed: frozenset[str]
    """Parameters that are whole, and whose gradients are added up over the tensor ranks."""
    sequence: SequenceRegion | None = None
    experts: Sequence[StackedExperts] = ()

    def piece_of(self, name: str) -> TensorPiece | None:
        """Return what a rank holds of a parameter; None where it holds all."""
        return next((piece for piece in self.pieces if piece.name == name), None)


UNSPLIT = ModuleSplit(degree=1, pieces=(), layers=(), summed=frozenset())
"""One tensor rank."""
