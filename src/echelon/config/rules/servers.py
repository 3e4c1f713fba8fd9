# SPDX-License-Identifier: Apache-2.0
"""What parameter servers need of the mesh, of the optimizer and of the model."""

from __future__ import annotations

from collections.abc import Iterator

from echelon.config.cluster.settings import cluster_of
from echelon.config.derived.experts import has_experts
from echelon.config.derived.servers import (
    COUNT_KEY,
    DAMPING_KEY,
    MIN_WORKERS_KEY,
    RESTARTS_KEY,
    STALENESS_KEY,
    UPDATES_KEY,
    min_workers_of,
)
from echelon.config.rules.violations import RuleViolation, setting_without_effect
from echelon.config.view import View, mesh_of
from echelon.core.axis import Axis
from echelon.core.choices.optimizers import OPTIMIZERS
from echelon.core.rulebook.servers import (
    ASYNCHRONOUS_SERVERS_NEED_GLOO,
    ASYNCHRONOUS_SERVERS_SCALE_NO_LOSS,
    LOST_WORKERS_LEAVE_NO_VALIDATION,
    LOST_WORKERS_NEED_OWN_UPDATES,
    SERVERS_HOLD_DENSE_MODELS,
    SERVERS_MIN_WORKERS,
    SERVERS_SPLIT_SAMPLES,
    SERVERS_UPDATE_ELEMENTS,
)

SCALING_KEY = "precision.loss_scaling"
NO_SERVERS = {COUNT_KEY: 0}
_CUTS = (Axis.PP, Axis.DP_SHARD, Axis.CP, Axis.TP, Axis.EP)


def servers_split_samples(view: View) -> Iterator[RuleViolation]:
    """Check that workers are whole replicas."""
    count, mesh, stage = view.integer(COUNT_KEY), mesh_of(view), view.integer("zero.stage")
    cuts = [axis for axis in _CUTS if mesh.degree(axis) > 1]
    if not count or (not cuts and not stage):
        return
    texts = [f"mesh.{axis.value} = {mesh.degree(axis)}" for axis in cuts]
    texts += [f"zero.stage = {stage}"] * (stage > 0)
    whole: dict[str, object] = {f"mesh.{axis.value}": 1 for axis in cuts}
    if mesh.dp_shard > 1:
        whole["mesh.dp_replicate"] = mesh.dp
    if stage:
        whole["zero.stage"] = 0
    yield RuleViolation(
        rule=SERVERS_SPLIT_SAMPLES,
        key=COUNT_KEY,
        message=f"{COUNT_KEY} = {count}, and {' and '.join(texts)} "
        f"cut{'s' * (len(texts) == 1)} the model of a worker",
        set_by=(COUNT_KEY, *(f"mesh.{axis.value}" for axis in cuts), *["zero.stage"] * (stage > 0)),
        suggestions=(whole, NO_SERVERS),
    )


def servers_update_elements(view: View) -> Iterator[RuleViolation]:
    """Check that the optimizer updates element by element."""
    kind = view.word("optimizer.kind")
    if view.integer(COUNT_KEY) and OPTIMIZERS[kind].needs_whole_matrices:
        yield RuleViolation(
            rule=SERVERS_UPDATE_ELEMENTS,
            key="optimizer.kind",
            message=f'optimizer.kind = "{kind}" updates whole matrices, and {COUNT_KEY} = '
            f"{view.integer(COUNT_KEY)} holds ranges of elements",
            set_by=("optimizer.kind", COUNT_KEY),
            suggestions=(
                [
                    {"optimizer.kind": name}
                    for name, record in OPTIMIZERS.items()
                    if not record.needs_whole_matrices
                ],
                NO_SERVERS,
            ),
        )


def servers_hold_dense_models(view: View) -> Iterator[RuleViolation]:
    """Check that there is no state beside parameters: of routers, or of scales in 8 bits."""
    count = view.integer(COUNT_KEY)
    if not count:
        return
    if has_experts(view):
        yield RuleViolation(
            rule=SERVERS_HOLD_DENSE_MODELS,
            key=COUNT_KEY,
            message=f"{COUNT_KEY} = {count}, and {view.model_name} has experts, whose routers have "
            "state of their own",
            suggestions=(NO_SERVERS,),
        )
    by_tensor = view.word("precision.fp8_scales") == "tensor"
    if view.word("precision.matmul") == "fp8" and by_tensor:
        yield RuleViolation(
            rule=SERVERS_HOLD_DENSE_MODELS,
            key=COUNT_KEY,
            message=f'{COUNT_KEY} = {count}, and precision.fp8_scales = "tensor" keeps the largest '
            "numbers of steps before",
            set_by=(COUNT_KEY, "precision.fp8_scales"),
            suggestions=({"precision.fp8_scales": "block"}, NO_SERVERS),
        )


def asynchronous_servers_need_gloo(view: View) -> Iterator[RuleViolation]:
    """Check that messages are of the host where servers wait for each worker by itself."""
    cluster = cluster_of(view)
    if view.word(UPDATES_KEY) == "asynchronous" and cluster.backend == "nccl":
        yield RuleViolation(
            rule=ASYNCHRONOUS_SERVERS_NEED_GLOO,
            key=UPDATES_KEY,
            message=f'{UPDATES_KEY} = "asynchronous", but {cluster.name} communicates over NCCL',
            set_by=(UPDATES_KEY, "cluster.preset"),
            suggestions=({UPDATES_KEY: "synchronous"}, 'cluster.preset = "laptop"'),
        )


def asynchronous_servers_scale_no_loss(view: View) -> Iterator[RuleViolation]:
    """Check that no scale follows what all ranks agree on."""
    scaling = view.word(SCALING_KEY)
    if view.word(UPDATES_KEY) == "asynchronous" and scaling != "none":
        yield RuleViolation(
            rule=ASYNCHRONOUS_SERVERS_SCALE_NO_LOSS,
            key=SCALING_KEY,
            message=f'{SCALING_KEY} = "{scaling}" with {UPDATES_KEY} = "asynchronous"',
            set_by=(SCALING_KEY, UPDATES_KEY),
            suggestions=({SCALING_KEY: "none"}, {UPDATES_KEY: "synchronous"}),
        )


def server_settings_without_effect(view: View) -> Iterator[RuleViolation]:
    """Yield what says how servers update where there are none, or where they wait for all."""
    if not view.integer(COUNT_KEY):
        because = f"{COUNT_KEY} = 0: no server updates anything"
        for key in (UPDATES_KEY, STALENESS_KEY, DAMPING_KEY, MIN_WORKERS_KEY, RESTARTS_KEY):
            yield from setting_without_effect(view, key, because, {COUNT_KEY: 1})
    elif view.word(UPDATES_KEY) == "synchronous":
        because = f'{UPDATES_KEY} = "synchronous": no gradient is stale'
        for key in (STALENESS_KEY, DAMPING_KEY):
            yield from setting_without_effect(view, key, because, {UPDATES_KEY: "asynchronous"})
    elif not view.integer(STALENESS_KEY):
        because = f"with {STALENESS_KEY} = 0 no gradient is stale"
        yield from setting_without_effect(view, DAMPING_KEY, because, {STALENESS_KEY: 1})
    if min_workers_of(view) != "all":
        because = f"with {MIN_WORKERS_KEY} calls of ranks that come and go are not compared"
        yield from setting_without_effect(
            view, "train.desync_after_s", because, {MIN_WORKERS_KEY: "all"}
        )
    elif view.integer(COUNT_KEY):
        because = f"with {MIN_WORKERS_KEY} of all workers the run ends with the first that is lost"
        yield from setting_without_effect(view, RESTARTS_KEY, because, {MIN_WORKERS_KEY: 1})


def min_workers_are_there(view: View) -> Iterator[RuleViolation]:
    """Check that a run starts with as many workers as it needs to go on."""
    least, workers = min_workers_of(view), mesh_of(view).num_workers
    if view.integer(COUNT_KEY) and least != "all" and least > workers:
        yield RuleViolation(
            rule=SERVERS_MIN_WORKERS,
            key=MIN_WORKERS_KEY,
            message=f"{MIN_WORKERS_KEY} = {least}, and there are {workers} workers "
            f"(mesh.dp_replicate = {workers})",
            set_by=(MIN_WORKERS_KEY, "mesh.dp_replicate"),
            suggestions=(
                {MIN_WORKERS_KEY: "all"},
                *([{MIN_WORKERS_KEY: workers - 1}] if workers > 1 else []),
            ),
        )


def lost_workers_need_own_updates(view: View) -> Iterator[RuleViolation]:
    """Check that no update waits for a worker that may be lost."""
    least, workers = min_workers_of(view), mesh_of(view).num_workers
    if not view.integer(COUNT_KEY) or least == "all" or least > workers:
        return
    synchronous = view.word(UPDATES_KEY) == "synchronous"
    if synchronous or not view.integer(STALENESS_KEY):
        key = UPDATES_KEY if synchronous else STALENESS_KEY
        value = '"synchronous"' if synchronous else "0"
        yield RuleViolation(
            rule=LOST_WORKERS_NEED_OWN_UPDATES,
            key=MIN_WORKERS_KEY,
            message=f"{MIN_WORKERS_KEY} = {least} of {workers} workers, but with {key} = {value} "
            "each update waits for all of them",
            set_by=(MIN_WORKERS_KEY, key),
            suggestions=(
                {key: "asynchronous" if synchronous else 1},
                {MIN_WORKERS_KEY: "all"},
            ),
        )


def lost_workers_leave_no_validation(view: View) -> Iterator[RuleViolation]:
    """Check that no validation waits for a worker that may be lost."""
    key = "train.validate_every"
    if min_workers_of(view) != "all" and view.value(key) != "never":
        yield RuleViolation(
            rule=LOST_WORKERS_LEAVE_NO_VALIDATION,
            key=key,
            message=f"{key} = {view.value(key)} with {MIN_WORKERS_KEY} = {min_workers_of(view)}",
            set_by=(key, MIN_WORKERS_KEY),
            suggestions=({key: "never"}, {MIN_WORKERS_KEY: "all"}),
        )


SERVER_PLAN_FINDERS = (
    servers_split_samples,
    servers_update_elements,
    servers_hold_dense_models,
    asynchronous_servers_need_gloo,
    asynchronous_servers_scale_no_loss,
    min_workers_are_there,
    lost_workers_need_own_updates,
)
"""Rules about parameter servers without which ranks could not run a plan."""

SERVER_FINDERS = (
    *SERVER_PLAN_FINDERS,
    lost_workers_leave_no_validation,
    server_settings_without_effect,
)
"""Rules about parameter servers."""
