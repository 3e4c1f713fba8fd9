# SPDX-License-Identifier: Apache-2.0
"""Which dtypes go together, and when the loss is scaled.

bf16 has the range of fp32, so its gradients neither vanish nor overflow; fp16 has not. Wherever a
gradient is fp16 (backward computes it in the dtype of the parameters, the reduction rounds it to
its own), the loss must be scaled; nowhere else does a scale change anything but rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product

from echelon.config.rules.violations import RuleViolation, setting_without_effect
from echelon.config.settings.value_types import DTYPES
from echelon.config.view import View
from echelon.core.plan import DTYPE_BYTES
from echelon.core.rulebook.precision import (
    FP16_NEEDS_LOSS_SCALING,
    FP16_NEEDS_MASTER,
    FP64_ALONE,
    GRADIENTS_HOLD_PARAMETERS,
    LOSS_SCALE_ABOVE_MINIMUM,
    MASTER_HOLDS_PARAMETERS,
    ONE_HALF_FORMAT,
)
from echelon.core.rules import Rule

ROLES = ("parameters", "gradients", "reduction", "master")
HALF = ("bf16", "fp16")
DYNAMIC_ONLY = ("loss_scale_window", "loss_scale_min", "loss_scale_hysteresis")

EXCLUDING = (FP64_ALONE, ONE_HALF_FORMAT)
"""Rules whose problem is which dtypes there are at all; whether to scale is open until then."""

Dtypes = tuple[str, ...]
"""One dtype for each of `ROLES`."""


DtypeConflict = tuple[Rule, tuple[str, ...], str]
"""A rule that is broken, the roles to blame and the message."""


def dtypes_fit(view: View) -> Iterator[RuleViolation]:
    """Check that no role rounds away what another one is there to keep."""
    dtypes = _dtypes(view)
    for rule, roles, message in _dtype_conflicts(dtypes):
        keys = tuple(f"precision.{role}" for role in roles)
        yield RuleViolation(
            rule=rule,
            key=keys[0],
            message=message,
            set_by=keys,
            suggestions=(lambda _: nearest_dtypes(dtypes),),
        )


def loss_scaling_fits(view: View) -> Iterator[RuleViolation]:
    """Check that fp16 gradients are scaled, no others, and that each part of it has a use."""
    if any(rule in EXCLUDING for rule, _, _ in _dtype_conflicts(_dtypes(view))):
        return
    roles = ("parameters", "gradients", "reduction")
    half = [f"precision.{role}" for role in roles if view.word(f"precision.{role}") == "fp16"]
    scaling = view.word("precision.loss_scaling")
    if half and scaling == "none":
        yield RuleViolation(
            rule=FP16_NEEDS_LOSS_SCALING,
            message=f'{half[0]} = "fp16" with loss_scaling = "none": gradients below 6e-8 are zero',
            key=half[0],
            set_by=(half[0], "precision.loss_scaling"),
            suggestions=('precision.loss_scaling = "dynamic"', 'precision.loss_scaling = "fixed"'),
        )
    if not half:
        why = "no gradient is fp16, and in the range of bf16, fp32 and fp64 a scale cancels"
        yield from setting_without_effect(view, "precision.loss_scaling", why)
    if scaling == "none":
        why = 'precision.loss_scaling = "none"'
        yield from setting_without_effect(view, "precision.loss_scale", why)
    if scaling != "dynamic":
        why = f'precision.loss_scaling = "{scaling}", and only a dynamic scale changes'
        for name in DYNAMIC_ONLY:
            yield from setting_without_effect(view, f"precision.{name}", why)
        return
    scale, least = view.number("precision.loss_scale"), view.number("precision.loss_scale_min")
    if scale < least:
        yield RuleViolation(
            rule=LOSS_SCALE_ABOVE_MINIMUM,
            message=f"precision.loss_scale = {scale:g} is below loss_scale_min = {least:g}",
            key="precision.loss_scale",
            set_by=("precision.loss_scale", "precision.loss_scale_min"),
            suggestions=(f"precision.loss_scale = {least}", f"precision.loss_scale_min = {scale}"),
        )


def nearest_dtypes(dtypes: Dtypes) -> tuple[str, ...]:
    """Return the least change after which dtypes fit, and the least that keeps the parameters'."""
    legal = [other for other in product(DTYPES, repeat=len(ROLES)) if not _dtype_conflicts(other)]

    def distance(other: Dtypes) -> tuple[int, bool, int]:
        """Count what changes; the parameters rather stay, and what changes is rather fp32."""
        new = [dtype for dtype, old in zip(other, dtypes, strict=True) if dtype != old]
        return len(new), other[0] != dtypes[0], sum(dtype != "fp32" for dtype in new)

    nearest = min(legal, key=distance)
    same_parameters = min((one for one in legal if one[0] == dtypes[0]), key=distance)
    return tuple(dict.fromkeys(_changes(dtypes, one) for one in (nearest, same_parameters)))


def _dtypes(view: View) -> Dtypes:
    return tuple(view.word(f"precision.{role}") for role in ROLES)


def _changes(dtypes: Dtypes, other: Dtypes) -> str:
    return " with ".join(
        f'precision.{role} = "{dtype}"'
        for role, dtype, old in zip(ROLES, other, dtypes, strict=True)
        if dtype != old
    )


def _dtype_conflicts(dtypes: Dtypes) -> list[DtypeConflict]:
    """Return why these dtypes do not go together; the roles to blame come first."""
    roles: Mapping[str, str] = dict(zip(ROLES, dtypes, strict=True))
    listed = ", ".join(f"{role} {dtype}" for role, dtype in roles.items())
    if "fp64" in dtypes and any(half in dtypes for half in HALF):
        double = [role for role, dtype in roles.items() if dtype == "fp64"]
        others = [role for role, dtype in roles.items() if dtype in HALF]
        message = f"precision has fp64 beside half precision: {listed}"
        return [(FP64_ALONE, (*double, *others), message)]
    if all(half in dtypes for half in HALF):
        halves = [role for role in ROLES if roles[role] in HALF]
        odd = [role for role in halves if roles[role] != roles[halves[0]]]
        message = f"precision has two half formats: {listed}"
        return [(ONE_HALF_FORMAT, (*odd, halves[0]), message)]
    faults: list[DtypeConflict] = []
    for role, rule in (
        ("gradients", GRADIENTS_HOLD_PARAMETERS),
        ("master", MASTER_HOLDS_PARAMETERS),
    ):
        own, parameters = roles[role], roles["parameters"]
        if (role, own) == ("master", "fp16"):
            message = (
                'precision.master = "fp16": parameters and the state of the optimizer would be '
                "kept in numbers from 6e-8 to 65504"
            )
            faults.append((FP16_NEEDS_MASTER, ("master",), message))
        elif DTYPE_BYTES[own] < DTYPE_BYTES[parameters]:
            message = (
                f'precision.{role} = "{own}" ({DTYPE_BYTES[own]} bytes) is narrower than '
                f'precision.parameters = "{parameters}" ({DTYPE_BYTES[parameters]} bytes)'
            )
            faults.append((rule, (role, "parameters"), message))
    return faults


PRECISION_FINDERS = (dtypes_fit, loss_scaling_fits)
