# SPDX-License-Identifier: Apache-2.0
"""Lints about the place of ranks and stages: groups off the fast links, idle devices, bubbles.

Ranks of one node are consecutive, tensor ranks innermost (`core/mesh.py`), so a group of n ranks
one next to the other stays on the fast links of d devices where n divides d. Those are the devices
of a node, or of a rack that is wired as one (`core/cluster.py`).
"""

from __future__ import annotations

from dataclasses import replace

from echelon.core.cluster import Link, domain_text, fast_domain
from echelon.core.plan import Plan
from echelon.core.units import GB
from echelon.cost.seconds.unit_times import stage_seconds, unit_times_from_formulas
from echelon.layout.expert_load import most_nodes, num_nodes
from echelon.planner.lint.finding import LintMatch, lint_of
from echelon.schedule.build import PLAIN_SCHEDULE, SCHEDULES, builder_of, schedule_problems

_COMBINED = 2
"""From so many axes beside data on, which of them pays is a question of measured seconds."""


def _crosses(plan: Plan, span: int) -> bool:
    """Return whether groups of `span` consecutive ranks use links beyond the fast ones."""
    domain = fast_domain(plan.cluster)
    return span > 1 and plan.mesh.world_size > domain and domain % span != 0


def _links(plan: Plan) -> tuple[Link, Link]:
    cluster = plan.cluster
    domain = fast_domain(cluster)
    inside = next((link for link in cluster.links if link.degree >= domain), cluster.links[0])
    return inside, cluster.links[-1]


def _slower(plan: Plan) -> str:
    inside, between = _links(plan)
    return (
        f"{between.name} has {between.bandwidth / GB:,.0f} GB/s one way, {inside.name} "
        f"{inside.bandwidth / GB:,.0f}: {inside.bandwidth / between.bandwidth:.0f}x"
    )


@lint_of(
    "tp-across-nodes",
    "time",
    "Narayanan et al., 2021, takeaway 1; distributed, llm-training, scaling",
)
def _tensor(plan: Plan) -> LintMatch | None:
    """Tensor ranks send activations of every block, forward and backward, and wait for them: only
    the fastest links carry that.
    """
    tp, domain = plan.mesh.tp, fast_domain(plan.cluster)
    if not _crosses(plan, tp):
        return None
    return (
        f"tp = {tp} on {domain_text(plan.cluster)}: {_slower(plan)}",
        f"mesh.tp of at most {domain} that divides it; pipeline or data ranks over the others",
    )


@lint_of("pp-inside-tp-outside", "time", "Narayanan et al., 2021, section 3.2")
def _pipeline_inside(plan: Plan) -> LintMatch | None:
    """Stages send one activation a microbatch, tensor ranks several a block: of the two, stages
    belong on the slower links.
    """
    mesh, domain = plan.mesh, fast_domain(plan.cluster)
    stride = mesh.world_size // mesh.pp
    if mesh.pp == 1 or stride >= domain or not _crosses(plan, mesh.tp):
        return None
    return (
        f"pipeline neighbours are {stride} ranks apart, within {domain_text(plan.cluster)}; tensor "
        f"ranks (tp = {mesh.tp}) are on several",
        "change places: tensor ranks on the fast links, stages over the others",
    )


@lint_of("context-all-to-all-across-nodes", "time", "Fang and Zhao, USP, 2024, section 3")
def _context(plan: Plan) -> LintMatch | None:
    """An exchange of heads or of all keys is waited for; a ring sends the next block while it
    computes this one.
    """
    mesh, domain = plan.mesh, fast_domain(plan.cluster)
    span = mesh.cp * mesh.tp
    if mesh.cp == 1 or span <= domain or not _crosses(plan, span):
        return None
    record = plan.layout.context.record
    if record.exchange != "all" and not record.gathers_keys:
        return None
    return (
        f"cp {mesh.cp} x tp {mesh.tp} = {span} ranks exchange all heads or keys at once over "
        f"{domain_text(plan.cluster)}",
        "context.kind = ulysses-ring with ulysses on the fast links, or ring",
    )


@lint_of("experts-across-nodes", "time", "DeepSeek-V3, 2024, section 3.2.2; llm-training")
def _experts(plan: Plan) -> LintMatch | None:
    """Tokens travel to their experts and back in every block, one copy for each expert."""
    experts = plan.model.experts
    domain = fast_domain(plan.cluster)
    if experts is None or plan.mesh.ep == 1 or plan.mesh.world_size <= domain:
        return None
    one = replace(plan.cluster, devices_per_node=domain, nodes=plan.cluster.num_devices // domain)
    places = num_nodes(replace(plan, cluster=one))
    if places == 1 or plan.layout.experts.dispatch == "two-hop":
        return None
    reach = most_nodes(experts, places)
    whole = domain == plan.cluster.devices_per_node
    hops = ", or experts.dispatch = two-hop: one crossing a node" * whole
    return (
        f"ep = {plan.mesh.ep} spans {places} {domain_text(plan.cluster)}, a token goes to as many "
        f"as {reach}, and each copy of it crosses: {_slower(plan)}",
        f"mesh.ep of at most {domain}{hops}",
    )


@lint_of("part-of-a-node", "time", "distributed, pitfalls")
def _part_of_node(plan: Plan) -> LintMatch | None:
    """Ranks that do not fill whole nodes share links unevenly, and groups that would stay inside of
    a node cross.
    """
    world, node = plan.mesh.world_size, plan.cluster.devices_per_node
    if world <= node or world % node == 0:
        return None
    return (
        f"{world} ranks on nodes of {node}: the last node has {world % node}",
        f"{world // node * node} or {-(-world // node) * node} ranks",
    )


@lint_of("idle-devices", "time", "distributed, pitfalls")
def _idle_devices(plan: Plan) -> LintMatch | None:
    """The world size is the product of the degrees; devices beyond it are paid and idle."""
    world, devices = plan.mesh.world_size, plan.cluster.num_devices
    if world >= devices:
        return None
    return (
        f"{world} ranks on {devices} devices: {devices - world} do nothing",
        f"a mesh of {devices} ranks, or a smaller cluster",
    )


@lint_of("axes-without-measurement", "time", "distributed, best practices (profile first)")
def _unmeasured(plan: Plan) -> LintMatch | None:
    """Whether compute or communication binds decides which axis pays; constants that are typical
    of a device do not know the links, hosts and kernels of this one.
    """
    degrees = {"tp": plan.mesh.tp, "pp": plan.mesh.pp, "cp": plan.mesh.cp, "ep": plan.mesh.ep}
    axes = [f"{axis} {degree}" for axis, degree in degrees.items() if degree > 1]
    over_nodes = plan.mesh.world_size > fast_domain(plan.cluster)
    if len(axes) < _COMBINED or not over_nodes or plan.cluster.trainer:
        return None
    return (
        f"{' x '.join(axes)} on {plan.mesh.world_size} ranks by constants that are typical of "
        f"{plan.cluster.device.name}: no step was measured on these links",
        "echelon calibrate on one node, or some steps and echelon observe RUN: it says what binds",
    )


MICROBATCHES_A_STAGE = 4  # microbatches
_LARGE_BUBBLE = 0.05  # of the step
_UNEVEN = 1.1  # times the mean stage


def bubble_fraction(plan: Plan) -> float | None:
    """Return the idle share of a step by the closed form; None where there is none."""
    name = plan.layout.pipeline.schedule
    numbers = {
        "num_stages": plan.num_stages,
        "num_ranks": plan.mesh.pp,
        "num_microbatches": plan.num_microbatches,
    }
    if name not in SCHEDULES or schedule_problems(name, **numbers):
        return None
    return builder_of(name, **numbers).bubble_fraction()


@lint_of(
    "microbatches-per-stage",
    "time",
    "distributed, best practices (distributed-26); Narayanan et al., 2021, section 2.2",
)
def _microbatches(plan: Plan) -> LintMatch | None:
    """The bubble is (p - 1)/(m + p - 1) of a step for GPipe and 1F1B: a fifth of it at m = 4 p,
    nearly half at m = p.
    """
    pp, count, bubble = plan.mesh.pp, plan.num_microbatches, bubble_fraction(plan)
    if pp == 1 or count >= MICROBATCHES_A_STAGE * pp or bubble is None or bubble <= _LARGE_BUBBLE:
        return None
    least = MICROBATCHES_A_STAGE * pp
    return (
        f"{count} microbatches for {pp} pipeline ranks: {100 * bubble:.0f} % of a step is bubble",
        f"{least} microbatches: fewer data ranks, smaller microbatches, a larger batch; or "
        "virtual stages, or a zero-bubble schedule",
    )


@lint_of(
    "gpipe-holds-all",
    "memory",
    "Narayanan et al., 2021, section 2.2; distributed (distributed-22, distributed-25)",
)
def _gpipe(plan: Plan) -> LintMatch | None:
    """GPipe frees nothing before the last forward; 1F1B has the same bubble and holds at most p
    microbatches.
    """
    pp, count, name = plan.mesh.pp, plan.num_microbatches, plan.layout.pipeline.schedule
    outdone = SCHEDULES[name].outdone_from(pp) if name in SCHEDULES else None
    if outdone is None or count <= outdone:
        return None
    return (
        f"{name} holds {count} microbatches on each rank, {PLAIN_SCHEDULE} at most {pp}, "
        "and both wait equally",
        f"pipeline.schedule = {PLAIN_SCHEDULE}",
    )


@lint_of("stages-uneven", "time", "distributed, pitfalls (llm-training-34)")
def _stages(plan: Plan) -> LintMatch | None:
    """Every rank waits for the slowest stage in every microbatch; the ends have embedding and head
    beside their blocks.
    """
    if plan.mesh.pp == 1:
        return None
    seconds = stage_seconds(plan.layout.pipeline.stages, unit_times_from_formulas(plan))
    mean = sum(seconds) / len(seconds)
    slowest = max(seconds)
    if slowest <= _UNEVEN * mean:
        return None
    return (
        f"stage {seconds.index(slowest)} takes {slowest / mean:.2f}x the mean stage, and all wait "
        "for it",
        "pipeline.stages = auto (by seconds, embedding and head counted), or fewer stages",
    )


@lint_of("empty-stages", "time", "distributed, pitfalls")
def _virtual(plan: Plan) -> LintMatch | None:
    """A stage without blocks only passes activations on: latency without work."""
    virtual, blocks = plan.layout.pipeline.virtual_stages, plan.model.layers
    empty = sum(not stage for stage in plan.layout.pipeline.stages[1:-1])
    if plan.mesh.pp == 1 or not empty:
        return None
    return (
        f"{blocks} blocks on {plan.num_stages} stages ({virtual} a rank): {empty} hold no block",
        "fewer stages: pipeline.virtual_stages, or mesh.pp",
    )
