"""Lints about messages: how large they are, how often they go, and what hides them."""

from __future__ import annotations

from dataclasses import replace
from math import ceil, log2

from echelon.config.automatic import default_tensor_overlap
from echelon.core.axis import SHARD_AXES
from echelon.core.cluster import Link, domain_text, fast_domain
from echelon.core.plan import Plan
from echelon.cost.seconds.from_plan import cost_inputs_from_plan
from echelon.cost.seconds.numbers import first_number
from echelon.cost.seconds.step import step_seconds
from echelon.planner.lint.finding import LintMatch, lint_of
from echelon.planner.lint.memory import ROOM
from echelon.planner.predict.split_memory import memory_of_plan

_LATENCY_SHARE = 0.5  # of the seconds of a bucket
_WORTH = 0.02  # of a step, that a change saves at least
MIB = 2**20  # bytes


def _link(plan: Plan, span: int) -> Link | None:
    """Return the link that ranks use which lie on `span` consecutive ones."""
    if not plan.cluster.links:
        return None
    inside = span <= fast_domain(plan.cluster)
    return plan.cluster.links[0 if inside else -1]


@lint_of(
    "zero-3-many-microbatches", "time", "Rajbhandari et al., 2020, section 7.2.2; llm-training"
)
def _gathered_again(plan: Plan) -> LintMatch | None:
    """Stage 3 gathers parameters for forward and for backward of every microbatch: 3 psi is the
    figure of a single one.
    """
    zero, count = plan.layout.zero, plan.num_microbatches
    if zero.stage != 3 or count <= 1 or plan.mesh.degree(*SHARD_AXES) == 1:
        return None
    passes = 2 if zero.reshard_after_forward else 1
    if passes == 1 and plan.mesh.pp == 1:
        return None
    return (
        f"{count} microbatches a step at stage 3: parameters are gathered {passes * count} times, "
        f"{passes * count} psi of all-gathers",
        "larger microbatches, or zero.stage = 2, or zero.reshard_after_forward = never",
    )


@lint_of("gradients-reduced-each-microbatch", "time", "Rajbhandari et al., 2020, section 5.2")
def _scattered_again(plan: Plan) -> LintMatch | None:
    """Gradients in slices are reduced at once, which saves memory and sends them often."""
    zero, count = plan.layout.zero, plan.num_microbatches
    if zero.stage == 0 or zero.accumulate != "slices" or count <= 1:
        return None
    if plan.mesh.degree(*SHARD_AXES) == 1:
        return None
    return (
        f"gradients are reduced after each of {count} microbatches: {count} psi, not 1",
        "zero.accumulate = whole where memory has room for whole gradients",
    )


@lint_of("bucket-too-small", "time", "Patarasuk and Yuan, 2009; distributed, key behaviours")
def _small_bucket(plan: Plan) -> LintMatch | None:
    """Latency is paid for each message, whatever it carries: N - 1 steps of a ring, or 2 log2 N of
    a tree.
    """
    mesh, ranks = plan.mesh, plan.mesh.dp * plan.mesh.cp
    link = _link(plan, ranks * mesh.tp)
    if ranks == 1 or link is None or link.latency_s == 0:
        return None
    size = plan.layout.zero.bucket_bytes
    share = (ranks - 1) / ranks / link.bandwidth
    waited = min(ranks - 1, 2 * ceil(log2(ranks))) * link.latency_s
    if waited <= _LATENCY_SHARE * size * share:
        return None
    return (
        f"a bucket of {size / MIB:,.3g} MiB takes {size * share * 1e6:,.0f} us to move over "
        f"{ranks} ranks of {link.name}, beside {waited * 1e6:,.0f} us of latency",
        f"zero.bucket_bytes of {ceil(waited / share / _LATENCY_SHARE / MIB):,} MiB or more",
    )


@lint_of("no-prefetch", "time", "Zhao et al., PyTorch FSDP, 2023, section 3.3; scaling, table 4")
def _not_ahead(plan: Plan) -> LintMatch | None:
    """A unit that is gathered while the one before it computes is not waited for."""
    zero = plan.layout.zero
    if zero.stage != 3 or zero.prefetch > 0 or plan.mesh.degree(*SHARD_AXES) == 1:
        return None
    return ("zero.prefetch = 0: each unit is waited for before it is used", "zero.prefetch = 1")


@lint_of("no-sequence-parallel", "memory", "Korthikanti et al., 2022, section 4.2")
def _no_sequence_parallel(plan: Plan) -> LintMatch | None:
    """A reduce-scatter and an all-gather send what an all-reduce sends, and leave norms and
    residuals cut.
    """
    tp = plan.mesh.tp
    if tp == 1 or plan.layout.sequence_parallel:
        return None
    kept = 10 * plan.local_tokens * plan.model.hidden * (tp - 1) / tp / 1e9
    return (
        f"norms and residuals are whole on each of {tp} tensor ranks: about {kept:.2f} GB a block "
        "more in 16 bits, for the same bytes sent",
        "mesh.sequence_parallel = true",
    )


@lint_of("products-wait-for-rows", "time", "Wang et al., 2023, section 3")
def _products_wait(plan: Plan) -> LintMatch | None:
    """Rows that travel in chunks hide behind the product of the chunk before, where the products
    are large enough: the estimate says whether they are.
    """
    layout, tp = plan.layout, plan.mesh.tp
    if tp == 1 or not layout.sequence_parallel or layout.tp_overlap != "none":
        return None
    kind, _ = default_tensor_overlap(plan.cluster, tp)
    now = cost_inputs_from_plan(plan)
    chunked = replace(now, layout=replace(now.layout, tp_overlap=1.0))
    takes, instead = (first_number(step_seconds(work).total) for work in (now, chunked))
    if kind == "none" or instead > (1.0 - _WORTH) * takes:
        return None
    return (
        f"products over {tp} tensor ranks wait for their rows: a step of {takes:,.3g} s would take "
        f"{instead:,.3g} s in chunks, each beside a message",
        f'mesh.tp_overlap = "{kind}"',
    )


@lint_of("shards-over-nodes", "time", "Zhao et al., PyTorch FSDP, 2023, section 3.2.2")
def _shards_over_nodes(plan: Plan) -> LintMatch | None:
    """Parameters are gathered twice a microbatch, gradients of replicas added once a step."""
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
    return (
        f"parameters are gathered from {mesh.dp_shard} shards over {where}; shards "
        f"over one would hold {held.total / 1e9:,.1f} GB",
        f"mesh.dp_shard = {shards}, dp_replicate = {mesh.dp // shards}: hybrid sharding",
    )


TRAFFIC = (
    _gathered_again,
    _scattered_again,
    _small_bucket,
    _not_ahead,
    _no_sequence_parallel,
    _products_wait,
    _shards_over_nodes,
)
