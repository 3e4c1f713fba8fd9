# SPDX-License-Identifier: Apache-2.0
"""Which dtypes go together, and when the loss is scaled.

bf16 has the range of fp32, so its gradients neither vanish nor overflow; fp16 has not. Wherever a
gradient is fp16 (backward computes it in the dtype of the parameters, the reduction rounds it to
its own), the loss must be scaled; nowhere else does a scale change anything but rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from math import gcd

from echelon.config.cluster.settings import cluster_of
from echelon.config.derived.experts import (
    EXPERT_TP_KEY,
    FFN_KEY,
    STAGE_KEY,
    expert_stage,
    has_dense_layers,
    has_experts,
    shared_width,
)
from echelon.config.rules.violations import (
    RuleViolation,
    setting_without_effect,
    settings_excluding,
)
from echelon.config.view import View
from echelon.core.plan import DTYPE_BYTES
from echelon.core.rulebook.precision import (
    FP8_BLOCK_DIVIDES,
    FP8_BLOCK_OF_KERNELS,
    FP8_DEVICE,
    FP8_EXPERTS_ARE_PLAIN,
    FP8_GATHER_NEEDS_CODES,
    FP8_GATHER_OF_SQUARES,
    FP8_GATHER_ON_DEVICE,
    FP8_GATHERS_AT_ONCE,
    FP8_HISTORY_OF_GRADIENTS,
    FP8_PARAMETERS,
    FP16_NEEDS_LOSS_SCALING,
    FP16_NEEDS_MASTER,
    FP64_ALONE,
    GRADIENTS_HOLD_PARAMETERS,
    LOSS_SCALE_ABOVE_MINIMUM,
    MASTER_HOLDS_PARAMETERS,
    ONE_HALF_FORMAT,
)
from echelon.core.rules import Rule, nearest_divisors
from echelon.core.settings.value_types import DTYPES, toml_text

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


MATMUL_KEY, BLOCK_KEY, DTYPE_KEY = "precision.matmul", "precision.fp8_block", "precision.parameters"
SCALES_KEY, HISTORY_KEY = "precision.fp8_scales", "precision.fp8_history"
GRADIENTS_KEY = "precision.fp8_gradients"
OVERLAP_KEY = "mesh.tp_overlap"
SCALING_KEY = "precision.loss_scaling"
GATHER_KEY, OFFLOAD_KEY = "zero.gather", "zero.parameter_offload"
PLAIN_GATHER = f'{GATHER_KEY} = "parameters"'
WHOLE_STAGE = 3
"""The stage of ZeRO that gathers weights before each use."""
KERNEL_BLOCK = 128
"""Numbers that share a scale in kernels of GPUs."""
OFF = f'{MATMUL_KEY} = "parameters"'

CutWidth = tuple[str, int, str]
"""What a width is, the width of the model, and the axis that cuts it ("" for none)."""


def fp8_block_divides(view: View) -> Iterator[RuleViolation]:
    """Check that no tile is cut by a layout, or short."""
    if view.word(MATMUL_KEY) != "fp8":
        return
    block, degrees = view.integer(BLOCK_KEY), {"": 1, "mesh.tp": view.integer("mesh.tp")}
    degrees[EXPERT_TP_KEY] = view.integer(EXPERT_TP_KEY)
    widths = list(_widths(view))
    for what, width, axis in widths:
        degree = degrees[axis]
        if width % (degree * block) == 0:
            continue
        cut = f" / {axis} = {width} / {degree}" if axis else f" = {width}"
        yield RuleViolation(
            rule=FP8_BLOCK_DIVIDES,
            key=axis or BLOCK_KEY,
            message=f"{what}{cut} is no multiple of {BLOCK_KEY} = {block}",
            set_by=tuple(key for key in (axis, BLOCK_KEY, MATMUL_KEY) if key),
            suggestions=(*_degrees(view, axis, widths, block), *_blocks(view, widths), OFF),
        )
        return


def _widths(view: View) -> Iterator[CutWidth]:
    """Yield all widths of the layers of blocks that multiply 8-bit numbers."""
    heads, head_dim = view.integer("model.heads"), view.integer("model.head_dim")
    yield "hidden", view.integer("model.hidden"), ""
    if view.has_table("model.latent"):
        nope, rope, value = (view.integer(f"model.latent.{name}_dim") for name in _PARTS_OF_HEAD)
        for name in ("query_rank", "kv_rank"):
            if view.value(f"model.latent.{name}") != "none":
                yield f"latent.{name}", view.integer(f"model.latent.{name}"), ""
        yield "heads x (nope_dim + rope_dim)", heads * (nope + rope), "mesh.tp"
        yield "heads x (nope_dim + value_dim)", heads * (nope + value), "mesh.tp"
        yield "heads x value_dim", heads * value, "mesh.tp"
    else:
        yield "heads x head_dim", heads * head_dim, "mesh.tp"
        yield "kv_heads x head_dim", view.integer("model.kv_heads") * head_dim, "mesh.tp"
    if has_dense_layers(view):
        yield "ffn", view.integer("model.ffn"), "mesh.tp"
    if shared := shared_width(view):
        yield "shared_experts x experts.ffn", shared, "mesh.tp"
    if has_experts(view):
        yield "experts.ffn", view.integer(FFN_KEY), EXPERT_TP_KEY


_PARTS_OF_HEAD = ("nope", "rope", "value")


def _degrees(view: View, axis: str, widths: list[CutWidth], block: int) -> list[str]:
    """Return degrees of the axis with which its widths are whole blocks."""
    if not axis:
        return []
    common = gcd(*(width for _, width, cut in widths if cut == axis))
    if common % block:
        return []
    return [str(n) for n in nearest_divisors(common // block, view.integer(axis))]


def _blocks(view: View, widths: list[CutWidth]) -> list[str]:
    """Return the largest power of two that divides every width, where kernels do not say it."""
    if cluster_of(view).backend == "nccl":
        return []
    degrees = {"": 1, **{key: view.integer(key) for key in ("mesh.tp", EXPERT_TP_KEY)}}
    common = gcd(*(width // degrees[axis] for _, width, axis in widths))
    largest = common & -common
    return [f"{BLOCK_KEY} = {min(largest, KERNEL_BLOCK)}"] if largest > 1 else []


def fp8_parameters(view: View) -> Iterator[RuleViolation]:
    """Check that what codes stand for is exact in the dtype of parameters."""
    if view.word(MATMUL_KEY) == "fp8" and view.word(DTYPE_KEY) == "fp16":
        why = "the least scale is 2^-126, the least number of fp16 2^-24"
        wide = f'{DTYPE_KEY} = "bf16"'
        ways = f'{wide} with precision.loss_scaling = "none"', wide, OFF
        yield settings_excluding(view, FP8_PARAMETERS, MATMUL_KEY, DTYPE_KEY, *ways, because=why)


def fp8_gathers_at_once(view: View) -> Iterator[RuleViolation]:
    """Check that rows of 8-bit numbers are not asked to travel in chunks beside products."""
    if view.word(MATMUL_KEY) == "fp8" and view.word(OVERLAP_KEY) != "none":
        why = "codes and scales are gathered at once, in no chunks"
        ways = {OVERLAP_KEY: "none"}, OFF
        yield settings_excluding(
            view, FP8_GATHERS_AT_ONCE, OVERLAP_KEY, MATMUL_KEY, *ways, because=why
        )


def fp8_gather(view: View) -> Iterator[RuleViolation]:
    """Check that what is gathered in 8 bits is multiplied so, cut, and on the device."""
    if view.word(GATHER_KEY) != "fp8":
        return
    stages = {"zero.stage": view.integer("zero.stage")}
    if has_experts(view):
        stages[STAGE_KEY] = expert_stage(view)[0]
    matmul, home = view.word(MATMUL_KEY), view.word(OFFLOAD_KEY)
    if matmul != "fp8":
        yield RuleViolation(
            rule=FP8_GATHER_NEEDS_CODES,
            key=GATHER_KEY,
            message=f'{GATHER_KEY} = "fp8", but {MATMUL_KEY} = "{matmul}" multiplies no weight in '
            "8 bits",
            set_by=(GATHER_KEY, MATMUL_KEY),
            suggestions=({MATMUL_KEY: "fp8"}, PLAIN_GATHER),
        )
    if WHOLE_STAGE not in stages.values():
        found = " and ".join(f"{key} = {stage}" for key, stage in stages.items())
        yield RuleViolation(
            rule=FP8_GATHER_NEEDS_CODES,
            key=GATHER_KEY,
            message=f'{GATHER_KEY} = "fp8", but {found} keeps weights whole: '
            f"{max(stages.values())} < {WHOLE_STAGE}",
            set_by=(GATHER_KEY, *stages),
            suggestions=({"zero.stage": WHOLE_STAGE}, PLAIN_GATHER),
        )
    if matmul == "fp8" and view.word(SCALES_KEY) == "tensor":
        why = "codes are made with the scales of squares"
        ways = {SCALES_KEY: "block"}, PLAIN_GATHER
        yield settings_excluding(
            view, FP8_GATHER_OF_SQUARES, GATHER_KEY, SCALES_KEY, *ways, because=why
        )
    if home != "none":
        why = "codes are made of slices that are on the device"
        ways = {OFFLOAD_KEY: "none"}, PLAIN_GATHER
        yield settings_excluding(
            view, FP8_GATHER_ON_DEVICE, GATHER_KEY, OFFLOAD_KEY, *ways, because=why
        )


def fp8_device(view: View) -> Iterator[RuleViolation]:
    """Check that devices multiply 8-bit numbers, in tiles that their kernels know."""
    if view.word(MATMUL_KEY) != "fp8":
        return
    cluster, block = cluster_of(view), view.integer(BLOCK_KEY)
    if cluster.backend != "nccl":
        return
    device = cluster.device
    if device.flops("fp8") is None:
        peaks = ", ".join(name for name, _ in device.peak_flops) or "none"
        yield RuleViolation(
            rule=FP8_DEVICE,
            key=MATMUL_KEY,
            message=f'{MATMUL_KEY} = "fp8", but {device.name} has no peak of fp8 '
            f"(it has those of {peaks})",
            set_by=(MATMUL_KEY, "cluster.preset"),
            suggestions=(OFF,),
        )
    elif block != KERNEL_BLOCK:
        yield RuleViolation(
            rule=FP8_BLOCK_OF_KERNELS,
            key=BLOCK_KEY,
            message=f"{BLOCK_KEY} = {block}, but kernels of {device.name} multiply numbers of "
            f"which {KERNEL_BLOCK} share a scale",
            suggestions=(f"{BLOCK_KEY} = {KERNEL_BLOCK}", OFF),
        )


def fp8_settings_without_effect(view: View) -> Iterator[RuleViolation]:
    """Find settings of 8-bit numbers where there are none, and a history that nothing looks at."""
    if view.word(MATMUL_KEY) != "fp8":
        why = f"{OFF}, and nothing is in 8 bits"
        for key in (BLOCK_KEY, SCALES_KEY, HISTORY_KEY, GRADIENTS_KEY):
            yield from setting_without_effect(view, key, why)
    elif view.word(SCALES_KEY) != "tensor":
        why = f'{SCALES_KEY} = "block": a tile has the scale of its own largest number'
        yield from setting_without_effect(view, HISTORY_KEY, why)


def fp8_history_of_gradients(view: View) -> Iterator[RuleViolation]:
    """Check that gradients of one step are as those of the steps before."""
    tensors = view.word(MATMUL_KEY) == "fp8" and view.word(SCALES_KEY) == "tensor"
    if tensors and view.word(SCALING_KEY) != "none":
        why = (
            "scales come from gradients of the steps before, and a loss scale that doubles "
            "doubles gradients"
        )
        ways = {SCALES_KEY: "block"}, f'{SCALING_KEY} = "none"', OFF
        yield settings_excluding(
            view, FP8_HISTORY_OF_GRADIENTS, SCALES_KEY, SCALING_KEY, *ways, because=why
        )


def fp8_experts_are_plain(view: View) -> Iterator[RuleViolation]:
    """Check that experts are what products of 8-bit numbers are built for."""
    if view.word(MATMUL_KEY) != "fp8" or not has_experts(view):
        return
    bias, limit = (f"model.experts.{name}" for name in ("bias", "limit"))
    for key, there in ((bias, view.flag(bias)), (limit, view.value(limit) != "none")):
        if there:
            yield RuleViolation(
                rule=FP8_EXPERTS_ARE_PLAIN,
                key=MATMUL_KEY,
                message=f'{MATMUL_KEY} = "fp8", but {view.model_name} has {key} = '
                f"{toml_text(view.value(key))}",
                set_by=(MATMUL_KEY, key),
                suggestions=(OFF,),
            )
            return


FP8_FINDERS = (
    fp8_block_divides,
    fp8_experts_are_plain,
    fp8_parameters,
    fp8_gathers_at_once,
    fp8_gather,
    fp8_history_of_gradients,
)
"""Rules without which ranks could not multiply 8-bit numbers, or would not know which."""

FP8_RUN_FINDERS = (fp8_device, fp8_settings_without_effect)
"""Rules about where a run computes, and about settings without effect."""
