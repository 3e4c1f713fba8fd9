"""Data parallelism and ZeRO for any module: its parameters move into flat buckets.

Split: nothing of the computation; optimizer state, gradients and parameters as in `zero.py`.
Sent:  as in `data.py` and `module_residency.py`.
Bytes: `cost.module_buckets`.
Must divide: nothing; buckets are padded.
Source: Rajbhandari et al., "ZeRO", 2020; Li et al., "PyTorch Distributed", 2020.

The module keeps its class and identity, and so does every parameter; only where values lie changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from echelon.core.errors import ConfigError
from echelon.core.event import EventSink, NoEvents
from echelon.core.parameters import ParameterSpec
from echelon.core.plan import Plan
from echelon.core.rulebook.module import MODULE_PARAMETERS
from echelon.cost.buckets import BucketPlan, accumulates_slices, shard_degree
from echelon.cost.module_buckets import ROOT, ModuleBuckets, ModuleParameter, plan_module_buckets
from echelon.cost.slots import slot_ranges
from echelon.parallel.buckets import Bucket, BucketRule, Cut, make_buckets
from echelon.parallel.data import GradientReduction
from echelon.parallel.device_mesh import RankGroups, Wanted, rank_groups
from echelon.parallel.dtypes import TORCH_DTYPES
from echelon.parallel.module_gradients import BackwardPasses, ModuleReduction, PatientReduction
from echelon.parallel.module_residency import ModuleResidency, num_buffers
from echelon.parallel.module_start import (
    agree_on_module,
    check_plan,
    check_ranks,
    managed_parameters,
    share_values,
)
from echelon.parallel.module_units import BLOCKS, UnitChoice, find_units, users_of
from echelon.parallel.module_watch import ModuleWatch
from echelon.parallel.offload import Rest, make_rest
from echelon.parallel.recorder import Recorder


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitRow:
    """Say what one unit holds, in the dtype of parameters; shared ones count in the first.

    `streamed` units come and go one by one at stage 3; the others are whole from the forward pass
    to the end of backward. Which do is known after the first step.
    """

    name: str
    num_parameters: int
    bytes: int
    streamed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RankModule:
    """Hold a module that is split over ranks, and what reduces and gathers it.

    `buckets` are those of trained parameters; `masters` the values that the module was given, in
    the dtype of the master copy, one slice per bucket (none where there is no such copy).
    """

    model: nn.Module
    plan: Plan
    groups: RankGroups
    device: torch.device
    plans: ModuleBuckets
    buckets: list[Bucket]
    frozen: list[Bucket]
    passes: BackwardPasses
    residency: ModuleResidency
    watch: ModuleWatch
    parameter_rest: Rest | None
    masters: Mapping[str, torch.Tensor]
    parameters: Sequence[ModuleParameter]
    units: Sequence[str]

    def unit_table(self) -> tuple[UnitRow, ...]:
        """Return what each unit holds, the root last."""
        size = TORCH_DTYPES[self.plan.mathematics.precision.parameters].itemsize
        kept = {unit for bucket in self.residency.kept for unit in bucket.plan.units}
        rows: list[UnitRow] = []
        for unit in self.units:
            held = [one.spec for one in self.parameters if one.users[0] == unit]
            if unit == ROOT and not held:
                continue
            rows.append(
                UnitRow(
                    name=unit,
                    num_parameters=len(held),
                    bytes=size * sum(spec.numel for spec in held),
                    streamed=bool(self.plans.sliced) and unit not in {*kept, ROOT},
                )
            )
        return tuple(rows)


def apply_to_module(
    plan: Plan,
    model: nn.Module,
    *,
    units: UnitChoice = BLOCKS,
    ignore: Sequence[str] = (),
    sink: EventSink | None = None,
) -> RankModule:
    """Split `model` as `plan` says; every rank of the mesh does so together."""
    check_plan(plan)
    if is_split(model):
        raise ConfigError(MODULE_PARAMETERS.problem("this module has been split already"))
    named = managed_parameters(model, ignore)
    found = find_units(model, units, needed=plan.layout.zero.stage == 3)
    groups, *links = _links(plan, Recorder(check_ranks(plan), sink or NoEvents()))
    agree_on_module(model, named, plan, groups.world)
    share_values(named, groups.world)
    users = users_of(model, found)
    described = [
        ModuleParameter(
            spec=ParameterSpec(name=name, shape=tuple(one.shape), layer=None),
            users=users[name],
            trained=one.requires_grad,
        )
        for name, one in named.items()
    ]
    order = [*(unit.name for unit in found), ROOT]
    plans = plan_module_buckets(plan, described, order)
    device = next(iter(named.values())).device
    masters = _masters(plan, plans.trained, described, named, groups)
    rest = _parameter_rest(plan, groups.rank, device)
    buckets = _buckets(plan, plans.trained, described, named, groups, rest)
    frozen = _buckets(plan, plans.frozen, described, named, groups, rest)
    for bucket in frozen:
        bucket.gradients_memory.release()
        bucket.gradient_slice = bucket.gradients.new_empty(0)
    _cast(plan, named, buckets + frozen)
    passes = BackwardPasses(
        _reduction(plan, groups, links),
        groups.replicate,
        every=accumulates_slices(plan),
        wire=TORCH_DTYPES[plan.mathematics.precision.reduction],
    )
    passes.hold(buckets)
    gathers = links[0] if links else groups
    residency = ModuleResidency([*buckets, *frozen], gathers.shard, plan.layout.zero)
    watch = ModuleWatch(residency, passes)
    watch.attach(model, found)
    _mark(model)
    return RankModule(
        model=model,
        plan=plan,
        groups=groups,
        device=device,
        plans=plans,
        buckets=buckets,
        frozen=frozen,
        passes=passes,
        residency=residency,
        watch=watch,
        parameter_rest=rest,
        masters=masters,
        parameters=described,
        units=order,
    )


def _links(plan: Plan, recorder: Recorder) -> list[RankGroups]:
    """Return the groups of this rank: one set, or three at stage 3.

    The second is for gathers, the third for sums that come in no fixed place: beside a branch that
    only some ranks take, these come in another order on each rank.
    """
    wanted = Wanted(slices=plan.layout.zero.stage > 0)
    sets = 3 if plan.layout.zero.stage == 3 else 1
    return [rank_groups(plan.mesh, recorder, wanted) for _ in range(sets)]


def _reduction(plan: Plan, groups: RankGroups, links: Sequence[RankGroups]) -> ModuleReduction:
    if not links:
        return ModuleReduction(GradientReduction(plan, groups))
    return ModuleReduction(PatientReduction(plan, links[1]), GradientReduction(plan, groups))


def is_split(model: nn.Module) -> bool:
    """Return whether a module has been split."""
    return hasattr(model, _MARK)


_MARK = "_split_by_echelon"


def _mark(model: nn.Module) -> None:
    setattr(model, _MARK, True)


def _buckets(
    plan: Plan,
    plans: Sequence[BucketPlan],
    described: Sequence[ModuleParameter],
    named: Mapping[str, nn.Parameter],
    groups: RankGroups,
    rest: Rest | None,
) -> list[Bucket]:
    precision = plan.mathematics.precision
    trained = {one.spec.name: one.trained for one in described}
    rule = BucketRule(
        plans=plans,
        optimizer=plan.mathematics.optimizer,
        counted=trained,
        uses={},
        gradients=TORCH_DTYPES[precision.gradients],
        cut=Cut(
            num_slices=shard_degree(plan),
            index=groups.shard.index if plan.layout.zero.stage else 0,
            adds_slices=accumulates_slices(plan)
            and any(trained[n] for p in plans for n in p.names),
        ),
        rest=rest,
        # No stock: autograd has saved views of parameters, which follow the storage itself only.
        stock=None,
    )
    like = next(iter(named.values())).new_empty(0, dtype=TORCH_DTYPES[precision.parameters])
    return make_buckets(named, [one.spec for one in described], rule, like)


def _cast(plan: Plan, named: Mapping[str, nn.Parameter], buckets: Sequence[Bucket]) -> None:
    """Cast what is in no bucket: frozen parameters that are whole on every rank."""
    held = {slot.spec.name for bucket in buckets for slot in bucket.slots}
    for name, parameter in named.items():
        if name not in held:
            parameter.data = parameter.data.to(TORCH_DTYPES[plan.mathematics.precision.parameters])


@torch.no_grad()
def _masters(
    plan: Plan,
    plans: Sequence[BucketPlan],
    described: Sequence[ModuleParameter],
    named: Mapping[str, nn.Parameter],
    groups: RankGroups,
) -> dict[str, torch.Tensor]:
    """Return this rank's slices in the dtype of the master copy, before anything is rounded."""
    precision = plan.mathematics.precision
    if not precision.has_master:
        return {}
    specs = {one.spec.name: one.spec for one in described}
    masters: dict[str, torch.Tensor] = {}
    for bucket in plans:
        size = bucket.num_elements // shard_degree(plan)
        base = size * (groups.shard.index if plan.layout.zero.stage else 0)
        flat = next(iter(named.values())).new_zeros(size, dtype=TORCH_DTYPES[precision.master])
        for slot in slot_ranges(plan, bucket, specs):
            start, stop = max(slot.start, base), min(slot.stop, base + size)
            if start < stop:
                values = named[slot.spec.name].reshape(-1)
                flat[start - base : stop - base] = values[start - slot.start : stop - slot.start]
        masters[bucket.name] = flat
    return masters


def _parameter_rest(plan: Plan, rank: int, device: torch.device) -> Rest | None:
    zero = plan.layout.zero
    if zero.parameter_offload == "none":
        return None
    return make_rest(
        zero.parameter_offload,
        device,
        folder=Path(zero.offload_dir),
        rank=rank,
        num_buffers=num_buffers(zero),
    )
