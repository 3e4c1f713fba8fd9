# SPDX-License-Identifier: Apache-2.0
"""What parameter servers need of the mesh, of the optimizer and of the model."""

from __future__ import annotations

from collections.abc import Iterator

from echelon.config.cluster.settings import cluster_of
from echelon.config.derived.experts import has_experts
from echelon.config.derived.replicas import COUNT_KEY, DAMPING_KEY, STALENESS_KEY, UPDATES_KEY
from echelon.config.rules.violations import (
    RuleViolation,
    setting_without_effect,
    settings_excluding,
)
from echelon.config.view import View, mesh_of
from echelon.core.axis import Axis
from echelon.core.choices.optimizers import OPTIMIZERS
from echelon.core.rulebook.servers import (
    ASYNCHRONOUS_SERVERS_NEED_GLOO,
    ASYNCHRONOUS_SERVERS_SCALE_NO_LOSS,
    SERVERS_HOLD_DENSE_MODELS,
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
    if view.word(UPDATES_KEY) == "asynchronous" and view.word(SCALING_KEY) != "none":
        ways = {SCALING_KEY: "none"}, {UPDATES_KEY: "synchronous"}
        yield settings_excluding(
            view, ASYNCHRONOUS_SERVERS_SCALE_NO_LOSS, SCALING_KEY, UPDATES_KEY, *ways
        )


def server_settings_without_effect(view: View) -> Iterator[RuleViolation]:
    """Yield what says how servers update where there are none, or where they wait for all."""
    if not view.integer(COUNT_KEY):
        because = f"{COUNT_KEY} = 0: no server updates anything"
        for key in (UPDATES_KEY, STALENESS_KEY, DAMPING_KEY):
            yield from setting_without_effect(view, key, because, {COUNT_KEY: 1})
    elif view.word(UPDATES_KEY) == "synchronous":
        because = f'{UPDATES_KEY} = "synchronous": no gradient is stale'
        for key in (STALENESS_KEY, DAMPING_KEY):
            yield from setting_without_effect(view, key, because, {UPDATES_KEY: "asynchronous"})
    elif not view.integer(STALENESS_KEY):
        because = f"with {STALENESS_KEY} = 0 no gradient is stale"
        yield from setting_without_effect(view, DAMPING_KEY, because, {STALENESS_KEY: 1})


SERVER_PLAN_FINDERS = (
    servers_split_samples,
    servers_update_elements,
    servers_hold_dense_models,
    asynchronous_servers_need_gloo,
    asynchronous_servers_scale_no_loss,
)
"""Rules about parameter servers without which ranks could not run a plan."""

SERVER_FINDERS = (*SERVER_PLAN_FINDERS, server_settings_without_effect)
"""Rules about parameter servers."""
