# SPDX-License-Identifier: Apache-2.0
"""The units of a module: the parts whose parameters are gathered at a time at stage 3.

    "blocks"                the children of the largest list of modules of one class
    a class, or several     every module of it
    a number                the smallest modules that have at least so many parameters (the size
                            policy of FSDP: Zhao et al., "PyTorch FSDP", 2023, section 4.2)
    names                   these modules

A parameter belongs to the innermost unit that holds it, or to several where modules share it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import nn

from echelon.core.errors import ConfigError
from echelon.core.rulebook.module import MODULE_UNITS
from echelon.core.rules import did_you_mean
from echelon.layout.module_buckets import ROOT

UnitChoice = str | int | type[nn.Module] | tuple[type[nn.Module], ...] | Sequence[str]
"""What says which modules are units."""

BLOCKS = "blocks"

_NO_FORWARD = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


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
