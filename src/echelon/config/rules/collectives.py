# SPDX-License-Identifier: Apache-2.0
"""Which algorithm can sum what ranks of a run share: by its backend, its groups and its nodes."""

from __future__ import annotations

from collections.abc import Iterator

from echelon.config.cluster.settings import cluster_of
from echelon.config.rules.violations import RuleViolation, setting_without_effect
from echelon.config.settings.collectives import (
    ALGORITHM_KEY,
    groups_of_algorithm,
    summing_groups,
)
from echelon.config.view import View
from echelon.core.choices.collective_algorithms import (
    BACKEND,
    COLLECTIVE_ALGORITHMS,
    HIERARCHICAL,
    fits_group,
    members_per_node,
)
from echelon.core.rulebook.mesh import (
    HALVING_NEEDS_POWER_OF_TWO,
    HIERARCHY_NEEDS_EVEN_NODES,
    OWN_SUMS_NEED_GLOO,
)


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
