"""Lints about messages: how large they are, how often they go, and what hides them."""

from __future__ import annotations

from math import ceil, log2

from echelon.core.axis import SHARD_AXES
from echelon.core.cluster import Link
from echelon.core.plan import Plan
from echelon.core.topology import domain_text, fast_domain
from echelon.planner.guides.memory import memory_of_plan
from echelon.planner.lint_finding import Fault, Lint
from echelon.planner.lint_memory import ROOM

LATENCY_SHARE = 0.5
MIB = 2**20


def _link(plan: Plan, span: int) -> Link | None:
    """Return the link that ranks use which lie on `span` consecutive ones."""
    if not plan.cluster.links:
        return None
    inside = span <= fast_domain(plan.cluster)
    return plan.cluster.links[0 if inside else -1]


def _gathered_again(plan: Plan) -> Fault | None:
    zero, count = plan.layout.zero, plan.num_microbatches
    if zero.stage != 3 or count <= 1 or plan.mesh.degree(*SHARD_AXES) == 1:
        return None
    passes = 2 if zero.reshard_after_forward else 1
    if passes == 1 and plan.mesh.pp == 1:
        return None
    return Fault(
        f"{count} microbatches a step at stage 3: parameters are gathered {passes * count} times, "
        f"{passes * count} psi of all-gathers",
        "larger microbatches, or zero.stage = 2, or zero.reshard_after_forward = never",
    )


def _scattered_again(plan: Plan) -> Fault | None:
    zero, count = plan.layout.zero, plan.num_microbatches
    if zero.stage == 0 or zero.accumulate != "slices" or count <= 1:
        return None
    if plan.mesh.degree(*SHARD_AXES) == 1:
        return None
    return Fault(
        f"gradients are reduced after each of {count} microbatches: {count} psi, not 1",
        "zero.accumulate = whole where memory has room for whole gradients",
    )


def _small_bucket(plan: Plan) -> Fault | None:
    mesh, ranks = plan.mesh, plan.mesh.dp * plan.mesh.cp
    link = _link(plan, ranks * mesh.tp)
    if ranks == 1 or link is None or link.latency_s == 0:
        return None
    size = plan.layout.zero.bucket_bytes
    share = (ranks - 1) / ranks / link.bandwidth
    waited = min(ranks - 1, 2 * ceil(log2(ranks))) * link.latency_s
    if waited <= LATENCY_SHARE * size * share:
        return None
    return Fault(
        f"a bucket of {size / MIB:,.3g} MiB takes {size * share * 1e6:,.0f} us to move over "
        f"{ranks} ranks of {link.name}, beside {waited * 1e6:,.0f} us of latency",
        f"zero.bucket_bytes of {ceil(waited / share / LATENCY_SHARE / MIB):,} MiB or more",
    )


def _not_ahead(plan: Plan) -> Fault | None:
    zero = plan.layout.zero
    if zero.stage != 3 or zero.prefetch > 0 or plan.mesh.degree(*SHARD_AXES) == 1:
        return None
    return Fault(
        "zero.prefetch = 0: each unit is waited for before it is used",
        "zero.prefetch = 1",
    )


def _no_sequence_parallel(plan: Plan) -> Fault | None:
    tp = plan.mesh.tp
    if tp == 1 or plan.layout.sequence_parallel:
        return None
    kept = 10 * plan.local_tokens * plan.model.hidden * (tp - 1) / tp / 1e9
    return Fault(
        f"norms and residuals are whole on each of {tp} tensor ranks: about {kept:.2f} GB a block "
        "more in 16 bits, for the same bytes sent",
        "mesh.sequence_parallel = true",
    )


def _shards_over_nodes(plan: Plan) -> Fault | None:
    mesh, node = plan.mesh, fast_domain(plan.cluster)
    inner = mesh.cp * mesh.tp
    if plan.layout.zero.stage != 3 or mesh.dp_shard * inner <= node or node % inner:
        return None
    shards = node // inner
    ep = min(plan.mesh.ep, node)
    held = memory_of_plan(plan, dp_shard=shards, dp_replicate=mesh.dp / shards, ep=ep)
    if shards < 2 or mesh.dp_shard % shards or held.total > ROOM * plan.cluster.device.memory_bytes:
        return None
    where = domain_text(plan.cluster)
    return Fault(
        f"parameters are gathered from {mesh.dp_shard} shards over {where}; shards "
        f"over one would hold {held.total / 1e9:,.1f} GB",
        f"mesh.dp_shard = {shards}, dp_replicate = {mesh.dp // shards}: hybrid sharding",
    )


TRAFFIC = (
    Lint(
        id="zero-3-many-microbatches",
        severity="time",
        why="Stage 3 gathers parameters for forward and for backward of every microbatch: 3 psi "
        "is the figure of a single one.",
        source="Rajbhandari et al., 2020, section 7.2.2; guide 003",
        check=_gathered_again,
    ),
    Lint(
        id="gradients-reduced-each-microbatch",
        severity="time",
        why="Gradients in slices are reduced at once, which saves memory and sends them often.",
        source="Rajbhandari et al., 2020, section 5.2",
        check=_scattered_again,
    ),
    Lint(
        id="bucket-too-small",
        severity="time",
        why="Latency is paid for each message, whatever it carries: N - 1 steps of a ring, or 2 "
        "log2 N of a tree.",
        source="Patarasuk and Yuan, 2009; guide 002, key behaviours",
        check=_small_bucket,
    ),
    Lint(
        id="no-prefetch",
        severity="time",
        why="A unit that is gathered while the one before it computes is not waited for.",
        source="Zhao et al., PyTorch FSDP, 2023, section 3.3; guide 004, table 4",
        check=_not_ahead,
    ),
    Lint(
        id="no-sequence-parallel",
        severity="memory",
        why="A reduce-scatter and an all-gather send what an all-reduce sends, and leave norms "
        "and residuals cut.",
        source="Korthikanti et al., 2022, section 4.2",
        check=_no_sequence_parallel,
    ),
    Lint(
        id="shards-over-nodes",
        severity="time",
        why="Parameters are gathered twice a microbatch, gradients of replicas added once a step.",
        source="Zhao et al., PyTorch FSDP, 2023, section 3.2.2",
        check=_shards_over_nodes,
    ),
)
