"""What parameter servers need of the mesh, of the optimizer and of the model."""

from __future__ import annotations

from collections.abc import Iterator

from echelon.config.rules.violations import RuleViolation
from echelon.config.settings.experts import has_experts
from echelon.config.view import View, mesh_of
from echelon.core.axis import Axis
from echelon.core.choices.optimizers import OPTIMIZERS
from echelon.core.rulebook.servers import (
    SERVERS_HOLD_DENSE_MODELS,
    SERVERS_SPLIT_SAMPLES,
    SERVERS_UPDATE_ELEMENTS,
)

COUNT_KEY = "servers.count"
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


SERVER_FINDERS = (servers_split_samples, servers_update_elements, servers_hold_dense_models)
"""Rules about parameter servers: without them ranks could not run a plan."""
