# SPDX-License-Identifier: Apache-2.0
"""Rules of islands that train alone: mesh, rounds, what they hold, islands that may be lost."""

from __future__ import annotations

from collections.abc import Iterator

from echelon.config.cluster.settings import cluster_of
from echelon.config.derived.experts import has_experts
from echelon.config.derived.replicas import (
    EVERY_KEY,
    ISLANDS_KEY,
    MIN_ISLANDS_KEY,
    MOMENTUM_KEY,
    RESTARTS_KEY,
    min_islands_of,
)
from echelon.config.rules.violations import (
    RuleViolation,
    setting_without_effect,
    settings_excluding,
)
from echelon.config.schema import SETTINGS
from echelon.config.view import View, mesh_of
from echelon.core.rulebook.islands import (
    LOCAL_SGD_CODES_SAVE_BYTES,
    LOCAL_SGD_DELAY_FITS,
    LOCAL_SGD_ENDS_WITH_A_ROUND,
    LOCAL_SGD_FRAGMENTS_FIT,
    LOCAL_SGD_ISLANDS_ARE_REPLICAS,
    LOCAL_SGD_ISLANDS_FILL_NODES,
    LOCAL_SGD_KEEPS_STATE_NEAR,
    LOCAL_SGD_MASTERS_ARE_WIDE,
    LOCAL_SGD_MIN_ISLANDS,
    LOCAL_SGD_NEEDS_ISLANDS,
    LOCAL_SGD_SCALES_OF_BLOCKS,
    LOST_ISLANDS_HOLD_DENSE_MODELS,
    LOST_ISLANDS_LEAVE_NO_VALIDATION,
    LOST_ISLANDS_MEET_AT_ONCE,
    LOST_ISLANDS_NEED_GLOO,
    LOST_ISLANDS_SAVE_AT_MEETINGS,
)
from echelon.core.rules import nearest_divisors

REPLICATE_KEY, FRAGMENTS_KEY, DELAY_KEY = (
    "mesh.dp_replicate",
    "local_sgd.fragments",
    "local_sgd.delay",
)
GRADIENTS_KEY, STEPS_KEY = "local_sgd.gradients", "train.steps"
MOST_ISLANDS_WITH_CODES = 7
"""I - 1 bytes of a number, for I islands, are fewer than 8 (I - 1) / I up to so many."""


def needs_islands(view: View) -> Iterator[RuleViolation]:
    """Check that there are two replicas at least, as many as were written down."""
    replicas, every = view.integer(REPLICATE_KEY), view.integer(EVERY_KEY)
    if not every:
        return
    if replicas == 1:
        shard = view.integer("mesh.dp_shard")
        ways = [{REPLICATE_KEY: shard, "mesh.dp_shard": 1}] if shard > 1 else []
        yield RuleViolation(
            rule=LOCAL_SGD_NEEDS_ISLANDS,
            key=EVERY_KEY,
            message=f"{EVERY_KEY} = {every}, but {REPLICATE_KEY} = 1: there is one island",
            set_by=(EVERY_KEY, REPLICATE_KEY),
            suggestions=(*ways, f"{REPLICATE_KEY} = 2", f"{EVERY_KEY} = 0"),
        )
    islands = view.value(ISLANDS_KEY)
    if islands not in ("auto", replicas):
        yield RuleViolation(
            rule=LOCAL_SGD_ISLANDS_ARE_REPLICAS,
            key=ISLANDS_KEY,
            message=f"{ISLANDS_KEY} = {islands}, but {REPLICATE_KEY} = {replicas}",
            set_by=(ISLANDS_KEY, REPLICATE_KEY),
            suggestions=(f"{ISLANDS_KEY} = {replicas}", f"{REPLICATE_KEY} = {islands}"),
        )


def fragments_fit(view: View) -> Iterator[RuleViolation]:
    """Check that each fragment has a block, and a step of a round."""
    every, fragments = view.integer(EVERY_KEY), view.integer(FRAGMENTS_KEY)
    layers = view.integer("model.layers")
    most = min(layers, every)
    if every and fragments > most:
        what = f"{layers} blocks" if layers <= every else f"a round has {every} steps"
        has = f"{view.model_name} has {what}" if layers <= every else what
        yield RuleViolation(
            rule=LOCAL_SGD_FRAGMENTS_FIT,
            key=FRAGMENTS_KEY,
            message=f"{FRAGMENTS_KEY} = {fragments}, but {has} ({fragments} > {most})",
            set_by=(FRAGMENTS_KEY, EVERY_KEY, "model.layers"),
            suggestions=(f"{FRAGMENTS_KEY} = {most}", f"{FRAGMENTS_KEY} = 1"),
        )


def delay_fits(view: View) -> Iterator[RuleViolation]:
    """Check that an outer step is taken before its fragment meets again."""
    every, delay = view.integer(EVERY_KEY), view.integer(DELAY_KEY)
    if every and delay >= every:
        yield RuleViolation(
            rule=LOCAL_SGD_DELAY_FITS,
            key=DELAY_KEY,
            message=f"{DELAY_KEY} = {delay}, but a round has {every} steps ({delay} >= {every})",
            set_by=(DELAY_KEY, EVERY_KEY),
            suggestions=(f"{DELAY_KEY} = {every - 1}", f"{EVERY_KEY} = {delay + 1}"),
        )


def ends_with_a_round(view: View) -> Iterator[RuleViolation]:
    """Check that no step comes after the last outer step."""
    every, delay = view.integer(EVERY_KEY), view.integer(DELAY_KEY)
    steps = view.integer(STEPS_KEY)
    if not every or delay >= every:
        return
    rounds, rest = divmod(steps - delay, every)
    if rest or rounds < 1:
        less, more = rounds * every + delay, (rounds + 1) * every + delay
        late = f" - {delay}" if delay else ""
        share = [f"{EVERY_KEY} = {n}" for n in nearest_divisors(max(1, steps - delay), every)]
        yield RuleViolation(
            rule=LOCAL_SGD_ENDS_WITH_A_ROUND,
            key=STEPS_KEY,
            message=f"{STEPS_KEY} = {steps} is no number of whole rounds: "
            f"({steps}{late}) % {every} = {(steps - delay) % every}",
            set_by=(STEPS_KEY, EVERY_KEY, DELAY_KEY),
            suggestions=(*(f"{STEPS_KEY} = {n}" for n in (less, more) if n > delay), *share),
        )


def islands_fill_nodes(view: View) -> Iterator[RuleViolation]:
    """Check that no node has parts of two islands, unless it has whole ones."""
    mesh, cluster = mesh_of(view), cluster_of(view)
    node, size = cluster.devices_per_node, mesh.world_size // mesh.dp_replicate
    if not view.integer(EVERY_KEY) or mesh.world_size <= node or not (size % node and node % size):
        return
    shards = mesh.dp_shard
    ways = [
        f"mesh.dp_shard = {n}"
        for n in range(1, 2 * shards + node)
        if not ((size // shards * n) % node and node % (size // shards * n))
    ]
    yield RuleViolation(
        rule=LOCAL_SGD_ISLANDS_FILL_NODES,
        key=EVERY_KEY,
        message=f"an island has {size} ranks, and a node of {cluster.name} {node} devices: "
        f"{max(size, node)} % {min(size, node)} = {max(size, node) % min(size, node)}",
        set_by=(EVERY_KEY, REPLICATE_KEY, "mesh.dp_shard"),
        suggestions=sorted(ways, key=lambda way: abs(int(way.split()[-1]) - shards))[:2],
    )


def keeps_state_near(view: View) -> Iterator[RuleViolation]:
    """Check that nothing of what an outer step changes rests elsewhere."""
    for key in ("zero.optimizer_offload", "zero.parameter_offload"):
        if view.integer(EVERY_KEY) and view.word(key) != "none":
            ways = f'{key} = "none"', f"{EVERY_KEY} = 0"
            yield settings_excluding(view, LOCAL_SGD_KEEPS_STATE_NEAR, key, EVERY_KEY, *ways)


def scales_of_blocks(view: View) -> Iterator[RuleViolation]:
    """Check that scales in 8 bits are not those of the steps before."""
    key, fp8 = "precision.fp8_scales", view.word("precision.matmul") == "fp8"
    if view.integer(EVERY_KEY) and fp8 and view.word(key) == "tensor":
        ways = f'{key} = "block"', f"{EVERY_KEY} = 0"
        yield settings_excluding(view, LOCAL_SGD_SCALES_OF_BLOCKS, key, EVERY_KEY, *ways)


def codes_save_bytes(view: View) -> Iterator[RuleViolation]:
    """Check that codes of 8 bits are fewer bytes than sums, and come at once."""
    kind, islands = view.word(GRADIENTS_KEY), view.integer(REPLICATE_KEY)
    delay = view.integer(DELAY_KEY)
    if not view.integer(EVERY_KEY) or kind == "fp32":
        return
    plain = 'local_sgd.gradients = "fp32"'
    if islands > MOST_ISLANDS_WITH_CODES:
        yield RuleViolation(
            rule=LOCAL_SGD_CODES_SAVE_BYTES,
            key=GRADIENTS_KEY,
            message=f'local_sgd.gradients = "{kind}" with {islands} islands: a number takes '
            f"{islands - 1} bytes, and {8 * (islands - 1) / islands:.3g} of a sum in float32",
            set_by=(GRADIENTS_KEY, REPLICATE_KEY),
            suggestions=(plain, f"{REPLICATE_KEY} = {MOST_ISLANDS_WITH_CODES}"),
        )
    if delay:
        ways = f"{DELAY_KEY} = 0", plain
        yield settings_excluding(view, LOCAL_SGD_CODES_SAVE_BYTES, DELAY_KEY, GRADIENTS_KEY, *ways)


def masters_are_wide(view: View) -> Iterator[RuleViolation]:
    """Check that values have the digits of a difference."""
    key = "precision.master"
    if view.integer(EVERY_KEY) and view.word(key) not in ("fp32", "fp64"):
        ways = f'{key} = "fp32"', f"{EVERY_KEY} = 0"
        yield settings_excluding(view, LOCAL_SGD_MASTERS_ARE_WIDE, key, EVERY_KEY, *ways)


def local_sgd_without_effect(view: View) -> Iterator[RuleViolation]:
    """Yield settings of rounds where there are none, and a momentum that nothing has."""
    if not view.integer(EVERY_KEY):
        because = f"{EVERY_KEY} = 0: gradients are summed over all ranks in each step"
        for key in (one.key for one in SETTINGS.values() if one.table == "local_sgd"):
            yield from setting_without_effect(view, key, because, f"{EVERY_KEY} = 50")
    elif view.word("local_sgd.outer") == "sgd":
        because = 'local_sgd.outer = "sgd" has no momentum'
        nesterov = 'local_sgd.outer = "nesterov"'
        yield from setting_without_effect(view, MOMENTUM_KEY, because, nesterov, allowed=(0.0,))


LOCAL_SGD_PLAN_FINDERS = (
    needs_islands,
    fragments_fit,
    delay_fits,
    islands_fill_nodes,
    keeps_state_near,
    scales_of_blocks,
    masters_are_wide,
    codes_save_bytes,
)
"""Rules without which ranks could not run rounds."""

LOCAL_SGD_FINDERS = (*LOCAL_SGD_PLAN_FINDERS, ends_with_a_round, local_sgd_without_effect)
"""Rules about local SGD."""


SAVE_KEY = "checkpoint.every"
ALL = {MIN_ISLANDS_KEY: "all"}


def is_elastic(view: View) -> bool:
    """Return whether a run is to go on without lost islands."""
    return view.integer(EVERY_KEY) > 0 and min_islands_of(view) != "all"


def min_islands_are_there(view: View) -> Iterator[RuleViolation]:
    """Check that a run starts with as many islands as it needs to go on."""
    least, islands = min_islands_of(view), view.integer(REPLICATE_KEY)
    if is_elastic(view) and least != "all" and least > islands > 1:
        yield RuleViolation(
            rule=LOCAL_SGD_MIN_ISLANDS,
            key=MIN_ISLANDS_KEY,
            message=f"{MIN_ISLANDS_KEY} = {least}, and there are {islands} islands "
            f"({REPLICATE_KEY} = {islands})",
            set_by=(MIN_ISLANDS_KEY, REPLICATE_KEY),
            suggestions=(ALL, {MIN_ISLANDS_KEY: islands - 1}),
        )


def lost_islands_meet_at_once(view: View) -> Iterator[RuleViolation]:
    """Check that an outer step is taken in the step of its meeting, from differences."""
    if not is_elastic(view):
        return
    plain: tuple[tuple[str, object], ...] = ((DELAY_KEY, 0), (GRADIENTS_KEY, "fp32"))
    for key, value in plain:
        if view.value(key) != value:
            ways = {key: value}, ALL
            yield settings_excluding(view, LOST_ISLANDS_MEET_AT_ONCE, key, MIN_ISLANDS_KEY, *ways)


def lost_islands_need_gloo(view: View) -> Iterator[RuleViolation]:
    """Check that groups can be made while islands train, and end where a member is lost."""
    cluster = cluster_of(view)
    if is_elastic(view) and cluster.backend == "nccl":
        yield RuleViolation(
            rule=LOST_ISLANDS_NEED_GLOO,
            key=MIN_ISLANDS_KEY,
            message=f"{MIN_ISLANDS_KEY} = {min_islands_of(view)}, but {cluster.name} communicates "
            "over NCCL",
            set_by=(MIN_ISLANDS_KEY, "cluster.preset"),
            suggestions=(ALL, 'cluster.preset = "laptop"'),
        )


def lost_islands_hold_dense_models(view: View) -> Iterator[RuleViolation]:
    """Check that an island has no state of routers beside what islands agree on."""
    if is_elastic(view) and has_experts(view):
        yield RuleViolation(
            rule=LOST_ISLANDS_HOLD_DENSE_MODELS,
            key=MIN_ISLANDS_KEY,
            message=f"{MIN_ISLANDS_KEY} = {min_islands_of(view)}, and {view.model_name} has "
            "experts, whose routers have state of each island",
            suggestions=(ALL,),
        )


def lost_islands_leave_no_validation(view: View) -> Iterator[RuleViolation]:
    """Check that no validation waits for an island that may be lost."""
    key = "train.validate_every"
    if is_elastic(view) and view.value(key) != "never":
        ways = {key: "never"}, ALL
        yield settings_excluding(
            view, LOST_ISLANDS_LEAVE_NO_VALIDATION, key, MIN_ISLANDS_KEY, *ways
        )


def lost_islands_save_at_meetings(view: View) -> Iterator[RuleViolation]:
    """Check that checkpoints are written where rounds end."""
    saves, every = view.value(SAVE_KEY), view.integer(EVERY_KEY)
    if not is_elastic(view) or not isinstance(saves, int) or saves % every == 0:
        return
    more = (saves // every + 1) * every
    yield RuleViolation(
        rule=LOST_ISLANDS_SAVE_AT_MEETINGS,
        key=SAVE_KEY,
        message=f"{SAVE_KEY} = {saves} is no number of whole rounds ({saves} % {every} = "
        f"{saves % every}), and {MIN_ISLANDS_KEY} = {min_islands_of(view)}",
        set_by=(SAVE_KEY, EVERY_KEY, MIN_ISLANDS_KEY),
        suggestions=(*([{SAVE_KEY: more - every}] if more > every else []), {SAVE_KEY: more}, ALL),
    )


def lost_islands_without_effect(view: View) -> Iterator[RuleViolation]:
    """Yield restarts of islands that end the run, and a comparison of calls that is not made."""
    if not view.integer(EVERY_KEY):
        return
    if is_elastic(view):
        because = f"with {MIN_ISLANDS_KEY} calls of ranks that come and go are not compared"
        yield from setting_without_effect(view, "train.desync_after_s", because, ALL)
    else:
        because = f"with {MIN_ISLANDS_KEY} of all islands the run ends with the first that is lost"
        yield from setting_without_effect(view, RESTARTS_KEY, because, {MIN_ISLANDS_KEY: 1})


LOST_ISLAND_PLAN_FINDERS = (
    min_islands_are_there,
    lost_islands_meet_at_once,
    lost_islands_need_gloo,
    lost_islands_hold_dense_models,
)
"""Rules about lost islands without which ranks could not run a plan."""

LOST_ISLAND_FINDERS = (
    *LOST_ISLAND_PLAN_FINDERS,
    lost_islands_leave_no_validation,
    lost_islands_save_at_meetings,
    lost_islands_without_effect,
)
"""Rules about islands that may be lost."""
