"""What ZeRO's settings need of each other, of the mesh and of the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice

from echelon.config.checks import CHECKS, run_checks
from echelon.config.cluster import read_cluster
from echelon.config.entries import Entry
from echelon.config.experts import (
    STAGE_KEY,
    cuts_by_shard,
    expert_stage,
    expert_tp,
    has_experts,
)
from echelon.config.model import build_model
from echelon.config.refusals import no_effect
from echelon.config.view import Unavailable, View, mesh_of
from echelon.core.axis import SHARD_AXES
from echelon.core.errors import Problem
from echelon.core.parameters import parameters
from echelon.core.rulebook.config import NO_EFFECT
from echelon.core.rulebook.zero import (
    NVME_NEEDS_FOLDER,
    OFFLOAD_NEEDS_STAGE,
    SLICES_NEED_STAGE,
    ZERO_SHARES_OUT,
)
from echelon.core.rules import nearest_divisors

HOMES = ("zero.optimizer_offload", "zero.parameter_offload")
STAGE_3_ONLY = ("reshard_after_forward", "prefetch", "unit_blocks", "keep_whole_below")
SHARED_OUT = {
    1: "optimizer state",
    2: "optimizer state and gradients",
    3: "optimizer state, gradients and parameters",
}


def shard_ranks(view: View) -> int:
    """Return over how many ranks ZeRO cuts slices."""
    degree = 1
    for axis in SHARD_AXES:
        degree *= view.integer(f"mesh.{axis.value}")
    return degree


def zero_shares_out(view: View) -> Iterator[Problem]:
    """Check that there are ranks to share out over, or that what would be cut is offloaded."""
    stage = view.integer("zero.stage")
    home = HOMES[1] if stage == 3 else HOMES[0]
    if stage == 0 or shard_ranks(view) > 1 or view.word(home) != "none":
        return
    degrees = {axis.value: view.integer(f"mesh.{axis.value}") for axis in SHARD_AXES}
    lower = 1 if stage == 3 and view.word(HOMES[0]) != "none" else 0
    meshes = meshes_that_share_out(view)
    yield ZERO_SHARES_OUT.problem(
        f"zero.stage = {stage} shares out {SHARED_OUT[stage]} over {' x '.join(degrees)} = "
        f'{" x ".join(map(str, degrees.values()))} = 1 rank, with {home} = "none"',
        key="zero.stage",
        set_by=view.set_by("zero.stage", *(f"mesh.{axis}" for axis in degrees)),
        works=(*(meshes or [f'{home} = "host"']), f"zero.stage = {lower}"),
    )


def meshes_that_share_out(view: View) -> list[str]:
    """Return the nearest meshes that cut slices: with the ranks that there are, else with more."""
    try:
        return list(_meshes_that_share_out(view))
    except Unavailable:
        return []  # Another setting is wrong, and what would fit it is not known.


def _meshes_that_share_out(view: View) -> Iterator[str]:
    replicas = view.integer("mesh.dp_replicate")
    shards = [n for n in range(replicas, 1, -1) if replicas % n == 0]
    for shard in (*shards[:1], *shards[1:][-1:]):
        if _passes(view, {"mesh.dp_shard": shard, "mesh.dp_replicate": replicas // shard}):
            yield f"mesh.dp_shard = {shard} with mesh.dp_replicate = {replicas // shard}"
    if not shards:
        total, size = (
            view.integer("batch.global_sequences"),
            view.integer("batch.microbatch_sequences"),
        )
        more = (n for n in nearest_divisors(total // size or 1, 2) if n > 1)
        for shard in islice((n for n in more if _passes(view, {"mesh.dp_shard": n})), 1):
            yield f"mesh.dp_shard = {shard}"


def _passes(view: View, degrees: Mapping[str, int]) -> bool:
    changed = {key: Entry(value=degree, source="") for key, degree in degrees.items()}
    other = replace(view, entries={**view.entries, **changed})
    cluster = read_cluster(view)
    fits = isinstance(cluster, list) or mesh_of(other).world_size <= cluster.num_devices
    return fits and not run_checks(other, CHECKS)


def shards_need_stage(view: View) -> Iterator[Problem]:
    """Yield a degree of sharding, or slices of gradients, where nothing is cut."""
    if view.integer("zero.stage") != 0:
        return
    shard, replicas = view.integer("mesh.dp_shard"), view.integer("mesh.dp_replicate")
    if not cuts_by_shard(view):
        yield from no_effect(
            view,
            "mesh.dp_shard",
            "zero.stage = 0 shares nothing out; whole replicas are dp_replicate",
            [f"mesh.dp_replicate = {shard * replicas} with mesh.dp_shard = 1", "zero.stage = 1"],
        )
    if view.word("zero.accumulate") == "slices":
        stage_1 = "zero.stage = 1"
        others = (
            [stage_1]
            if shard_ranks(view) > 1
            else [f"{stage_1} with {m}" for m in meshes_that_share_out(view)]
        )
        yield SLICES_NEED_STAGE.problem(
            'zero.accumulate = "slices", but zero.stage = 0 cuts nothing into slices',
            key="zero.accumulate",
            set_by=view.set_by("zero.accumulate", "zero.stage"),
            works=('zero.accumulate = "whole"', *others),
        )


def offload_needs_stage(view: View) -> Iterator[Problem]:
    """Check that what is offloaded is cut into slices at this stage."""
    stage = view.integer("zero.stage")
    for key, what, least in zip(HOMES, ("optimizer state", "parameters"), (1, 3), strict=True):
        home = view.word(key)
        if home != "none" and stage < least:
            yield OFFLOAD_NEEDS_STAGE.problem(
                f'{key} = "{home}", but zero.stage = {stage} keeps {what} whole: stage {stage} < '
                f"{least}",
                key=key,
                set_by=view.set_by(key, "zero.stage"),
                works=(f"zero.stage = {least}", f'{key} = "none"'),
            )
        elif home != "none" and has_experts(view) and expert_stage(view)[0] < least:
            yield OFFLOAD_NEEDS_STAGE.problem(
                f'{key} = "{home}", but {STAGE_KEY} = {expert_stage(view)[0]} keeps {what} of '
                f"experts whole: stage {expert_stage(view)[0]} < {least}",
                key=key,
                set_by=view.set_by(key, STAGE_KEY),
                works=(f"{STAGE_KEY} = {least}", f'{key} = "none"'),
            )


def nvme_needs_folder(view: View) -> Iterator[Problem]:
    """Check that files have a folder, and that a folder or buffers have files."""
    files = [key for key in HOMES if view.word(key) == "nvme"]
    if files and view.is_default("zero.offload_dir"):
        yield NVME_NEEDS_FOLDER.problem(
            f'{files[0]} = "nvme", but zero.offload_dir names no folder for the files',
            key="zero.offload_dir",
            set_by=view.set_by(*files),
            works=('zero.offload_dir = "DIR"', f'{files[0]} = "host"'),
        )
    if not files:
        works = [f'{key} = "nvme"' for key in HOMES]
        for name in ("offload_dir", "offload_buffers"):
            why = "it is about the files of nvme, and nothing rests in files"
            yield from no_effect(view, f"zero.{name}", why, works)


def _stages(view: View) -> set[int]:
    """Return the stages of what a model has: of its experts, and of all else."""
    stage = view.integer("zero.stage")
    return {stage, expert_stage(view)[0]} if has_experts(view) else {stage}


def stage_3_effects(view: View) -> Iterator[Problem]:
    """Yield settings of gathered units below stage 3, and those without effect at stage 3."""
    stage, stages = view.integer("zero.stage"), _stages(view)
    if 3 not in stages:
        why = f"parameters are gathered by unit at stage 3, and zero.stage = {stage}"
        for name in STAGE_3_ONLY:
            yield from no_effect(view, f"zero.{name}", why, ["zero.stage = 3"])
    if stages != {3}:
        return
    yield from no_effect(
        view,
        "zero.bucket_bytes",
        "at stage 3 a bucket is a unit of zero.unit_blocks blocks, gathered and reduced as one",
        [],
    )


def something_is_cut(view: View) -> Iterator[Problem]:
    """Check that stage 3 does not keep every parameter whole."""
    stage, keep = view.integer("zero.stage"), view.integer("zero.keep_whole_below")
    if 3 not in _stages(view) or keep == 0 or run_checks(view, CHECKS):
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
        yield NO_EFFECT.problem(
            f"zero.keep_whole_below = {keep} makes stage 3 a stage 2: the largest parameter of "
            f"{view.model_name} has {largest} elements on a rank, and none is cut",
            key="zero.keep_whole_below",
            set_by=view.set_by("zero.keep_whole_below", "zero.stage"),
            works=(
                f"zero.keep_whole_below = {largest}",
                "zero.stage = 2 with zero.keep_whole_below = 0",
            ),
        )


ZERO_CHECKS = (
    zero_shares_out,
    shards_need_stage,
    offload_needs_stage,
    nvme_needs_folder,
    stage_3_effects,
    something_is_cut,
)
