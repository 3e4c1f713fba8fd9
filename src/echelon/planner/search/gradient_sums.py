# SPDX-License-Identifier: Apache-2.0
"""How plans of a search sum and gather, where a run says so: `collectives.algorithm`.

One rank sums nothing, and neither do the plans of a search whose ranks share nothing, or for a tree
slices alone: there the setting has no effect, and is left out. Every other plan has it, and rules
say of each whether the algorithm fits its groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from echelon.config.derived.collectives import ALGORITHM_KEY
from echelon.config.entries import Entry
from echelon.config.job import Job
from echelon.config.load import resolve, say_adapted
from echelon.config.setting_layers import SettingLayers
from echelon.core.choices.collective_algorithms import BACKEND
from echelon.core.errors import ConfigError
from echelon.core.plan import Plan
from echelon.core.rulebook.config import NO_EFFECT
from echelon.core.rulebook.mesh import OWN_SUMS_NEED_GLOO
from echelon.cost.seconds.trainers import OURS

Layers = Sequence[Mapping[str, Entry]]


def algorithm_asked_for(layers: Layers) -> Entry | None:
    """Return the algorithm that a run names, None where it is left to us."""
    found = [layer[ALGORITHM_KEY] for layer in layers if ALGORITHM_KEY in layer]
    return found[-1] if found and found[-1].value != "auto" else None


def resolve_one_rank(gathered: SettingLayers, name: str, trainer: str) -> Plan:
    """Return the run on one rank; ConfigError where no plan can sum as it says."""
    asked = algorithm_asked_for(gathered.layers)
    job = resolve(_left_out(gathered), name, None)
    say_adapted(job)
    plan = job.plan
    if asked is None or asked.value == BACKEND:
        return plan
    where, said = asked.source, f'{ALGORITHM_KEY} = "{asked.value}"'
    if trainer != OURS:
        raise ConfigError(
            NO_EFFECT.problem(
                f"{said} changes nothing: it is of our own trainer, and the seconds are those of "
                f"{trainer}",
                key=ALGORITHM_KEY,
                set_by=where,
                suggestions=[f"--trainer {OURS}", f'{ALGORITHM_KEY} = "auto"'],
            )
        )
    if plan.cluster.backend == "nccl":
        raise ConfigError(
            OWN_SUMS_NEED_GLOO.problem(
                f"{said}, but {plan.cluster.name} communicates over NCCL",
                key=ALGORITHM_KEY,
                set_by=where,
                suggestions=[f'{ALGORITHM_KEY} = "{BACKEND}"'],
            )
        )
    return plan


def resolve_candidate(gathered: SettingLayers, name: str) -> Job:
    """Return the Job of a plan of a search; ConfigError where it breaks a rule."""
    try:
        return resolve(gathered, name, None)
    except ConfigError as error:
        if {(one.rule, one.key) for one in error.problems} != {(NO_EFFECT.id, ALGORITHM_KEY)}:
            raise
        return resolve(_left_out(gathered), name, None)


def _left_out(gathered: SettingLayers) -> SettingLayers:
    layers = [{k: v for k, v in one.items() if k != ALGORITHM_KEY} for one in gathered.layers]
    return SettingLayers(
        layers=[*layers], problems=gathered.problems, incomplete=gathered.incomplete
    )
