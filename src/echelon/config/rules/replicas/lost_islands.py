# SPDX-License-Identifier: Apache-2.0
"""What islands that may be lost need, so that the others go on."""

from __future__ import annotations

from collections.abc import Iterator

from echelon.config.cluster.settings import cluster_of
from echelon.config.rules.violations import RuleViolation, setting_without_effect
from echelon.config.settings.experts import has_experts
from echelon.config.settings.local_sgd import (
    EVERY_KEY,
    MIN_ISLANDS_KEY,
    RESTARTS_KEY,
    min_islands_of,
)
from echelon.config.view import View
from echelon.core.rulebook.islands import (
    LOCAL_SGD_MIN_ISLANDS,
    LOST_ISLANDS_HOLD_DENSE_MODELS,
    LOST_ISLANDS_LEAVE_NO_VALIDATION,
    LOST_ISLANDS_MEET_AT_ONCE,
    LOST_ISLANDS_NEED_GLOO,
    LOST_ISLANDS_SAVE_AT_MEETINGS,
)

REPLICATE_KEY, DELAY_KEY = "mesh.dp_replicate", "local_sgd.delay"
GRADIENTS_KEY, SAVE_KEY = "local_sgd.gradients", "checkpoint.every"
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
    told = f"with {MIN_ISLANDS_KEY} = {min_islands_of(view)}"
    if delay := view.integer(DELAY_KEY):
        yield RuleViolation(
            rule=LOST_ISLANDS_MEET_AT_ONCE,
            key=DELAY_KEY,
            message=f"{DELAY_KEY} = {delay} {told}",
            set_by=(DELAY_KEY, MIN_ISLANDS_KEY),
            suggestions=({DELAY_KEY: 0}, ALL),
        )
    if (kind := view.word(GRADIENTS_KEY)) != "fp32":
        yield RuleViolation(
            rule=LOST_ISLANDS_MEET_AT_ONCE,
            key=GRADIENTS_KEY,
            message=f'{GRADIENTS_KEY} = "{kind}" {told}',
            set_by=(GRADIENTS_KEY, MIN_ISLANDS_KEY),
            suggestions=({GRADIENTS_KEY: "fp32"}, ALL),
        )


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
        yield RuleViolation(
            rule=LOST_ISLANDS_LEAVE_NO_VALIDATION,
            key=key,
            message=f"{key} = {view.value(key)} with {MIN_ISLANDS_KEY} = {min_islands_of(view)}",
            set_by=(key, MIN_ISLANDS_KEY),
            suggestions=({key: "never"}, ALL),
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
        suggestions=(
            *([{SAVE_KEY: more - every}] if more > every else []),
            {SAVE_KEY: more},
            ALL,
        ),
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
