# SPDX-License-Identifier: Apache-2.0
"""Rules between mesh, model, batch and devices: even cuts, enough ranks, algorithms of sums."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from math import gcd, log2, prod

from echelon.config.automatic import MODULE_BUCKET_BYTES
from echelon.config.cluster.settings import cluster_of, smallest_cluster
from echelon.config.derived.context import (
    CP_KEY,
    LENGTH_KEY,
    cuts_sequence,
    exchanging_ranks,
    pieces_with_tensor_ranks,
)
from echelon.config.derived.experts import (
    EP_KEY,
    EXPERT_TP_KEY,
    FFN_KEY,
    has_dense_layers,
    has_experts,
    ranks_with_the_same_experts,
    shared_width,
    tokens_of_microbatch,
)
from echelon.config.derived.pipeline import BATCH_KEYS
from echelon.config.derived.replicas import (
    ALGORITHM_KEY,
    COUNT_KEY,
    groups_of_algorithm,
    summing_groups,
)
from echelon.config.rules.violations import (
    RuleViolation,
    Trial,
    ViolationFinder,
    setting_without_effect,
)
from echelon.config.view import View, data_ranks, gradient_ranks, mesh_of
from echelon.core.axis import MESH_AXES
from echelon.core.choices.collective_algorithms import (
    BACKEND,
    COLLECTIVE_ALGORITHMS,
    HIERARCHICAL,
    fits_group,
    members_per_node,
)
from echelon.core.cluster import domain_text, fast_domain
from echelon.core.mesh import Mesh
from echelon.core.rulebook.launch import TF_CONFIG_SERVERS
from echelon.core.rulebook.mesh import (
    BATCH_DIVIDES,
    FITS_CLUSTER,
    HALVING_NEEDS_POWER_OF_TWO,
    HIERARCHY_NEEDS_EVEN_NODES,
    OWN_SUMS_NEED_GLOO,
    SEQUENCE_FITS_POSITIONS,
    SEQUENCE_PARALLEL_DIVIDES_SEQUENCE,
    SYMMETRIC_MEMORY_REACHES_RANKS,
    TP_DIVIDES_FFN,
    TP_DIVIDES_HEADS,
    TP_DIVIDES_KV_HEADS,
    WORLD_SIZE_IS_PRODUCT,
)
from echelon.core.rules import Rule, nearest_divisors
from echelon.core.units import short_count

OVERLAP_KEY = "mesh.tp_overlap"


def _tp_divides(
    view: View, rule: Rule, count: int, what: str, *keys: str
) -> Iterator[RuleViolation]:
    tp = view.integer("mesh.tp")
    if count % tp:
        yield RuleViolation(
            rule=rule,
            message=f"mesh.tp = {tp}, but {view.model_name} has {what} {count} ({count} % {tp} = "
            f"{count % tp})",
            key="mesh.tp",
            set_by=("mesh.tp", *keys),
            suggestions=_degrees_that_divide(view, tp),
        )


def _degrees_that_divide(view: View, tp: int) -> list[str]:
    """Return the nearest degrees that divide all that is cut over tp, and suit the experts."""
    number = _divided_by_tp(view)
    if not has_experts(view):
        return [str(n) for n in nearest_divisors(number, tp)]
    degrees = nearest_divisors(number, tp, limit=number)
    cut = view.integer(EXPERT_TP_KEY) > 1
    suiting = [n for n in degrees if _suits_experts(view, n, n if cut else 1)]
    nearest = sorted(sorted(suiting, key=lambda n: (abs(n - tp), n))[:4])
    if not cut:
        return [str(n) for n in nearest]
    return [f"mesh.tp = {n} with {EXPERT_TP_KEY} = {n}" for n in nearest]


def _suits_experts(view: View, tp: int, pieces: int) -> bool:
    mesh = replace(mesh_of(view), tp=tp)
    ranks = mesh.degree(*mesh.expert_fold(expert_tp=pieces))
    return ranks % view.integer(EP_KEY) == 0


def _divided_by_tp(view: View) -> int:
    cut = [view.integer(key) for key in ("model.heads", "model.kv_heads")]
    if has_dense_layers(view):
        cut.append(view.integer("model.ffn"))
    if shared := shared_width(view):
        cut.append(shared)
    if view.flag("mesh.sequence_parallel"):
        cut.append(view.integer(LENGTH_KEY) // view.integer(CP_KEY))
    elif has_experts(view):
        cut.append(tokens_of_microbatch(view))
    if has_experts(view) and view.integer(EXPERT_TP_KEY) > 1:
        cut.append(view.integer(FFN_KEY))
    heads, rest = divmod(view.integer("model.heads"), exchanging_ranks(view))
    if heads and not rest:
        cut.append(heads)
    return gcd(*cut)


def tp_divides_heads(view: View) -> Iterator[RuleViolation]:
    """Check that every tensor rank gets whole query heads."""
    heads = view.integer("model.heads")
    return _tp_divides(view, TP_DIVIDES_HEADS, heads, "heads =", "model.heads")


def tp_divides_kv_heads(view: View) -> Iterator[RuleViolation]:
    """Check that every tensor rank gets whole key/value heads."""
    heads = view.integer("model.kv_heads")
    return _tp_divides(view, TP_DIVIDES_KV_HEADS, heads, "kv_heads =", "model.kv_heads")


def tp_divides_ffn(view: View) -> Iterator[RuleViolation]:
    """Check that the inner width of every dense MLP is cut evenly; routed experts are none."""
    if has_dense_layers(view):
        ffn = view.integer("model.ffn")
        yield from _tp_divides(view, TP_DIVIDES_FFN, ffn, "ffn =", "model.ffn")
    if shared := shared_width(view):
        what = "shared_experts x experts.ffn ="
        keys = ("model.experts.shared_experts", FFN_KEY)
        yield from _tp_divides(view, TP_DIVIDES_FFN, shared, what, *keys)


def sequence_parallel_divides_sequence(view: View) -> Iterator[RuleViolation]:
    """Check that every tensor rank gets an equal piece of a context rank's part of a sequence."""
    tp, cp = view.integer("mesh.tp"), view.integer(CP_KEY)
    length = view.integer(LENGTH_KEY)
    if view.flag("mesh.sequence_parallel") and length % (cp * tp) and cuts_sequence(view):
        step = pieces_with_tensor_ranks(view)
        below = length - length % step
        cut = f"mesh.tp = {tp}" if cp == 1 else f"mesh.cp x mesh.tp = {cp} x {tp} = {cp * tp}"
        yield RuleViolation(
            rule=SEQUENCE_PARALLEL_DIVIDES_SEQUENCE,
            message=f"batch.sequence_length = {length} is not a multiple of {cut} "
            f"({length} % {cp * tp} = {length % (cp * tp)}), and mesh.sequence_parallel cuts it",
            key=LENGTH_KEY,
            set_by=(LENGTH_KEY, "mesh.tp", *([CP_KEY] if cp > 1 else [])),
            suggestions=[value for value in (below, below + step) if value > 0],
        )


def sequence_fits_positions(view: View) -> Iterator[RuleViolation]:
    """Check that a sequence is not longer than the positions of the model."""
    length, positions = view.integer("batch.sequence_length"), view.integer("model.max_positions")
    if length > positions:
        yield RuleViolation(
            rule=SEQUENCE_FITS_POSITIONS,
            message=f"batch.sequence_length = {length}, but {view.model_name} has {positions} "
            f"positions; {_more_positions(view, length - positions)}",
            key="batch.sequence_length",
            set_by=("batch.sequence_length", "model.max_positions"),
            suggestions=(f"1 to {positions}", partial(_longer_positions, length)),
        )


def _more_positions(view: View, more: int) -> str:
    """Other effects of more positions, as text."""
    if view.word("model.positions") == "learned":
        values = more * view.integer("model.hidden")
        return (
            f"with more, the table of learned positions grows by {more:,} untrained rows, "
            f"{short_count(values)} parameters"
        )
    return (
        "more rotary positions change no weight; weights that were trained on fewer know only those"
        ", and model.rope_scaling stretches them"
    )


def _longer_positions(length: int, trial: Trial) -> Iterator[str]:
    """Yield the setting that gives a model a position for each token of a sequence."""
    if trial.works({"model.max_positions": length}):
        yield f"--set model.max_positions={length}"


def batch_divides(view: View) -> Iterator[RuleViolation]:
    """Check that the global batch is shared out evenly."""
    total, size = (
        view.integer("batch.global_sequences"),
        view.integer("batch.microbatch_sequences"),
    )
    dp = data_ranks(view)
    rest = total % (size * dp)
    if rest == 0:
        return
    yield RuleViolation(
        rule=BATCH_DIVIDES,
        message=f"batch.global_sequences = {total} is not a multiple of microbatch_sequences x "
        f"data ranks = {size} x {dp} = {size * dp} ({total} % {size * dp} = {rest})",
        key="batch.global_sequences",
        set_by=BATCH_KEYS,
        suggestions=_even_batches(total, size, dp),
    )


def _even_batches(total: int, size: int, dp: int) -> list[str]:
    """Return the nearest batches that data ranks share evenly, as text."""
    below = total - total % (size * dp)
    batches = [f"global_sequences = {n}" for n in (below, below + size * dp) if n > 0]
    if total % dp == 0:
        sizes = nearest_divisors(total // dp, size, limit=2)
        batches += [f"microbatch_sequences = {n}" for n in sizes]
    return batches


def symmetric_memory_reaches_ranks(view: View) -> Iterator[RuleViolation]:
    """Check that tensor ranks which read one another's memory are GPUs that can."""
    if view.word(OVERLAP_KEY) != "symmetric-memory":
        return
    cluster, tp = cluster_of(view), view.integer("mesh.tp")
    domain = fast_domain(cluster)
    if cluster.backend != "nccl":
        found = f"the devices of {cluster.name} are no GPUs (they talk over {cluster.backend})"
    elif domain % tp:
        found = f"mesh.tp = {tp} spans {domain_text(cluster)} ({domain} % {tp} = {domain % tp})"
    else:
        return
    yield RuleViolation(
        rule=SYMMETRIC_MEMORY_REACHES_RANKS,
        message=f'{OVERLAP_KEY} = "symmetric-memory", but {found}',
        key=OVERLAP_KEY,
        set_by=(OVERLAP_KEY, "mesh.tp"),
        suggestions=({OVERLAP_KEY: "ring"}, {OVERLAP_KEY: "none"}),
    )


def overlap_without_effect(view: View) -> Iterator[RuleViolation]:
    """Find an overlap of tensor ranks where no rows are gathered before a product."""
    tp, split = view.integer("mesh.tp"), view.flag("mesh.sequence_parallel")
    if tp == 1:
        why = "it is about messages between tensor ranks, and mesh.tp = 1"
        change = {"mesh.tp": 2, "mesh.sequence_parallel": True}
        yield from setting_without_effect(view, OVERLAP_KEY, why, change)
    elif not split:
        why = "rows are gathered before a product, and sums of rows scattered after it, with "
        why += "mesh.sequence_parallel only"
        change = {"mesh.sequence_parallel": True}
        yield from setting_without_effect(view, OVERLAP_KEY, why, change)


def mesh_settings_without_effect(view: View) -> Iterator[RuleViolation]:
    """Yield settings that need another axis of the mesh."""
    if view.integer("mesh.tp") == 1:
        yield from setting_without_effect(
            view, "mesh.sequence_parallel", "it splits over tp, and mesh.tp = 1", "mesh.tp = 2"
        )
    yield from overlap_without_effect(view)
    alone = gradient_ranks(view) == 1 and view.integer("zero.stage") == 0
    if alone and not (has_experts(view) and ranks_with_the_same_experts(view) > 1):
        yield from setting_without_effect(
            view,
            "zero.bucket_bytes",
            "gradients are reduced over data and context ranks, and there is one",
            "mesh.dp_replicate = 2",
            allowed=(MODULE_BUCKET_BYTES,),
        )


TENSOR_FINDERS = (
    tp_divides_heads,
    tp_divides_kv_heads,
    tp_divides_ffn,
    sequence_parallel_divides_sequence,
    symmetric_memory_reaches_ranks,
)
MESH_FINDERS = (*TENSOR_FINDERS, sequence_fits_positions, batch_divides)


def own_sums_need_gloo(view: View) -> Iterator[RuleViolation]:
    """Check that an algorithm made of messages is asked of Gloo."""
    cluster, chosen = cluster_of(view), view.word(ALGORITHM_KEY)
    if chosen not in ("auto", BACKEND) and cluster.backend == "nccl":
        yield RuleViolation(
            rule=OWN_SUMS_NEED_GLOO,
            key=ALGORITHM_KEY,
            message=f'{ALGORITHM_KEY} = "{chosen}", but {cluster.name} communicates over NCCL',
            set_by=(ALGORITHM_KEY, "cluster.preset"),
            suggestions=_instead(BACKEND),
        )


def sums_are_made(view: View) -> Iterator[RuleViolation]:
    """Yield an algorithm for sums that nobody makes."""
    chosen = view.word(ALGORITHM_KEY)
    if not summing_groups(view):
        because = "each gradient is on one rank, and nothing is summed"
        yield from setting_without_effect(view, ALGORITHM_KEY, because, allowed=(BACKEND,))
    elif chosen in COLLECTIVE_ALGORITHMS and not groups_of_algorithm(view, chosen):
        because = f"all that ranks share are slices, which a {chosen} neither sums nor gathers"
        yield from setting_without_effect(view, ALGORITHM_KEY, because, allowed=(BACKEND,))


def halving_needs_power_of_two(view: View) -> Iterator[RuleViolation]:
    """Check that groups can be halved down to one rank."""
    chosen, node = view.word(ALGORITHM_KEY), cluster_of(view).devices_per_node
    if chosen not in COLLECTIVE_ALGORITHMS:
        return
    if COLLECTIVE_ALGORITHMS[chosen].need != "power of two":
        return
    for what, ranks in summing_groups(view).items():
        if not fits_group(chosen, ranks, node):
            size = len(ranks)
            below = 1 << (size.bit_length() - 1)
            yield RuleViolation(
                rule=HALVING_NEEDS_POWER_OF_TWO,
                key=ALGORITHM_KEY,
                message=f'{ALGORITHM_KEY} = "{chosen}", but {size} ranks hold {what}, and the '
                f"powers of two beside it are {below} and {2 * below}",
                suggestions=_instead("ring", "tree", BACKEND),
            )


def hierarchy_needs_even_nodes(view: View) -> Iterator[RuleViolation]:
    """Check that some group has several ranks on each of several nodes."""
    groups, node = summing_groups(view), cluster_of(view).devices_per_node
    if view.word(ALGORITHM_KEY) != HIERARCHICAL or not groups:
        return
    if any(fits_group(HIERARCHICAL, ranks, node) for ranks in groups.values()):
        return
    what, ranks = next(iter(groups.items()))
    nodes, each = len({rank // node for rank in ranks}), members_per_node(ranks, node)
    spread = f"{each} on each" if each else "unequally many on each"
    yield RuleViolation(
        rule=HIERARCHY_NEEDS_EVEN_NODES,
        key=ALGORITHM_KEY,
        message=f'{ALGORITHM_KEY} = "{HIERARCHICAL}", but the {len(ranks)} ranks that hold {what} '
        f"are on {nodes} node{'s' * (nodes > 1)} of {node}, {spread}",
        set_by=(ALGORITHM_KEY, "cluster.preset"),
        suggestions=_instead("ring", BACKEND),
    )


def _instead(*algorithms: str) -> tuple[str, ...]:
    return tuple(f'{ALGORITHM_KEY} = "{one}"' for one in algorithms)


COLLECTIVE_PLAN_FINDERS = (own_sums_need_gloo, halving_needs_power_of_two)
"""Rules without which ranks could not sum."""

COLLECTIVE_FINDERS = (*COLLECTIVE_PLAN_FINDERS, hierarchy_needs_even_nodes, sums_are_made)
"""Rules about how ranks sum and gather."""


MOST_MESHES = 4  # meshes in a message
MESH_KEYS = tuple(f"mesh.{axis.value}" for axis in MESH_AXES)


def world_size_is_product(world_size: int) -> ViolationFinder:
    """Return what finds a mesh of another number of ranks than a launcher has started."""

    def find(view: View) -> Iterator[RuleViolation]:
        mesh = mesh_of(view)
        if world_size != mesh.world_size:
            yield RuleViolation(
                rule=WORLD_SIZE_IS_PRODUCT,
                key="mesh",
                message=f"{world_size} ranks were started, but {mesh_product_text(mesh)}",
                set_by=MESH_KEYS,
                suggestions=(
                    lambda trial: suggest_meshes(trial, world_size),
                    f"{mesh.world_size} ranks",
                ),
            )

    return find


def servers_are_ps_tasks(tasks: int, world_size: int) -> ViolationFinder:
    """Return what finds another number of servers than TF_CONFIG has started as such."""

    def find(view: View) -> Iterator[RuleViolation]:
        count = view.integer(COUNT_KEY)
        if count != tasks:
            yield RuleViolation(
                rule=TF_CONFIG_SERVERS,
                key=COUNT_KEY,
                message=f"TF_CONFIG has {tasks} ps tasks and {world_size - tasks} others, but "
                f"{COUNT_KEY} = {count}",
                set_by=(COUNT_KEY,),
                suggestions=(f"{COUNT_KEY} = {tasks}", f"{count} ps tasks"),
            )

    return find


def mesh_fits_cluster(view: View) -> Iterator[RuleViolation]:
    """Find more ranks than the cluster has devices."""
    mesh, cluster = mesh_of(view), cluster_of(view)
    if mesh.world_size > cluster.num_devices:
        yield RuleViolation(
            rule=FITS_CLUSTER,
            key="mesh",
            message=f"{mesh_product_text(mesh)} ranks, but {cluster.name} has "
            f"{cluster.num_devices} devices",
            set_by=MESH_KEYS,
            suggestions=(
                lambda trial: suggest_meshes(trial, cluster.num_devices),
                *_bigger_cluster(view, mesh.world_size),
            ),
        )


def suggest_meshes(trial: Trial, world_size: int) -> Iterator[str]:
    """Yield legal settings of the mesh with this many ranks, nearest first."""
    axes, now = _axes(trial.view), mesh_of(trial.view)
    degrees_now = tuple(int(getattr(now, axis)) for axis in axes)
    ranks, rest = divmod(world_size - now.servers, now.num_workers // prod(degrees_now))
    if rest or ranks < 1:
        return
    nearest = sorted(
        _factorizations(ranks, len(axes)),
        key=lambda degrees: (_distance(degrees_now, degrees), degrees),
    )
    meshes = (dict(zip(axes, degrees, strict=True)) for degrees in nearest)
    legal = (
        mesh for mesh in meshes if trial.is_legal({f"mesh.{axis}": n for axis, n in mesh.items()})
    )
    for mesh in islice(legal, MOST_MESHES):
        yield " x ".join(f"{axis} {degree}" for axis, degree in mesh.items())


def _axes(view: View) -> tuple[str, ...]:
    """Return the axes that another mesh may split; dp_shard and cp where they cut something."""
    cut = view.integer("zero.stage") or view.integer("mesh.ep") > 1
    shard = ("dp_shard",) if cut else ()
    context = ("cp",) if view.integer("mesh.cp") > 1 else ()
    return ("pp", "dp_replicate", *shard, *context, "tp")


def _bigger_cluster(view: View, num_devices: int) -> Iterator[str]:
    if view.has("cluster.preset"):
        name = smallest_cluster(view.word("cluster.preset"), num_devices)
        yield f'cluster.preset = "{name}"'


def mesh_product_text(mesh: Mesh) -> str:
    """Return the degrees of a mesh and their product, in words."""
    degrees = " x ".join(f"{axis.value} {mesh.degree(axis)}" for axis in MESH_AXES)
    servers = f" + {mesh.servers} servers" * (mesh.servers > 0)
    return f"the mesh is {degrees}{servers} = {mesh.world_size}"


def _factorizations(number: int, count: int) -> Iterator[tuple[int, ...]]:
    """Yield every way to write `number` as a product of `count` degrees, in order."""
    if count == 1:
        yield (number,)
        return
    for first in nearest_divisors(number, 1, limit=number):
        for rest in _factorizations(number // first, count - 1):
            yield first, *rest


def _distance(now: tuple[int, ...], degrees: tuple[int, ...]) -> tuple[float, int]:
    steps = [abs(log2(new / old)) for new, old in zip(degrees, now, strict=True)]
    return round(sum(steps), 6), sum(step > 0 for step in steps)
