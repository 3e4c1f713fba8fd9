# SPDX-License-Identifier: Apache-2.0
"""A run with late completion beside the run that is proven: what its ranks found, and its bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import signature
from pathlib import Path
from typing import Any

from echelon.core.errors import ConfigError, RunFailed
from echelon.core.plan import Plan
from echelon.core.rulebook.prove import PROVE_LATE_SUBJECT
from echelon.parallel.completion.in_flight import Race
from echelon.proof.observed import ObservedRun
from echelon.proof.ranks import race_file, read_results

_ARGUMENTS = 3
"""What a subject takes that can be told when its operations complete."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LateRun:
    """Hold what the ranks found in one precision, and all that they said.

    `observed` is None where the run ended with an error, of which a race was the cause, in this
    precision or in another. `rounded` is the run of the plan that sums in codes, where there is
    one; races and operations are those of both.
    """

    races: tuple[Race, ...]
    num_operations: tuple[int, ...]
    observed: ObservedRun | None
    rounded: ObservedRun | None = None

    def joined(self, rounded: LateRun) -> LateRun:
        """Return this run with that of the plan that sums in codes."""
        pairs = zip(self.num_operations, rounded.num_operations, strict=True)
        return replace(
            self,
            races=(*self.races, *rounded.races),
            num_operations=tuple(map(sum, pairs)),
            rounded=rounded.observed,
        )


def require_late_subject(subject: str, factory: Callable[..., Any]) -> None:
    """Refuse a subject that cannot be told when its operations complete."""
    taken = [one for one in signature(factory).parameters.values() if one.kind != one.KEYWORD_ONLY]
    if len(taken) < _ARGUMENTS:
        raise ConfigError(
            PROVE_LATE_SUBJECT.problem(
                f"subject {subject!r} takes {len(taken)} arguments; late completion needs "
                f"{_ARGUMENTS}: place, plan, completion"
            )
        )


def run_late(
    run_into: Callable[[Path], None],
    plans: Sequence[Plan],
    directory: Path,
    *,
    rounded: Mapping[int, Plan] | None = None,
) -> list[LateRun]:
    """Run the ranks with late completion and return what they found, plan by plan.

    `rounded` is the plan that sums in codes, by its place in the run: it goes with the first plan.
    What makes a rank fail after it has found a race is told as that race.
    """
    every = {**dict(enumerate(plans)), **(rounded or {})}
    directory.mkdir()
    failure: RunFailed | None = None
    try:
        run_into(directory)
    except RunFailed as error:
        failure = error
    found: list[LateRun] = []
    for number, plan in every.items():
        ranks = range(plan.mesh.world_size)
        races = [race for rank in ranks for race in _races(race_file(directory, number, rank))]
        results = () if failure is not None else read_results(directory, number, len(ranks))
        found.append(
            LateRun(
                races=tuple(races),
                num_operations=tuple(result.num_operations for result in results),
                observed=None if failure is not None else ObservedRun(plan, results),
            )
        )
    if failure is not None and not any(run.races for run in found):
        raise failure
    kept, beside = found[: len(plans)], found[len(plans) :]
    for one in beside:
        kept[0] = kept[0].joined(one)
    return kept


def _races(path: Path) -> list[Race]:
    if not path.exists():
        return []
    return [Race.from_json(line) for line in path.read_text(encoding="utf-8").splitlines()]
