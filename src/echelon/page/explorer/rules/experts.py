# SPDX-License-Identifier: Apache-2.0
"""What experts need of the ranks that share them out, and of how rows travel."""

from __future__ import annotations

from collections.abc import Iterator

from echelon.core.model_shape import Experts, ModelShape
from echelon.core.rulebook.experts import (
    CHUNKS_DIVIDE_TOKENS,
    EP_DIVIDES_EXPERTS,
    EP_DIVIDES_RANKS,
    EXPERT_TP_DIVIDES_FFN,
    EXPERT_TP_IS_ONE_OR_TP,
    TP_DIVIDES_TOKENS,
    TWO_HOP_NEEDS_NODES,
)
from echelon.page.explorer.controls import Controls, Record
from echelon.page.explorer.rules.broken import Broken, rest_text, without_effect
from echelon.page.explorer.rules.zero import even_on_nodes, starts_of_groups

FLAT = "flat"


def broken_by_experts(controls: Controls, shape: ModelShape, cluster: Record) -> Iterator[Broken]:
    """Yield what experts break, or what is said of experts that there are not."""
    if shape.experts is None:
        for idle, what in (
            (controls.ep > 1, f"ep = {controls.ep}"),
            (controls.expert_tp > 1, f"experts in {controls.expert_tp} pieces"),
            (controls.dispatch != FLAT, controls.dispatch),
            (controls.chunks > 1, f"{controls.chunks} chunks"),
        ):
            yield from without_effect(idle, f"{what}, but the model has no experts")
        return
    yield from _shared_out(controls, shape.experts)
    yield from _rows(controls, cluster)


def _fold(controls: Controls) -> int:
    """Return among how many ranks of a replica experts are shared out."""
    return controls.dp_shard * controls.cp * (controls.tp if controls.expert_tp == 1 else 1)


def _shared_out(controls: Controls, experts: Experts) -> Iterator[Broken]:
    ep, tp, pieces = controls.ep, controls.tp, controls.expert_tp
    count, ranks = experts.num_experts, _fold(controls)
    if count % ep:
        yield Broken(
            rule=EP_DIVIDES_EXPERTS.id,
            message=f"ep = {ep}, but the model has {count} experts ({rest_text(count, ep)})",
        )
    if ranks % ep:
        names = "dp_shard x cp x tp" if pieces == 1 else "dp_shard x cp"
        yield Broken(
            rule=EP_DIVIDES_RANKS.id,
            message=f"ep = {ep} does not divide {names} = {ranks}, the ranks that share "
            f"out experts ({rest_text(ranks, ep)})",
        )
    if pieces not in (1, tp):
        yield Broken(
            rule=EXPERT_TP_IS_ONE_OR_TP.id,
            message=f"experts in {pieces} pieces, but tp = {tp}: an expert is whole, or each "
            "tensor rank has a piece of it",
        )
    elif experts.ffn % pieces:
        yield Broken(
            rule=EXPERT_TP_DIVIDES_FFN.id,
            message=f"experts in {pieces} pieces, but they have ffn = {experts.ffn} "
            f"({rest_text(experts.ffn, pieces)})",
        )
    tokens = controls.microbatch * (controls.length // controls.cp)
    if tokens % tp and not controls.sequence_parallel:
        yield Broken(
            rule=TP_DIVIDES_TOKENS.id,
            message=f"tp = {tp}, but a microbatch has {tokens} tokens on a rank "
            f"({rest_text(tokens, tp)})",
        )


def _rows(controls: Controls, cluster: Record) -> Iterator[Broken]:
    ep, tp, chunks = controls.ep, controls.tp, controls.chunks
    if controls.dispatch != FLAT and _fold(controls) % ep == 0:
        node = cluster["devices_per_node"]
        if not _hops_twice(controls, node):
            yield Broken(
                rule=TWO_HOP_NEEDS_NODES.id,
                message=f"rows in two hops, but the {ep} ranks that share out experts are not "
                f"several, and as many, on each of several nodes of {node}",
            )
    if ep == 1:
        yield from without_effect(chunks > 1, f"{chunks} chunks, but rows do not travel: ep = 1")
        return
    tokens = controls.microbatch * (controls.length // controls.cp)
    parts = tp if controls.expert_tp == 1 else 1
    if tokens % parts == 0 and tokens // parts % chunks:
        yield Broken(
            rule=CHUNKS_DIVIDE_TOKENS.id,
            message=f"{chunks} chunks, but a rank sends {tokens // parts} tokens of a microbatch "
            f"to experts ({rest_text(tokens // parts, chunks)})",
        )


def _hops_twice(controls: Controls, node: int) -> bool:
    """Return whether each group of expert ranks has several on each of several nodes."""
    ep, stride = controls.ep, 1 if controls.expert_tp == 1 else controls.tp
    groups = controls.workers // (ep * stride)
    for start in starts_of_groups(groups, ep * stride, stride, node):
        held = even_on_nodes(start, stride, ep, node)
        if held <= 1 or held == ep:
            return False
    return True
