# SPDX-License-Identifier: Apache-2.0
"""`ec.compare`: two plans side by side. `ec.compare_strategies`: strategies beside one process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from echelon.api.given_plan import GivenPlan, plan_from_given
from echelon.api.planning import ranks_of
from echelon.config.load import load_job
from echelon.config.rules.finders import require_trainable
from echelon.core.choices.strategies import STRATEGIES, why_no_strategy
from echelon.core.errors import ConfigError, Problem
from echelon.core.messages.names import names_within
from echelon.core.plan import Plan
from echelon.core.rulebook.config import BAD_ARGUMENT

if TYPE_CHECKING:
    from echelon.planner.explain.compare import PlanComparison
    from echelon.proof.deviations import Prover, StrategyDeviation

FEWEST_RANKS = 2
"""Ranks of a strategy: one splits nothing."""
MOST_RANKS = 8
"""Ranks of a strategy: more take the memory of a laptop."""


def compare(a: str | Path | GivenPlan, b: str | Path | GivenPlan) -> PlanComparison:
    """Return what differs between two plans, and what their ranks hold and send.

    Each is a plan, the answer of `ec.plan`, a run.toml or preset, a plan.json, or the folder of a
    run. Raises ConfigError where one cannot be read.
    """
    from echelon.api.converting import read_plan
    from echelon.planner.explain.compare import compare_plans

    first, second = (
        read_plan(one)[0] if isinstance(one, str | Path) else plan_from_given(one) for one in (a, b)
    )
    return compare_plans(first, second)


def compare_strategies(
    run: str | Path,
    strategies: Sequence[str] = tuple(STRATEGIES),
    *,
    ranks: int = 2,
    settings: Sequence[str] = (),
) -> tuple[StrategyDeviation, ...]:
    """Return the distance of each strategy from one process: loss, gradients, parameters.

    `run` is a run.toml or preset; each strategy (`dp`, `zero1` to `zero3`, `tp`, `sp`, `pp`, `cp`,
    `gathered`, `ulysses`, `ep`, `parameter-server`) splits it over `ranks` ranks, which are started
    here and run a small model of the same kind beside one process, in float64 and in the run's own
    precision. Two parameter servers are ranks beside these.
    A strategy that the rules refuse for this run says so. Raises ConfigError where a strategy is
    unknown, or the run cannot be read.
    """
    problems = [_unknown(name) for name in strategies if name not in STRATEGIES]
    if not FEWEST_RANKS <= ranks <= MOST_RANKS:
        problems.append(
            BAD_ARGUMENT.problem(
                f"{ranks} ranks: a strategy is compared on {FEWEST_RANKS} to {MOST_RANKS}",
                suggestions=("--ranks 2", "--ranks 4"),
            )
        )
    if problems or not strategies:
        raise ConfigError(problems or BAD_ARGUMENT.problem("no strategy is named"))
    load_job(run, settings)  # what is wrong without any strategy is told once
    plans = {name: _plan_or_refusal(run, settings, name, ranks) for name in strategies}
    return tuple(_deviations(plans))


def _unknown(name: str) -> Problem:
    near = names_within(name, STRATEGIES)
    return BAD_ARGUMENT.problem(
        why_no_strategy(name), suggestions=tuple(f"--strategies {one}" for one in near)
    )


def _plan_or_refusal(
    run: str | Path, settings: Sequence[str], strategy: str, ranks: int
) -> Plan | ConfigError:
    """Return the plan of a strategy, or what the rules say against it."""
    try:
        job = load_job(run, (*settings, *STRATEGIES[strategy].settings(ranks)))
        require_trainable(job.plan, job.sources)
    except ConfigError as error:
        return error
    return job.plan


def _deviations(plans: Mapping[str, Plan | ConfigError]) -> Iterator[StrategyDeviation]:
    """Yield how each plan fares, on ranks that all of them share."""
    from echelon.proof.deviations import StrategyDeviation, deviation_of

    # One pool serves all: parameter servers are ranks beside those of a strategy.
    every = [plan for plan in plans.values() if isinstance(plan, Plan)]
    largest = max(every, key=lambda plan: plan.mesh.world_size, default=None)
    with ExitStack() as stack:
        prover: Prover | None = None
        for name, plan in plans.items():
            about = STRATEGIES[name].about
            if isinstance(plan, ConfigError):
                yield StrategyDeviation(
                    strategy=name, about=about, refused=plan.rules, why=plan.problems[0].message
                )
                continue
            if prover is None:
                run_ranks = stack.enter_context(ranks_of(largest or plan, None))
                from echelon.proof.whole_run.whole_run import prove_with_whole_run

                prover = partial(prove_with_whole_run, run_ranks=run_ranks)
            yield deviation_of(name, about, plan, prover)
