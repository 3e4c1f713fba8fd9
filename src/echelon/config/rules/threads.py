# SPDX-License-Identifier: Apache-2.0
"""What replicas on threads need: one process, an even microbatch, a model that computes alone."""

from __future__ import annotations

from collections.abc import Iterator

from echelon.config.cluster.settings import cluster_of
from echelon.config.derived.experts import has_experts
from echelon.config.derived.pipeline import SCHEDULE_KEY, VIRTUAL_KEY, stages_per_rank
from echelon.config.rules.mesh import MESH_KEYS, mesh_product_text
from echelon.config.rules.violations import (
    RuleViolation,
    ViolationFinder,
    by_distance,
    near_divisors,
    setting_changes,
)
from echelon.config.settings.value_types import toml_text
from echelon.config.view import View, mesh_of
from echelon.core.rulebook.threads import (
    THREADS_ARE_ONE_PROCESS,
    THREADS_DIVIDE_MICROBATCH,
    THREADS_FIT_NODE,
    THREADS_SHARE_NOTHING,
)

REPLICAS_KEY = "threads.replicas"
PROVIDER_KEY = "kernels.provider"
MICROBATCH_KEY, GLOBAL_KEY = "batch.microbatch_sequences", "batch.global_sequences"
WHOLE_BACKWARD = ("naive", "gpipe", "1f1b")
"""Schedules of one rank whose backward is one action."""


def _replicas(view: View) -> int:
    return view.integer(REPLICAS_KEY)


def threads_are_one_process(view: View) -> Iterator[RuleViolation]:
    """Find a mesh of several ranks beside replicas on threads."""
    replicas, mesh = _replicas(view), mesh_of(view)
    if replicas == 1 or mesh.world_size == 1:
        return
    split = [key for key in MESH_KEYS if view.integer(key) > 1]
    yield RuleViolation(
        rule=THREADS_ARE_ONE_PROCESS,
        key=REPLICAS_KEY,
        message=f"{REPLICAS_KEY} = {replicas} is one process, but {mesh_product_text(mesh)} ranks",
        set_by=(REPLICAS_KEY, *split),
        suggestions=({REPLICAS_KEY: 1}, dict.fromkeys(split, 1)),
    )


def threads_divide_microbatch(view: View) -> Iterator[RuleViolation]:
    """Find a microbatch that replicas cannot share evenly."""
    replicas, size = _replicas(view), view.integer(MICROBATCH_KEY)
    if size % replicas == 0:
        return
    multiples = (n for n in range(replicas, view.integer(GLOBAL_KEY) + 1, replicas))
    yield RuleViolation(
        rule=THREADS_DIVIDE_MICROBATCH,
        key=REPLICAS_KEY,
        message=f"{REPLICAS_KEY} = {replicas}, but a microbatch has {size} sequences "
        f"({size} % {replicas} = {size % replicas})",
        set_by=(REPLICAS_KEY, MICROBATCH_KEY),
        suggestions=(
            setting_changes(REPLICAS_KEY, near_divisors(size, replicas)),
            setting_changes(MICROBATCH_KEY, by_distance(multiples, size)),
        ),
    )


def threads_fit_node(view: View) -> Iterator[RuleViolation]:
    """Find more replicas than a node has devices."""
    replicas, cluster = _replicas(view), cluster_of(view)
    if replicas <= cluster.devices_per_node:
        return
    yield RuleViolation(
        rule=THREADS_FIT_NODE,
        key=REPLICAS_KEY,
        message=f"{REPLICAS_KEY} = {replicas}, but a node of {cluster.name} has "
        f"{cluster.devices_per_node} devices",
        set_by=(REPLICAS_KEY, "cluster.preset"),
        suggestions=(setting_changes(REPLICAS_KEY, range(cluster.devices_per_node, 0, -1)),),
    )


def _refused(key: str, allowed: object, because: str) -> ViolationFinder:
    """Return what finds a setting that has another value than the one that threads take."""

    def find(view: View) -> Iterator[RuleViolation]:
        value = view.value(key)
        if _replicas(view) > 1 and value != allowed:
            yield _violation(view, key, f"{key} = {toml_text(value)} {because}", {key: allowed})

    return find


def _violation(view: View, key: str, message: str, *ways: dict[str, object]) -> RuleViolation:
    return RuleViolation(
        rule=THREADS_SHARE_NOTHING,
        key=key,
        message=f"{message}, but {REPLICAS_KEY} = {_replicas(view)}",
        set_by=(key, REPLICAS_KEY),
        suggestions=(*ways, {REPLICAS_KEY: 1}),
    )


def threads_have_no_experts(view: View) -> Iterator[RuleViolation]:
    """Find experts, which are balanced over the global batch."""
    if _replicas(view) > 1 and has_experts(view):
        message = f"{view.model_name} has experts, which are balanced over the global batch"
        yield _violation(view, "model.experts.num_experts", message)


def threads_run_one_stage(view: View) -> Iterator[RuleViolation]:
    """Find schedules that split backward, and several stages of one rank."""
    if _replicas(view) == 1 or mesh_of(view).world_size > 1:
        return
    name = view.word(SCHEDULE_KEY)
    if name not in WHOLE_BACKWARD:
        message = f"{SCHEDULE_KEY} = {toml_text(name)} orders stages and halves of backward"
        yield _violation(view, SCHEDULE_KEY, message, {SCHEDULE_KEY: "1f1b"})
    elif stages_per_rank(view) > 1:
        message = f"{VIRTUAL_KEY} = {stages_per_rank(view)} cuts the model into stages"
        yield _violation(view, VIRTUAL_KEY, message, {VIRTUAL_KEY: 1})


def threads_compile_nothing(view: View) -> Iterator[RuleViolation]:
    """Find kernels of PyTorch's compiler."""
    if _replicas(view) > 1 and view.word(PROVIDER_KEY) == "compiled":
        message = f'{PROVIDER_KEY} = "compiled" traces in one thread'
        yield _violation(view, PROVIDER_KEY, message, {PROVIDER_KEY: "plain"})


THREAD_FINDERS: tuple[ViolationFinder, ...] = (
    threads_are_one_process,
    threads_divide_microbatch,
    threads_fit_node,
    _refused("zero.stage", 0, "moves optimizer state or parameters off the device"),
    _refused("precision.matmul", "parameters", "packs numbers by what is beside them in a batch"),
    threads_have_no_experts,
    threads_run_one_stage,
    threads_compile_nothing,
)
"""Rules about replicas on threads, of the settings of a run and of a plan alike."""
