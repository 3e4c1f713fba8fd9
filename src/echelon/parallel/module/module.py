# SPDX-License-Identifier: Apache-2.0
"""Data parallelism and ZeRO for any module: its parameters move into flat buckets.

Split: nothing of the computation; optimizer state, gradients and parameters as in `zero.py`.
Sent:  as in `data.py` and `gathering.py`.
Bytes: `module_bytes` in `tests/parallel/module/sent_bytes.py`.
Must divide: nothing; buckets are padded.
Source: Rajbhandari et al., "ZeRO", 2020; Li et al., "PyTorch Distributed", 2020.

The module keeps its class and identity, and so does every parameter; only where values lie changes.

    "blocks"                the children of the largest list of modules of one class
    a class, or several     every module of it
    a number                the smallest modules that have at least so many parameters (the size
                            policy of FSDP: Zhao et al., "PyTorch FSDP", 2023, section 4.2)
    names                   these modules

A parameter belongs to the innermost unit that holds it, or to several where modules share it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from echelon.core.errors import ConfigError
from echelon.core.event import EventSink, NoEvents
from echelon.core.parameters import ParameterSpec
from echelon.core.plan import Plan
from echelon.core.rulebook.module import MODULE_PARAMETERS, MODULE_UNITS
from echelon.core.rules import did_you_mean
from echelon.layout.buckets import BucketPlan, accumulates_slices, shard_degree
from echelon.layout.modules import (
    ROOT,
    UNSPLIT,
    ModuleBuckets,
    ModuleParameter,
    ModuleSplit,
    plan_module_buckets,
)
from echelon.layout.slots import slot_ranges
from echelon.models.precision import TORCH_DTYPES
from echelon.parallel.data import GradientReduction
from echelon.parallel.device_mesh import RankGroups, rank_groups
from echelon.parallel.module.forwards.linear import layers_of, write_into_buckets
from echelon.parallel.module.forwards.norms import shorten_norms
from echelon.parallel.module.gathering import ModuleParameterGathering, num_buffers
from echelon.parallel.module.gradients import BackwardPasses, ModuleReduction, NonBlockingReduction
from echelon.parallel.module.hooks import ModuleHooks
from echelon.parallel.module.start import (
    agree_on_module,
    check_plan,
    check_ranks,
    managed_parameters,
    share_values,
)
from echelon.parallel.module.tensor.apply import NO_RULES, TensorChoice, apply_split, choose_split
from echelon.parallel.module.tensor.layers import TensorLink
from echelon.parallel.offload import OffloadStore
from echelon.parallel.storage.buckets import Bucket, BucketRule, BucketSlicing, make_buckets
from echelon.parallel.transport.recorder import Recorder
from echelon.parallel.zero import make_parameter_store

UnitChoice = str | int | type[nn.Module] | tuple[type[nn.Module], ...] | Sequence[str]
"""What says which modules are units."""

BLOCKS = "blocks"

_NO_FORWARD = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSummary:
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
    """Hold a module that is split over ranks, and what reduces and gathers it."""

    model: nn.Module
    """The module."""
    plan: Plan
    """Its plan."""
    groups: RankGroups
    """The groups of this rank."""
    device: torch.device
    """Where it computes."""
    plans: ModuleBuckets
    """Which parameters are in which bucket."""
    buckets: list[Bucket]
    """The buckets of trained parameters."""
    frozen: list[Bucket]
    """The buckets of parameters that are not trained."""
    passes: BackwardPasses
    """What is known of backward passes that run."""
    gathering: ModuleParameterGathering
    """What gathers and frees parameters."""
    hooks: ModuleHooks
    """What watches the module's forward and backward."""
    parameter_store: OffloadStore | None
    """Where slices of parameters are that are not on the device."""
    masters: Mapping[str, torch.Tensor]
    """The values that the module was given, in the dtype of the master copy, one slice per bucket;
    none where there is no such copy."""
    parameters: Sequence[ModuleParameter]
    """All its parameters."""
    units: Sequence[str]
    """The modules that are gathered one at a time, by name."""
    split: ModuleSplit = UNSPLIT
    """What tensor ranks hold."""
    link: TensorLink | None = None
    """What moves values between them, where nothing else has it."""
    foreign: Mapping[str, nn.Parameter] = field(default_factory=dict)
    """Parameters of other pipeline ranks, which read as NaN here."""
    owners: Mapping[str, int] = field(default_factory=dict)
    """The first pipeline rank that holds each parameter, where there are several."""

    @property
    def all_buckets(self) -> list[Bucket]:
        """Buckets of all parameters, trained ones first."""
        return [*self.buckets, *self.frozen]

    def unit_table(self) -> tuple[UnitSummary, ...]:
        """Return what each unit holds, the root last."""
        size = TORCH_DTYPES[self.plan.mathematics.precision.parameters].itemsize
        kept = {unit for bucket in self.gathering.kept for unit in bucket.plan.units}
        held = {
            unit: [one.spec.numel for one in self.parameters if one.users[0] == unit]
            for unit in self.units
        }
        return tuple(
            UnitSummary(
                name=unit,
                num_parameters=len(numels),
                bytes=size * sum(numels),
                streamed=bool(self.plans.sliced) and unit not in {*kept, ROOT},
            )
            for unit, numels in held.items()
            if unit != ROOT or numels
        )


def apply_to_module(  # noqa: PLR0913 - each is one choice of the caller, by its name
    plan: Plan,
    model: nn.Module,
    *,
    units: UnitChoice = BLOCKS,
    ignore: Sequence[str] = (),
    tensor: TensorChoice = NO_RULES,
    sink: EventSink | None = None,
    cuts: Collection[str] = (),
) -> RankModule:
    """Split `model` as `plan` says; every rank of the mesh does so together.

    `cuts` are axes over which the caller cuts the computation.
    """
    check_plan(plan, cuts=cuts)
    if is_split(model):
        raise ConfigError(MODULE_PARAMETERS.problem("this module has been split already"))
    named = managed_parameters(model, ignore)
    found = find_units(model, units, needed=plan.layout.zero.stage == 3)
    split = choose_split(plan, model, tensor, list(found))
    groups, *links = _make_groups(plan, Recorder(check_ranks(plan), sink or NoEvents()))
    agree_on_module(model, named, plan, groups.world)
    share_values(named, groups.world)
    link = apply_split(model, split, named, groups.tensor)
    shorten_norms(layers_of(model, named.values()))
    described = described_parameters(model, named, found, split.split)
    order = [*found, ROOT]
    plans = plan_module_buckets(plan, described, order)
    device = next(iter(named.values())).device
    masters = masters_of(plan, plans.trained, described, named, groups)
    zero = plan.layout.zero
    offload_store = make_parameter_store(zero, groups, device, num_buffers=num_buffers(zero))
    buckets = buckets_of(plan, plans.trained, described, named, groups, offload_store)
    frozen = frozen_buckets(plan, plans.frozen, described, named, groups, offload_store)
    cast_rest(plan, named, buckets + frozen)
    passes = _backward_passes(plan, groups, links)
    passes.hold(buckets)
    write_into_buckets(layers_of(model, named.values()), passes)
    gathers = links[0] if links else groups
    gathering = ModuleParameterGathering([*buckets, *frozen], gathers.shard, plan.layout.zero)
    hooks = ModuleHooks(gathering, passes)
    hooks.attach(model, found)
    mark_split(model)
    return RankModule(
        model=model,
        plan=plan,
        groups=groups,
        device=device,
        plans=plans,
        buckets=buckets,
        frozen=frozen,
        passes=passes,
        gathering=gathering,
        hooks=hooks,
        parameter_store=offload_store,
        masters=masters,
        parameters=described,
        units=order,
        split=split.split,
        link=link,
    )


def described_parameters(
    model: nn.Module,
    named: Mapping[str, nn.Parameter],
    units: Mapping[str, nn.Module],
    split: ModuleSplit,
) -> list[ModuleParameter]:
    """Return what is known of each parameter, as a tensor rank holds it."""
    users, cut = users_of(model, units), {piece.name for piece in split.pieces}
    return [
        ModuleParameter(
            spec=ParameterSpec(name=name, shape=tuple(one.shape), layer=None),
            users=users[name],
            trained=one.requires_grad,
            cut=name in cut,
            summed=name in split.summed,
        )
        for name, one in named.items()
    ]


def _backward_passes(plan: Plan, groups: RankGroups, links: Sequence[RankGroups]) -> BackwardPasses:
    blocking = GradientReduction(plan, groups)
    sums = (NonBlockingReduction(plan, links[1]), blocking) if links else (blocking,)
    return BackwardPasses(
        ModuleReduction(*sums),
        groups.replicate,
        groups.tensor,
        every=accumulates_slices(plan),
        wire=TORCH_DTYPES[plan.mathematics.precision.reduction],
    )


def _make_groups(plan: Plan, recorder: Recorder) -> list[RankGroups]:
    """Return the groups of this rank: one set, or three at stage 3.

    The second is for gathers, the third for sums that come in no fixed place: beside a branch that
    only some ranks take, these come in another order on each rank.
    """
    return [rank_groups(plan, recorder) for _ in range(3 if plan.layout.zero.stage == 3 else 1)]


def is_split(model: nn.Module) -> bool:
    """Return whether a module has been split."""
    return hasattr(model, _SPLIT_MARK)


def mark_split(model: nn.Module) -> None:
    """Remember that a module has been split."""
    setattr(model, _SPLIT_MARK, True)


_SPLIT_MARK = "_split_by_echelon"


def frozen_buckets(
    plan: Plan,
    plans: Sequence[BucketPlan],
    described: Sequence[ModuleParameter],
    named: Mapping[str, nn.Parameter],
    groups: RankGroups,
    offload_store: OffloadStore | None,
) -> list[Bucket]:
    """Return buckets without gradients."""
    frozen = buckets_of(plan, plans, described, named, groups, offload_store)
    for bucket in frozen:
        bucket.gradients_memory.release()
        bucket.gradient_slice = bucket.gradients.new_empty(0)
    return frozen


def buckets_of(  # noqa: PLR0913 - what a rank holds, and where
    plan: Plan,
    plans: Sequence[BucketPlan],
    described: Sequence[ModuleParameter],
    named: Mapping[str, nn.Parameter],
    groups: RankGroups,
    offload_store: OffloadStore | None,
    *,
    uncounted: Collection[str] = (),
) -> list[Bucket]:
    """Return the buckets that `plans` describe; `uncounted` parameters are not in the norm here."""
    precision = plan.mathematics.precision
    trained = {one.spec.name: one.trained for one in described}
    # In the norm what tensor ranks hold alike counts on the first of them.
    counted = {
        one.spec.name: one.trained and (one.cut or groups.tensor.index == 0) for one in described
    }
    rule = BucketRule(
        plans=plans,
        optimizer=plan.mathematics.optimizer,
        counted={name: one and name not in uncounted for name, one in counted.items()},
        uses={},
        gradients=TORCH_DTYPES[precision.gradients],
        slicing=BucketSlicing(
            num_slices=shard_degree(plan),
            index=groups.shard.index,
            adds_slices=accumulates_slices(plan)
            and any(trained[n] for p in plans for n in p.names),
        ),
        offload_store=offload_store,
        # No pool: autograd has saved views of parameters, which follow the storage itself only.
        buffer_pool=None,
    )
    like = next(iter(named.values())).new_empty(0, dtype=TORCH_DTYPES[precision.parameters])
    return make_buckets(named, [one.spec for one in described], rule, like)


def cast_rest(plan: Plan, named: Mapping[str, nn.Parameter], buckets: Sequence[Bucket]) -> None:
    """Cast what is in no bucket: frozen parameters that are whole on every rank."""
    held = {slot.spec.name for bucket in buckets for slot in bucket.slots}
    for name, parameter in named.items():
        if name not in held:
            parameter.data = parameter.data.to(TORCH_DTYPES[plan.mathematics.precision.parameters])


@torch.no_grad()
def masters_of(
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
        base = size * groups.shard.index
        flat = next(iter(named.values())).new_zeros(size, dtype=TORCH_DTYPES[precision.master])
        for slot in slot_ranges(plan, bucket, specs):
            start, stop = max(slot.start, base), min(slot.stop, base + size)
            if start < stop:
                values = named[slot.spec.name].reshape(-1)
                flat[start - base : stop - base] = values[start - slot.start : stop - slot.start]
        masters[bucket.name] = flat
    return masters


def find_units(model: nn.Module, choice: UnitChoice, *, needed: bool) -> dict[str, nn.Module]:
    """Return the units of `model` by name, in the order of registration; the root is none of them.

    ConfigError where `choice` finds none. Only where they are not `needed`, a module without blocks
    has none.
    """
    if isinstance(choice, str):
        if choice != BLOCKS:
            raise _refusal(f"units = {choice!r}", [f"units={BLOCKS!r}", f"units=[{choice!r}]"])
        return _blocks(model, needed=needed)
    if isinstance(choice, int):
        found = dict(_by_size(model, choice)) if choice > 0 else {}
        what = f"units = {choice}: no module inside of the root has so many parameters"
    elif isinstance(choice, type):
        found = _by_class(model, (choice,))
        what = f"units = {choice.__name__}: there is no module of this class"
    elif choice and all(isinstance(one, type) for one in choice):
        classes = tuple(one for one in choice if isinstance(one, type))
        found = _by_class(model, classes)
        what = f"units = {', '.join(one.__name__ for one in classes)}: no module is of these"
    else:
        found = {str(name): _by_name(model, str(name)) for name in choice}
        what = "units names no module"
    if not found:
        raise _refusal(what, [f"units={BLOCKS!r}", "units=['NAME', ...]"])
    name_of = {id(module): name for name, module in found.items()}
    there = [module for module in model.modules() if id(module) in name_of]
    return {name_of[id(module)]: module for module in there}


def users_of(model: nn.Module, units: Mapping[str, nn.Module]) -> dict[str, tuple[str, ...]]:
    """Return, for each parameter by its (first) name, the units that use it, in their order."""
    unit_of = {id(module): name for name, module in units.items()}
    users: dict[int, set[str]] = {}

    def walk(module: nn.Module, unit: str) -> None:
        unit = unit_of.get(id(module), unit)
        for parameter in module.parameters(recurse=False):
            users.setdefault(id(parameter), set()).add(unit)
        for child in module.children():
            walk(child, unit)

    walk(model, ROOT)
    order = [*units, ROOT]
    return {
        name: tuple(sorted(users[id(parameter)], key=order.index))
        for name, parameter in model.named_parameters()
    }


def _blocks(model: nn.Module, *, needed: bool) -> dict[str, nn.Module]:
    best: dict[str, nn.Module] = {}
    largest = 0
    for name, module in model.named_modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)):
            continue
        children = list(dict(module.named_children()).items())
        size = sum(parameter.numel() for parameter in module.parameters())
        if len({type(child) for _, child in children}) == 1 and size > largest:
            largest = size
            prefix = f"{name}." if name else ""
            best = {f"{prefix}{part}": child for part, child in children}
    if not best and needed:
        raise _refusal(
            f"units = {BLOCKS!r}, but the module has no ModuleList or Sequential of modules of one "
            "class that have parameters",
            ["units=['NAME', ...]", "units=CLASS", "units=1_000_000"],
        )
    return best


def _by_class(model: nn.Module, classes: tuple[type, ...]) -> dict[str, nn.Module]:
    return {
        name: module
        for name, module in model.named_modules()
        if name and isinstance(module, classes) and not isinstance(module, _NO_FORWARD)
    }


def _by_name(model: nn.Module, name: str) -> nn.Module:
    known = dict(model.named_modules())
    if not name or name not in known:
        near = did_you_mean(name, [one for one in known if one])
        raise _refusal(f"units names {name!r}, and no module is called so", near)
    if isinstance(known[name], _NO_FORWARD):
        children = [f"{name}.{part}" for part, _ in known[name].named_children()]
        raise _refusal(
            f"units names {name!r}, a {type(known[name]).__name__}, which has no forward", children
        )
    return known[name]


def _by_size(model: nn.Module, least: int) -> Iterator[tuple[str, nn.Module]]:
    """Yield modules with at least so many elements that no unit inside of them has already."""
    claimed: set[int] = set()

    def visit(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
        for part, child in module.named_children():
            yield from visit(child, f"{name}.{part}" if name else part)
        left = [one for one in module.parameters() if id(one) not in claimed]
        fits = sum(one.numel() for one in left) >= least
        if name and fits and not isinstance(module, _NO_FORWARD):
            claimed.update(id(one) for one in left)
            yield name, module

    yield from visit(model, "")


def _refusal(message: str, suggestions: Sequence[str]) -> ConfigError:
    return ConfigError(MODULE_UNITS.problem(message, key="units", suggestions=suggestions))
