# SPDX-License-Identifier: Apache-2.0
"""What ZeRO needs of ranks, of homes for its slices, and of nodes."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

from echelon.core.model_shape import ModelShape
from echelon.core.rulebook.config import NO_EFFECT
from echelon.core.rulebook.zero import (
    OFFLOAD_NEEDS_STAGE,
    REDUCE_NEEDS_NODES,
    SECONDARY_NEEDS_NODES,
    ZERO_SHARES_OUT,
)
from echelon.page.explorer.controls import Controls, Record
from echelon.page.explorer.rules.broken import Broken, without_effect

WHOLE_STAGE = 3
"""The stage that gathers parameters before each use."""


def broken_by_zero(controls: Controls, shape: ModelShape) -> Iterator[Broken]:
    """Yield a stage without ranks, ranks without a stage, and what is of stage 3 alone."""
    stage, shard, cp = controls.zero, controls.dp_shard, controls.cp
    home = controls.parameter_offload if stage == WHOLE_STAGE else controls.optimizer_offload
    if stage > 0 and shard * cp == 1 and home == "none":
        yield Broken(
            rule=ZERO_SHARES_OUT.id,
            message=f"ZeRO {stage} shares out over dp_shard x cp = {shard} x {cp} = 1 rank, and "
            "nothing of it rests on the host",
        )
    # Where experts take more ranks than cp and tp have, dp_shard shares them out.
    inner = cp * (controls.tp if controls.expert_tp == 1 else 1)
    used = shape.experts is not None and inner % controls.ep > 0
    if stage == 0 and shard > 1 and not used:
        yield Broken(
            rule=NO_EFFECT.id,
            message=f"dp_shard = {shard} changes nothing: ZeRO 0 shares nothing out; whole "
            "replicas are dp_replicate",
        )
    below = stage != WHOLE_STAGE
    why = f"parameters are gathered by unit at stage 3, and this is ZeRO {stage}"
    yield from without_effect(below and controls.reshard != "always", f"units are kept: {why}")
    yield from without_effect(below and controls.secondary, f"secondary slices: {why}")


def broken_by_offload(controls: Controls) -> Iterator[Broken]:
    """Yield what rests on the host, but is whole."""
    for home, what, least in (
        (controls.optimizer_offload, "optimizer state", 1),
        (controls.parameter_offload, "parameters", WHOLE_STAGE),
    ):
        if home != "none" and controls.zero < least:
            yield Broken(
                rule=OFFLOAD_NEEDS_STAGE.id,
                message=f"{what} on the host, but ZeRO {controls.zero} keeps all of it whole: "
                f"stage {controls.zero} < {least}",
            )


def broken_by_nodes(controls: Controls, shape: ModelShape, cluster: Record) -> Iterator[Broken]:
    """Yield what is for ranks that share out, several on each of several nodes."""
    stage, node = controls.zero, cluster["devices_per_node"]
    if controls.secondary and stage == WHOLE_STAGE:
        yield from without_effect(
            controls.reshard == "never", "secondary slices: units that are kept are gathered once"
        )
        if not over_nodes(controls, shape, node):
            yield Broken(
                rule=SECONDARY_NEEDS_NODES.id,
                message=f"secondary slices, but {_where(controls, node)}",
            )
    if controls.reduce != "exact":
        if stage == 0:
            yield Broken(
                rule=REDUCE_NEEDS_NODES.id,
                message=f"sums in {controls.reduce}, but ZeRO 0 sums whole gradients: 0 < 1",
            )
        elif not over_nodes(controls, shape, node):
            yield Broken(
                rule=REDUCE_NEEDS_NODES.id,
                message=f"sums in {controls.reduce}, but {_where(controls, node)}",
            )


def _where(controls: Controls, node: int) -> str:
    ranks = controls.dp_shard * controls.cp
    return f"the {ranks} ranks that share out are not several on each of several nodes of {node}"


def over_nodes(controls: Controls, shape: ModelShape, node: int) -> bool:
    """Return whether ranks that share out parameters, or experts, are several on several nodes.

    Where it is not known which ranks share out experts, nothing is said of either.
    """
    tp, ep, fold = controls.tp, controls.ep, controls.dp_shard * controls.cp
    replicas = controls.pp * controls.dp_replicate
    starts = starts_of_groups(replicas, fold * tp, tp, node)
    if ranks_per_node(starts, tp, fold, node) > 1:
        return True
    if shape.experts is None:
        return False
    # Pieces of one expert are on neighbours; ranks with the same experts are further apart.
    cut = tp if controls.expert_tp > 1 else 1
    shared = fold * tp // cut
    if controls.expert_tp not in (1, tp) or shared % ep:
        return True
    starts = starts_of_groups(replicas, fold * tp, cut * ep, node)
    return ranks_per_node(starts, cut * ep, shared // ep, node) > 1


def starts_of_groups(blocks: int, block: int, width: int, node: int) -> list[int]:
    """Return where groups begin that begin at the first `width` ranks of each block of ranks.

    Of those that begin at the same place of a node there is one: degrees may be any numbers.
    """
    few = min(blocks, node // gcd(block, node))
    return [number * block + place for number in range(few) for place in range(min(width, node))]


def ranks_per_node(starts: list[int], stride: int, count: int, node: int) -> int:
    """Return l where each group has l > 1 ranks on each of several nodes of so many; else 1.

    A group is `count` ranks from one of `starts` on, `stride` apart.
    """
    found = 0
    for start in starts:
        held = even_on_nodes(start, stride, count, node)
        if held <= 1 or held == count or (found > 0 and held != found):
            return 1
        found = held
    return found


def even_on_nodes(start: int, stride: int, count: int, node: int) -> int:
    """Return how many ranks of a group each of its nodes holds; 0 where they hold unequally many.

    A group is `count` ranks from `start` on, `stride` apart. How they lie on nodes repeats.
    """
    period = node // gcd(stride, node)
    seen = count if count <= 3 * period else 2 * period + count % period
    even, here, last = 0, 0, start // node
    for place in range(seen):
        at = (start + stride * place) // node
        if at != last:
            if even > 0 and here != even:
                return 0
            even, here, last = here, 0, at
        here = here + 1
    return here if even in (0, here) else 0
