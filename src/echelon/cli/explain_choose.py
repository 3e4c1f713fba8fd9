"""`echelon explain choose`: what published guides say of a model and a cluster, and who is right.

Every tree is walked with the reader's own numbers, every row of the size guide that covers them is
checked for fit; then where guides differ from one another, from the run and from the planner. All
of it is data of `planner/guides/`, every number a formula of `cost/`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from echelon.config.gather import Gathered, gather, parse_sets
from echelon.config.resolve import resolve
from echelon.core.errors import ConfigError
from echelon.core.plan import Plan
from echelon.core.rulebook.command_line import BAD_ARGUMENT
from echelon.cost.lattice.software import Software
from echelon.planner.guides.agreement import Advice, Advised, advise
from echelon.planner.guides.comparison import compare, step_seconds_of
from echelon.planner.guides.layouts import NAMED
from echelon.planner.guides.practices import PRACTICES
from echelon.planner.guides.situation import Situation
from echelon.planner.request import (
    LAYOUT_KEYS,
    LAYOUT_TABLES,
    NICKNAMES,
    Aim,
    Request,
    is_hf_config,
    make_request,
)
from echelon.planner.search import search


@dataclass(frozen=True, slots=True, kw_only=True)
class ChooseQuestion:
    """Hold the run that was asked about, what guides say of it, and the planner's best plan.

    `told` says what was taken where the run says nothing. `software` is the trainer of which the
    seconds are.
    """

    plan: Plan
    advised: Advised
    best: Plan | None = None
    step_s: float | None = None
    told: tuple[str, ...] = ()
    software: Software = field(default_factory=Software)

    def seconds(self, advice: Advice) -> float | None:
        """Return the seconds of a step of what an advice comes to; None where it does not fit."""
        found = advice.outcome
        if found is None or not found.fits:
            return None
        return step_seconds_of(self.plan, found.split, advice.strategy, self.software)

    @property
    def compared(self) -> tuple[tuple[str, Plan], ...]:
        """Return the plans that guides are compared with: the run's own where it is a split."""
        plans = [("this run", self.plan)] if self.plan.mesh.world_size > 1 else []
        return (*plans, *([("the planner", self.best)] if self.best is not None else []))


def ask_choose(
    run: str | None, settings: Sequence[str], cluster: str | None = None
) -> ChooseQuestion:
    """Return the question; ConfigError without a run, or where it is wrong.

    A run is what a search takes: a run file, a preset of a run or model, or a config.json.
    """
    if run is None:
        raise ConfigError(
            BAD_ARGUMENT.problem(
                "which strategy fits depends on the model and the cluster: name a run",
                set_by="the command line",
                works=(
                    "echelon explain choose llama3-8b --cluster 8xh100",
                    "echelon explain choose config.json --cluster 8xh100",
                    "echelon explain choose run.toml",
                ),
            )
        )
    # The planner is free to split the run as it likes: what the run says of that is left aside.
    free = [one for one in settings if not _is_layout(one)]
    request = make_request(run, cluster=cluster, settings=free, aim=Aim(top=1))
    plan = _as_it_says(request, run, settings)
    best = search(request).best
    return ChooseQuestion(
        plan=plan,
        advised=advise(Situation(plan)),
        best=best and best.plan,
        step_s=best and best.estimate.step_s,
        told=request.told,
        software=request.software,
    )


def _as_it_says(request: Request, run: str, settings: Sequence[str]) -> Plan:
    """Return the plan of the run with the layout that it has, or that `settings` say."""
    if is_hf_config(run):
        own = Gathered()
        own.add(parse_sets(settings)[0])
    else:
        own = gather(NICKNAMES.get(run, run), settings)
    layout = {key: entry for key, entry in own.merged().items() if _is_layout(key)}
    gathered = Gathered(layers=[*request.layers, layout], problems=own.problems)
    return resolve(gathered, request.alone.name, None).plan


def _is_layout(setting: str) -> bool:
    key = setting.partition("=")[0].strip()
    return key.startswith(LAYOUT_TABLES) or key in LAYOUT_KEYS


def choose_json(question: ChooseQuestion) -> dict[str, Any]:
    """Return the page as JSON values."""
    situation, advised = question.advised.situation, question.advised
    return {
        "model": situation.model.name,
        "num_parameters": situation.num_parameters,
        "cluster": situation.cluster.name,
        "num_devices": situation.num_devices,
        "memory_bytes": situation.memory,
        "guides": [
            _advice_json(advice) | {"step_s": question.seconds(advice)} for advice in advised.advice
        ],
        "preferences": [
            {
                "id": preference.id,
                "axis": preference.axis,
                "factor": preference.factor,
                "question": preference.question.text,
                **asdict(answer),
            }
            for preference, answer in advised.preferences
        ],
        "conflicts": [asdict(conflict) for conflict in advised.conflicts],
        "compared": [
            {"with": name, "guide": advice.id, "differs": list(differs)}
            for name, plan in question.compared
            for advice, differs in advised.against(plan)
        ],
        "strategies": [
            {
                "name": row.kind.strategy.name,
                "cuts": row.kind.cuts,
                "sends": row.kind.sends,
                "claims": list(row.kind.claims),
                "split": row.outcome and asdict(row.outcome.split),
                "fits": row.outcome and row.outcome.fits,
                "step_s": row.step_s,
                "across_nodes": list(row.across_nodes),
            }
            for row in compare(situation, question.software)
        ],
        "planner": question.best
        and {
            "mesh": asdict(question.best.mesh),
            "zero_stage": question.best.layout.zero.stage,
            "step_s": question.step_s,
        },
        "told": list(question.told),
        "practices": [asdict(practice) for practice in PRACTICES],
        "layouts": [
            {"id": one.id, "name": one.name, "states_bytes": one.states_bytes, "fits": one.fits}
            for one in NAMED
        ],
    }


def _advice_json(advice: Advice) -> dict[str, Any]:
    found = advice.outcome
    return {
        "id": advice.id,
        "source": advice.source,
        "steps": [
            {"node": step.node.id, "question": step.node.question.text, **asdict(step.answer)}
            for step in (advice.path.steps if advice.path else ())
        ],
        "strategy": advice.strategy.name,
        "allows": advice.strategy.says(),
        "split": found and asdict(found.split),
        "held_bytes": found and found.held.total,
        "fits": found and found.fits,
        "note": advice.note,
    }
