# SPDX-License-Identifier: Apache-2.0
"""Rules of ZeRO: mesh, homes of slices, nodes, matrices that are gathered in int8."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd, prod

from echelon.config.automatic import MODULE_BUCKET_BYTES
from echelon.config.cluster.settings import cluster_of
from echelon.config.derived.experts import (
    EXPERT_TP_KEY,
    FFN_KEY,
    STAGE_KEY,
    cuts_by_shard,
    expert_stage,
    expert_tp,
    has_dense_layers,
    has_experts,
    ranks_with_the_same_experts,
    shared_width,
)
from echelon.config.model.settings import build_model
from echelon.config.rules.mesh import MESH_FINDERS
from echelon.config.rules.pipeline import PIPELINE_FINDERS, STAGE_FINDERS
from echelon.config.rules.violations import (
    MOST_NAMED,
    RuleViolation,
    SettingChanges,
    Trial,
    find_violations,
    near_divisors,
    setting_changes,
    setting_without_effect,
    settings_excluding,
)
from echelon.config.view import View, mesh_of
from echelon.core.axis import SHARD_AXES
from echelon.core.mesh import StridedGroups, expert_shard_groups, shard_groups
from echelon.core.parameters import parameters
from echelon.core.rulebook.config import NO_EFFECT
from echelon.core.rulebook.zero import (
    INT8_BLOCK_DIVIDES,
    INT8_GATHER_OF_ALL,
    INT8_GATHER_ROUNDS_ONCE,
    NVME_NEEDS_FOLDER,
    OFFLOAD_NEEDS_STAGE,
    REDUCE_NEEDS_NODES,
    SECONDARY_NEEDS_NODES,
    SLICES_NEED_STAGE,
    ZERO_SHARES_OUT,
)
from echelon.core.rules import nearest_divisors

HOMES = ("zero.optimizer_offload", "zero.parameter_offload")
STAGE_3_ONLY = ("reshard_after_forward", "prefetch", "unit_blocks", "keep_whole_below", "secondary")
SECONDARY_KEY, RESHARD_KEY = "zero.secondary", "zero.reshard_after_forward"
REDUCE_KEY = "zero.reduce"
REPLICATE_KEY, SHARD_KEY = "mesh.dp_replicate", "mesh.dp_shard"
MESH_KEYS = (REPLICATE_KEY, "batch.global_sequences", "batch.microbatch_sequences")
NEEDED = (*MESH_FINDERS, *PIPELINE_FINDERS, *STAGE_FINDERS)
"""What must be right before anything is said of the parameters of a rank."""

SHARED_OUT = {
    1: "optimizer state",
    2: "optimizer state and gradients",
    3: "optimizer state, gradients and parameters",
}


def shard_ranks(view: View) -> int:
    """Return over how many ranks ZeRO cuts slices."""
    return prod(view.integer(f"mesh.{axis.value}") for axis in SHARD_AXES)


def zero_shares_out(view: View) -> Iterator[RuleViolation]:
    """Check that there are ranks to share out over, or that what would be cut is offloaded."""
    stage = view.integer("zero.stage")
    home = HOMES[1] if stage == 3 else HOMES[0]
    if stage == 0 or shard_ranks(view) > 1 or view.word(home) != "none":
        return
    degrees = {axis.value: view.integer(f"mesh.{axis.value}") for axis in SHARD_AXES}
    lower = 1 if stage == 3 and view.word(HOMES[0]) != "none" else 0
    yield RuleViolation(
        rule=ZERO_SHARES_OUT,
        message=f"zero.stage = {stage} shares out {SHARED_OUT[stage]} over {' x '.join(degrees)} = "
        f'{" x ".join(map(str, degrees.values()))} = 1 rank, with {home} = "none"',
        key="zero.stage",
        set_by=("zero.stage", *(f"mesh.{axis}" for axis in degrees)),
        suggestions=(
            lambda trial: _meshes_that_share_out(trial) or [f'{home} = "host"'],
            f"zero.stage = {lower}",
        ),
    )


def _meshes_that_share_out(trial: Trial, more: SettingChanges | None = None) -> list[str]:
    """Return the nearest meshes that cut slices: with the ranks that there are, else with more."""
    more = more or {}
    replicas, total, size = (trial.view.integer(key) for key in MESH_KEYS)
    shards = [n for n in range(replicas, 1, -1) if replicas % n == 0]
    if not shards:
        degrees = (n for n in nearest_divisors(total // size or 1, 2) if n > 1)
        return trial.first(({**more, SHARD_KEY: n} for n in degrees), 1)
    return trial.first(
        {**more, SHARD_KEY: shard, REPLICATE_KEY: replicas // shard}
        for shard in (*shards[:1], *shards[1:][-1:])
    )


def shards_need_stage(view: View) -> Iterator[RuleViolation]:
    """Yield a degree of sharding, or slices of gradients, where nothing is cut."""
    if view.integer("zero.stage") != 0:
        return
    shard, replicas = view.integer("mesh.dp_shard"), view.integer("mesh.dp_replicate")
    if not cuts_by_shard(view):
        yield from setting_without_effect(
            view,
            "mesh.dp_shard",
            "zero.stage = 0 shares nothing out; whole replicas are dp_replicate",
            f"mesh.dp_replicate = {shard * replicas} with mesh.dp_shard = 1",
            "zero.stage = 1",
        )
    if view.word("zero.accumulate") == "slices":
        cuts = shard_ranks(view) > 1
        yield RuleViolation(
            rule=SLICES_NEED_STAGE,
            message='zero.accumulate = "slices", but zero.stage = 0 cuts nothing into slices',
            key="zero.accumulate",
            set_by=("zero.accumulate", "zero.stage"),
            suggestions=(
                'zero.accumulate = "whole"',
                "zero.stage = 1"
                if cuts
                else lambda trial: _meshes_that_share_out(trial, {"zero.stage": 1}),
            ),
        )


def offload_needs_stage(view: View) -> Iterator[RuleViolation]:
    """Check that what is offloaded is cut into slices at this stage."""
    stage = view.integer("zero.stage")
    for key, what, least in zip(HOMES, ("optimizer state", "parameters"), (1, 3), strict=True):
        home, setting, found, whose = view.word(key), "zero.stage", stage, ""
        if home == "none":
            continue
        if stage >= least and has_experts(view):
            setting, found, whose = STAGE_KEY, expert_stage(view)[0], " of experts"
        if found < least:
            yield RuleViolation(
                rule=OFFLOAD_NEEDS_STAGE,
                message=f'{key} = "{home}", but {setting} = {found} keeps {what}{whose} whole: '
                f"stage {found} < {least}",
                key=key,
                set_by=(key, setting),
                suggestions=(f"{setting} = {least}", f'{key} = "none"'),
            )


def nvme_needs_folder(view: View) -> Iterator[RuleViolation]:
    """Check that files have a folder, and that a folder or buffers have files."""
    files = [key for key in HOMES if view.word(key) == "nvme"]
    if files and view.is_default("zero.offload_dir"):
        yield RuleViolation(
            rule=NVME_NEEDS_FOLDER,
            message=f'{files[0]} = "nvme", but zero.offload_dir names no folder for the files',
            key="zero.offload_dir",
            set_by=tuple(files),
            suggestions=('zero.offload_dir = "DIR"', f'{files[0]} = "host"'),
        )
    if not files:
        suggestions = [f'{key} = "nvme"' for key in HOMES]
        for name in ("offload_dir", "offload_buffers"):
            why = "it is about the files of nvme, and nothing rests in files"
            yield from setting_without_effect(view, f"zero.{name}", why, *suggestions)


def _stages(view: View) -> set[int]:
    """Return the stages of what a model has: of its experts, and of all else."""
    stage = view.integer("zero.stage")
    return {stage, expert_stage(view)[0]} if has_experts(view) else {stage}


def stage_3_effects(view: View) -> Iterator[RuleViolation]:
    """Yield settings of gathered units below stage 3, and those without effect at stage 3."""
    stage, stages = view.integer("zero.stage"), _stages(view)
    if 3 not in stages:
        why = f"parameters are gathered by unit at stage 3, and zero.stage = {stage}"
        for name in STAGE_3_ONLY:
            yield from setting_without_effect(view, f"zero.{name}", why, "zero.stage = 3")
    if stages != {3}:
        return
    yield from setting_without_effect(
        view,
        "zero.bucket_bytes",
        "at stage 3 a bucket is a unit of zero.unit_blocks blocks, gathered and reduced as one",
        allowed=(MODULE_BUCKET_BYTES,),
    )


def secondary_needs_nodes(view: View) -> Iterator[RuleViolation]:
    """Check that some ranks that share out parameters are several on each of several nodes."""
    if not view.flag(SECONDARY_KEY) or 3 not in _stages(view):
        return
    if view.word(RESHARD_KEY) == "never":
        yield RuleViolation(
            rule=NO_EFFECT,
            key=SECONDARY_KEY,
            message=f'{SECONDARY_KEY} = true changes nothing: {RESHARD_KEY} = "never" gathers each '
            "unit once a step",
            set_by=(SECONDARY_KEY, RESHARD_KEY),
            suggestions=({RESHARD_KEY: "always"}, f"{SECONDARY_KEY} = false"),
        )
    if why := _not_over_nodes(view, least=3):
        yield RuleViolation(
            rule=SECONDARY_NEEDS_NODES,
            key=SECONDARY_KEY,
            message=f"{SECONDARY_KEY} = true, but {why}",
            set_by=(SECONDARY_KEY, SHARD_KEY, "cluster.preset"),
            suggestions=(_first_mesh_over_nodes, f"{SECONDARY_KEY} = false"),
        )


def reduce_needs_nodes(view: View) -> Iterator[RuleViolation]:
    """Check that gradients that are rounded are summed into slices, over several nodes."""
    kind, stage = view.word(REDUCE_KEY), view.integer("zero.stage")
    if kind == "exact":
        return
    if max(_stages(view)) == 0:
        yield RuleViolation(
            rule=REDUCE_NEEDS_NODES,
            key=REDUCE_KEY,
            message=f'{REDUCE_KEY} = "{kind}", but zero.stage = {stage} sums whole gradients: '
            "0 < 1",
            set_by=(REDUCE_KEY, "zero.stage"),
            suggestions=({"zero.stage": 1}, f'{REDUCE_KEY} = "exact"'),
        )
    elif why := _not_over_nodes(view, least=1):
        yield RuleViolation(
            rule=REDUCE_NEEDS_NODES,
            key=REDUCE_KEY,
            message=f'{REDUCE_KEY} = "{kind}", but {why}',
            set_by=(REDUCE_KEY, SHARD_KEY, "cluster.preset"),
            suggestions=(_first_mesh_over_nodes, f'{REDUCE_KEY} = "exact"'),
        )


def _not_over_nodes(view: View, *, least: int) -> str:
    """Return where ranks are that share out from stage `least` on; "" where nodes hold several."""
    mesh, node = mesh_of(view), cluster_of(view).devices_per_node
    families: list[tuple[str, StridedGroups]] = []
    if view.integer("zero.stage") >= least:
        families.append(("parameters", shard_groups(mesh)))
    if has_experts(view) and expert_stage(view)[0] >= least:
        ranks_with_the_same_experts(view)  # Of uneven ones nobody knows which they are.
        families.append(("experts", expert_shard_groups(mesh, expert_tp(view))))
    if not families or any(groups.per_node(node) > 1 for _, groups in families):
        return ""
    what, groups = families[0]
    count, nodes, even = groups.count, groups.num_nodes(node), groups.even_on_nodes(0, node)
    each = f"{count} / {nodes} = {even} on each" if even else "not as many on each"
    where = f"{nodes} node{'s' * (nodes > 1)} of {node} devices, {each}"
    return f"the {count} ranks that share out {what} are on {where}"


def _first_mesh_over_nodes(trial: Trial) -> list[str]:
    return trial.first(_meshes_over_nodes(trial, mesh_of(trial.view).world_size), 1)


def _meshes_over_nodes(trial: Trial, ranks: int) -> Iterator[SettingChanges]:
    """Yield meshes of as many ranks that share out over more of them, from the nearest on."""
    axes = ("mesh.dp_replicate", "mesh.tp")
    shard = trial.view.integer(SHARD_KEY)
    for factor in range(2, ranks + 1):
        for axis in axes:
            degree = trial.view.integer(axis)
            if degree % factor == 0:
                yield {SHARD_KEY: shard * factor, axis: degree // factor}


def something_is_cut(view: View) -> Iterator[RuleViolation]:
    """Check that stage 3 does not keep every parameter whole."""
    stage, keep = view.integer("zero.stage"), view.integer("zero.keep_whole_below")
    if 3 not in _stages(view) or keep == 0 or any(find_violations(view, NEEDED)):
        return
    model, tp, pieces = build_model(view), view.integer("mesh.tp"), expert_tp(view)
    if model.experts is not None and model.experts.ffn % pieces:
        return  # Told as such.
    if model.tied and view.integer("mesh.pp") > 1:
        return  # The embedding that both ends hold is always cut.
    largest = max(
        spec.local_numel(tp if spec.expert is None else pieces)
        for spec in parameters(model)
        if (stage if spec.expert is None else expert_stage(view)[0]) == 3
    )
    if largest < keep:
        yield RuleViolation(
            rule=NO_EFFECT,
            message=f"zero.keep_whole_below = {keep} makes stage 3 a stage 2: the largest "
            f"parameter of {view.model_name} has {largest} elements on a rank, and none is cut",
            key="zero.keep_whole_below",
            set_by=("zero.keep_whole_below", "zero.stage"),
            suggestions=(
                f"zero.keep_whole_below = {largest}",
                "zero.stage = 2 with zero.keep_whole_below = 0",
            ),
        )


ZERO_FINDERS = (
    zero_shares_out,
    shards_need_stage,
    offload_needs_stage,
    nvme_needs_folder,
    stage_3_effects,
    secondary_needs_nodes,
    reduce_needs_nodes,
    something_is_cut,
)


GATHER_KEY, BLOCK_KEY, MATMUL_KEY = "zero.gather", "zero.int8_block", "precision.matmul"
KEEP_KEY, SEQUENCE_KEY, TP_KEY = "zero.keep_whole_below", "mesh.sequence_parallel", "mesh.tp"
PLAIN_GATHER = f'{GATHER_KEY} = "parameters"'
WHOLE_STAGE = 3
"""The stage of ZeRO that gathers matrices before each use."""
LARGEST_BLOCK = 256
"""Numbers of a block that is suggested, at most."""

RowWidth = tuple[str, int, str]
"""What a row is, its numbers in the model, and the axis that cuts it ("" for none)."""


def _is_int8(view: View) -> bool:
    return view.word(GATHER_KEY) == "int8"


def int8_block_divides(view: View) -> Iterator[RuleViolation]:
    """Check that no block of a row is cut by a layout, or short."""
    if not _is_int8(view):
        return
    block, widths = view.integer(BLOCK_KEY), list(_row_widths(view))
    degrees = {"": 1, TP_KEY: view.integer(TP_KEY), EXPERT_TP_KEY: view.integer(EXPERT_TP_KEY)}
    for what, width, axis in widths:
        degree = degrees[axis]
        if width % (degree * block) == 0:
            continue
        cut = f" / {axis} = {width} / {degree}" if axis else f" = {width}"
        yield RuleViolation(
            rule=INT8_BLOCK_DIVIDES,
            key=BLOCK_KEY,
            message=f"rows of {what}{cut} are no multiple of {BLOCK_KEY} = {block}",
            set_by=tuple(key for key in (BLOCK_KEY, axis, GATHER_KEY) if key),
            suggestions=(
                *_whole_blocks([width // degrees[one] for _, width, one in widths], block),
                *({axis: n} for n in nearest_divisors(width // block, degree) if axis),
                PLAIN_GATHER,
            ),
        )
        return


def _whole_blocks(widths: list[int], block: int) -> Iterator[SettingChanges]:
    """Yield the nearest blocks that divide all widths."""
    works = [n for n in near_divisors(gcd(*widths), block) if 1 < n <= LARGEST_BLOCK]
    return setting_changes(BLOCK_KEY, works[:MOST_NAMED])


def _row_widths(view: View) -> Iterator[RowWidth]:
    """Yield how long rows of all matrices are that are gathered in int8."""
    heads, head_dim = view.integer("model.heads"), view.integer("model.head_dim")
    yield "hidden numbers", view.integer("model.hidden"), ""
    if view.has_table("model.latent"):
        for name in ("query_rank", "kv_rank"):
            if view.value(f"model.latent.{name}") != "none":
                yield f"latent.{name} numbers", view.integer(f"model.latent.{name}"), ""
        width = heads * view.integer("model.latent.value_dim")
        yield "heads x value_dim numbers", width, TP_KEY
    else:
        yield "heads x head_dim numbers", heads * head_dim, TP_KEY
    if has_dense_layers(view):
        yield "ffn numbers", view.integer("model.ffn"), TP_KEY
    if shared := shared_width(view):
        yield "shared_experts x experts.ffn numbers", shared, TP_KEY
    if has_experts(view):
        yield "experts.ffn numbers", view.integer(FFN_KEY), EXPERT_TP_KEY


def int8_gather_of_all(view: View) -> Iterator[RuleViolation]:
    """Check that every matrix that is rounded is gathered, so that no layout rounds others."""
    if not _is_int8(view):
        return
    stages = {"zero.stage": view.integer("zero.stage")}
    if has_experts(view):
        stages[STAGE_KEY] = expert_stage(view)[0]
    for key, stage in stages.items():
        if stage < WHOLE_STAGE:
            yield RuleViolation(
                rule=INT8_GATHER_OF_ALL,
                key=GATHER_KEY,
                message=f'{GATHER_KEY} = "int8", but {key} = {stage} keeps matrices whole, and '
                f"gathers none of them before use: {stage} < {WHOLE_STAGE}",
                set_by=(GATHER_KEY, key),
                suggestions=({key: WHOLE_STAGE}, PLAIN_GATHER),
            )
            return
    if view.integer(KEEP_KEY) > 0:
        why = "matrices of fewer numbers would be whole, and not rounded"
        ways = {KEEP_KEY: 0}, PLAIN_GATHER
        yield settings_excluding(view, INT8_GATHER_OF_ALL, GATHER_KEY, KEEP_KEY, *ways, because=why)
    tp = view.integer(TP_KEY)
    if view.has_table("model.latent") and view.flag(SEQUENCE_KEY) and tp > 1:
        lead = "matrices that lead down to latent vectors"
        why = f"{lead} are whole on each of {tp} tensor ranks, and not cut"
        ways = {SEQUENCE_KEY: False}, PLAIN_GATHER
        yield settings_excluding(
            view, INT8_GATHER_OF_ALL, GATHER_KEY, SEQUENCE_KEY, *ways, because=why
        )


def int8_gather_rounds_once(view: View) -> Iterator[RuleViolation]:
    """Check that nothing else rounds the same matrices."""
    if _is_int8(view) and view.word(MATMUL_KEY) == "fp8":
        why = "weights would be rounded to integers, and then to floats of 8 bits"
        ways = {GATHER_KEY: "fp8", BLOCK_KEY: 128}, {MATMUL_KEY: "parameters"}, PLAIN_GATHER
        yield settings_excluding(
            view, INT8_GATHER_ROUNDS_ONCE, GATHER_KEY, MATMUL_KEY, *ways, because=why
        )


def int8_block_without_effect(view: View) -> Iterator[RuleViolation]:
    """Find a block where nothing is rounded to int8."""
    if not _is_int8(view):
        why = f'{GATHER_KEY} = "{view.word(GATHER_KEY)}" rounds nothing to int8'
        yield from setting_without_effect(view, BLOCK_KEY, why, f'{GATHER_KEY} = "int8"')


INT8_FINDERS = (int8_block_divides, int8_gather_of_all, int8_gather_rounds_once)
"""Rules without which ranks could not gather in int8, or would round otherwise than others."""
