"""Every schedule beside torch's same one and the fastest 1F1B of the peers, here and over links.

First all peers run 1F1B in turn with Echelon's; the fastest of them then takes part in the heat of
every other schedule, beside `torch.distributed.pipelining`'s same schedule where that has it. For
a schedule that it has not, torch's runtime is given Echelon's actions, and the result is told.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from bench.harness.catalogue import OURS, Case, peers
from bench.harness.hosts import Link, linked_hosts
from bench.harness.interleave import Contest, Options, contest, say
from bench.harness.report import Row, Verdict, fastest_peer, own_row, rows, table
from bench.harness.spec import MODES
from bench.pipeline.plans import our_case, pipeline_plan
from bench.pipeline.report import BASELINE, peer_verdicts
from bench.pipeline.simulation import automatic_rows_here
from bench.pipeline.spec import (
    NOT_COMPARED,
    NUM_RANKS,
    TORCH_SCHEDULES,
    PipelineVariant,
    pipeline_mode,
)
from echelon.core.errors import EchelonError
from echelon.schedule.from_plan import schedule_from_plan

_TORCH = "torch pipelining"


@dataclass(slots=True)
class Comparison:
    """Hold the settings of the heats, and what they have found so far."""

    options: Options
    link: Link | None
    missed: int = 0
    fastest: Case | None = None
    results: list[dict[str, Any]] = field(default_factory=list)


def measure_peers(options: Options, names: Sequence[str], link: Link | None) -> Comparison:
    """Run one heat per schedule, print tables and verdicts; over `link`, only beside torch."""
    compared = Comparison(options=options, link=link)
    for name in _in_order(names):
        say(name)
        try:
            mine = our_case(OURS, variant_of(name, options))
            others = _others(compared, mine)
        except (EchelonError, LookupError) as error:
            print(f"\n{name} {OURS} did not run: {' '.join(str(error).split())[:300]}")
            compared.missed += 1
            continue
        hosts = None if link is None else partial(linked_hosts, NUM_RANKS)
        cases = (mine, *others)
        with contest(cases, logs=options.logs, size=options.size, hosts=hosts) as entered:
            for _, on_hosts in entered.groups.values() if link is not None else ():
                for host in on_hosts:
                    host.shape(link)
            entered.take_rounds(options.rounds, warmup=options.warmup, steps=options.steps)
        _judge(name, compared, entered, others)
    return compared


def _in_order(names: Sequence[str]) -> list[str]:
    """Return the schedules to compare, the baseline first: it finds the fastest peer."""
    chosen = [name for name in names if name not in NOT_COMPARED]
    return sorted(chosen, key=lambda name: name != BASELINE)


def variant_of(name: str, options: Options) -> PipelineVariant:
    """Return the variant of a schedule; for "auto" with the actions found for this machine."""
    if name != "auto":
        return PipelineVariant(schedule=name)
    return PipelineVariant(schedule=name, rows=automatic_rows_here(options))


def torch_case(mine: Case, options: Options) -> Case | None:
    """Return torch with the schedule of `mine`; None where its runtime cannot hold it."""
    variant = PipelineVariant.parse(mine.variant)
    label = f"{_TORCH} {variant.schedule}"
    if variant.schedule not in TORCH_SCHEDULES:
        schedule = schedule_from_plan(pipeline_plan(mine.settings(options.size)))
        if schedule.mirrored:
            return None
        actions = tuple(" ".join(map(str, row)) for row in schedule.actions)
        variant = replace(variant, rows=actions)
        label = f"{_TORCH}, given our {variant.schedule}"
    return replace(
        mine,
        label=label,
        module="bench.peers.torch_schedules",
        variant=str(variant),
        python=options.peers_home / "venv" / "bin" / "python",
    )


def one_f_one_b_cases(options: Options) -> tuple[Case, ...]:
    """Return the frameworks that run 1F1B, beside torch's own pipelines."""
    mode = pipeline_mode(f"pp2-{BASELINE}")
    known = peers(MODES["pp2"], options.peers_home, at_most=options.num_peers)
    others = tuple(
        replace(case, mode=mode) for case in known if not case.module.endswith("torch_pp")
    )
    python = options.peers_home / "venv" / "bin" / "python"
    module = "bench.peers.picotron"
    picotron = Case(label="picotron", module=module, variant="", mode=mode, python=python)
    return (*others, picotron)


def _others(compared: Comparison, mine: Case) -> tuple[Case, ...]:
    options = compared.options
    same = torch_case(mine, options)
    found = () if same is None else (same,)
    if compared.link is not None:
        return found
    if PipelineVariant.parse(mine.variant).schedule == BASELINE:
        return (*found, *one_f_one_b_cases(options))
    if compared.fastest is None:
        fastest = torch_case(our_case(OURS, PipelineVariant(schedule=BASELINE)), options)
        assert fastest is not None
        say(f" {BASELINE} was not measured: {fastest.label} stands for the fastest")
        compared.fastest = fastest
    return (*found, replace(compared.fastest, mode=mine.mode))


def _judge(name: str, compared: Comparison, entered: Contest, others: Sequence[Case]) -> None:
    """Print the table and the verdicts of one schedule, and count what is missed."""
    mode = pipeline_mode(f"pp2-{name}")
    found = rows(entered.rounds)
    print(f"\n{table(mode, found, entered.failures)}")
    if name == BASELINE and compared.link is None:
        best = fastest_peer(found)
        compared.fastest = next((one for one in others if best and one.label == best.label), None)
    verdicts, told = _verdicts(name, compared, found)
    for verdict in verdicts:
        print(f"{mode.name} {verdict.line()}")
    for verdict in told:
        print(f"{mode.name} told: {verdict.line().partition(', target')[0]}")
    compared.missed += sum(not verdict.met for verdict in verdicts) + (OURS in entered.failures)
    for label, taken in entered.rounds.items():
        compared.results += [{"mode": mode.name, "label": label, **asdict(one)} for one in taken]
    sys.stdout.flush()


def _verdicts(
    name: str, compared: Comparison, found: Sequence[Row]
) -> tuple[list[Verdict], list[Verdict]]:
    """Return the verdicts that count and those that are only told."""
    mine = own_row(found)
    if mine is None:
        return [], []
    by_label = {row.label: row for row in found}
    same = by_label.get(f"{_TORCH} {name}")
    given = by_label.get(f"{_TORCH}, given our {name}")
    fastest = by_label.get(compared.fastest.label) if compared.fastest is not None else None
    told = peer_verdicts(mine, given, None)
    judged = peer_verdicts(mine, same, fastest)
    if compared.link is not None:
        told += [verdict for verdict in judged if verdict.quantity != "wall"]
        judged = [verdict for verdict in judged if verdict.quantity == "wall"]
    return judged, told
