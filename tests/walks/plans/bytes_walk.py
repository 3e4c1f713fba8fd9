"""Predicted = executed: ``python -m tests.walks.plans.bytes_walk --plans 200 --results F``.

A sample of the plan matrix, in which every choice of a layout occurs, runs on ranks here: in every
precision in turn, in every other plan with the inputs of recomputed blocks on the host. What each
rank sent over each axis in a step, what it holds of each term after it, and what it keeps of
activations after every action must equal `cost/` to the byte; the most that activations take at a
time may be 2 % off. Each plan leaves one JSON line. Exit 1 where one differs.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from echelon.core.plan import Plan, Precision, Recompute
from echelon.core.version import source_hash
from echelon.cost.activations.timeline import RankActivations
from echelon.launch.local.supervisor import RankPool
from echelon.proof.claims.predictions import bytes_by_axis, bytes_by_term
from echelon.proof.run import RankRunner, offloaded_to
from tests.walks.matrix.cases import MAX_WORLD, MatrixCase
from tests.walks.matrix.walk import append_line, every_case, lines_of
from tests.walks.plans.bytes_recorded import RankBytes, record_rank, step_data

PRECISIONS: tuple[Precision, ...] = (
    Precision(),
    Precision(parameters="bf16"),
    Precision(parameters="fp64", gradients="fp64", reduction="fp64", master="fp64"),
    Precision(parameters="bf16", gradients="bf16", reduction="bf16"),
    Precision(parameters="fp16", gradients="fp32", reduction="fp16"),
)
"""What the plans of a sample compute in, in turn."""

AS_TRAINED = "echelon.training.subject:build_as_trained"
"""The engine with pieces of the sizes that formulas of activations count with."""

_CANDIDATES_PER_PLAN = 4
"""For each plan of a sample so many cases are looked at for choices that have not been met."""


def sample(count: int, seed: int, max_world: int = MAX_WORLD) -> list[Plan]:
    """Return `count` distinct plans: those that bring in a new choice first, then any."""
    generator = random.Random(seed)
    cases = [case for case in every_case() if case.world_size <= max_world]
    generator.shuffle(cases)
    plans: list[Plan] = []
    rest: list[MatrixCase] = []
    met: set[str] = set()
    for place, case in enumerate(cases):
        # To build a plan may be to search its schedule: not all of them are looked at.
        if len(plans) == count or place >= _CANDIDATES_PER_PLAN * count:
            rest += cases[place:]
            break
        plan = case.plan()
        found = set(choices(plan))
        if found <= met:
            rest.append(case)
            continue
        met |= found
        plans.append(_vary_precision(plan, len(plans)))
    by_kind: dict[type, list[MatrixCase]] = {}
    for case in rest:
        by_kind.setdefault(type(case), []).append(case)
    while len(plans) < count and any(by_kind.values()):
        for kind in by_kind.values():
            if kind and len(plans) < count:
                plans.append(_vary_precision(kind.pop().plan(), len(plans)))
    generator.shuffle(plans)
    return plans


def _vary_precision(plan: Plan, seed: int) -> Plan:
    """Return the plan in the precision of its turn, stored inputs on the host in every other."""
    recompute = plan.layout.recompute
    if recompute.policy == "full" and seed % 2:
        recompute = Recompute(policy="full", every=recompute.every, offload="host")
    mathematics = replace(plan.mathematics, precision=PRECISIONS[seed % len(PRECISIONS)])
    layout = replace(plan.layout, recompute=recompute)
    return replace(plan, mathematics=mathematics, layout=layout)


def choices(plan: Plan) -> Iterator[str]:
    """Yield, in words, what a plan chooses of all that there is to choose."""
    layout, mesh, model = plan.layout, plan.mesh, plan.model
    for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep"):
        if getattr(mesh, axis) > 1:
            yield f"{axis} > 1"
    zero, experts, balance = layout.zero, layout.experts, plan.mathematics.balance
    yield f"ZeRO {zero.stage}, {zero.accumulate}"
    yield f"optimizer {plan.mathematics.optimizer.kind} on {zero.optimizer_offload}"
    yield f"parameters on {zero.parameter_offload}"
    yield f"schedule {layout.pipeline.schedule if mesh.pp > 1 else 'none'}"
    yield f"recompute {layout.recompute.policy}, every {layout.recompute.every}"
    yield f"sequence parallel {layout.sequence_parallel}, tied {model.tied}"
    yield f"tensor overlap {layout.tp_overlap}"
    yield f"documents {plan.mathematics.documents}"
    yield f"norm {model.norm}, positions {model.positions}, heads normed {model.qk_norm}"
    yield f"dropout {model.dropout}, soft cap {model.soft_cap}, window {model.window is not None}"
    if mesh.cp > 1:
        yield f"context {layout.context.kind} {layout.context.ulysses_degree}"
    if model.latent is not None:
        yield "latent attention"
    if model.experts is not None:
        yield f"experts {experts.dispatch}, padded {experts.padded}, chunks {experts.chunks}"
        yield f"pieces {experts.expert_tp}, ZeRO of experts {experts.zero_stage}"
        yield f"router {model.experts.router}, drop {balance.capacity_factor and balance.drop}"
        yield f"balance {balance.kind} over {balance.aux_over}, route {balance.route}"


ALLOWED = 0.02
"""How far the most that activations take at a time may be from the formula's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BytesComparison:
    """Say how one plan fared: numbers compared, what differs, and the peaks of the worst rank."""

    plan: str
    """Name of the plan."""
    plan_hash: str
    """Hash of its content."""
    code: str
    """Hash of the code that it ran with."""
    world_size: int
    """Its ranks."""
    sent: int
    """Numbers of bytes sent that were compared."""
    held: int
    """Numbers of bytes held that were compared."""
    kept: int
    """Actions whose bytes kept were compared."""
    actions: int
    """Actions that the ranks ran."""
    kept_bytes: int
    """The most bytes kept after an action."""
    predicted_peak: float
    """The most bytes at any time, as predicted."""
    recorded_peak: int
    """The most bytes at any time, as recorded."""
    problems: tuple[str, ...]
    """What differs."""

    @property
    def peak_error(self) -> float:
        """Return how far the predicted peak is off, relative to the recorded one."""
        return self.predicted_peak / max(self.recorded_peak, 1) - 1.0

    @property
    def wrong(self) -> bool:
        """Return whether something differs, or the peak by more than it may."""
        return bool(self.problems) or abs(self.peak_error) > ALLOWED


def compare_plan(plan: Plan, run_ranks: RankRunner, code: str = "") -> BytesComparison:
    """Run a plan on its ranks and compare all that it recorded with the formulas."""
    with tempfile.TemporaryDirectory(prefix="echelon-bytes-") as directory:
        argument = {"plan": offloaded_to(plan, directory).to_json(), "subject": AS_TRAINED}
        labels = [plan.mesh.label(rank) for rank in range(plan.mesh.world_size)]
        recorded: Sequence[RankBytes] = run_ranks(  # type: ignore[assignment]
            f"{record_rank.__module__}:record_rank", argument, plan.mesh.world_size, labels=labels
        )
    return compare(plan, recorded, code)


def compare(plan: Plan, recorded: Sequence[RankBytes], code: str = "") -> BytesComparison:
    """Compare what the ranks of a plan recorded with the formulas."""
    problems: list[str] = []
    sent = held = actions = 0
    peaks: list[tuple[float, int]] = []
    for rank, one in enumerate(recorded):
        data = step_data(plan, rank, recorded)
        load = data.load if plan.mesh.ep > 1 else None
        axes = bytes_by_axis(plan, rank, skipped=one.skipped, load=load)
        terms = bytes_by_term(plan, rank)
        problems += _differences(f"rank {rank} sends over", axes, one.sent)
        problems += _differences(f"rank {rank} holds of", terms, one.held)
        sent, held = sent + len({*axes, *one.sent}), held + len({*terms, *one.held})
        told = list(RankActivations(plan, rank, data).actions())
        actions += len(told)
        for want, got in zip(told, one.actions, strict=True):
            if str(want.action) != got.action or want.kept != got.kept_bytes:
                problems.append(
                    f"rank {rank} keeps {got.kept_bytes} after {got.action}, "
                    f"{want.kept} after {want.action} by the formulas"
                )
        planned = max((float(want.peak) for want in told), default=0.0)
        peaks.append((planned, max((got.peak_bytes for got in one.actions), default=0)))
    predicted, found = max(peaks, key=lambda pair: abs(pair[0] / max(pair[1], 1) - 1.0))
    return BytesComparison(
        plan=plan.name,
        plan_hash=plan.content_hash(),
        code=code,
        world_size=plan.mesh.world_size,
        sent=sent,
        held=held,
        kept=actions,
        actions=actions,
        kept_bytes=max((got.kept_bytes for one in recorded for got in one.actions), default=0),
        predicted_peak=predicted,
        recorded_peak=found,
        problems=tuple(problems),
    )


def _differences(what: str, wanted: Counter[str], found: Mapping[str, int]) -> list[str]:
    return [
        f"{what} {name}: {found.get(name, 0)}, {wanted[name]} by the formulas"
        for name in sorted({*wanted, *found})
        if found.get(name, 0) != wanted[name]
    ]


def compare_plans(plans: Sequence[Plan], results: Path | None) -> list[BytesComparison]:
    """Walk the plans, one line each; those that `results` has of this very code are not run."""
    code = source_hash()[:16]
    lines = [{**line, "problems": tuple(line["problems"])} for line in lines_of(results, code)]
    done = {line["plan_hash"]: BytesComparison(**line) for line in lines}
    walked: list[BytesComparison] = []
    with RankPool(max((plan.mesh.world_size for plan in plans), default=1)) as pool:
        for number, plan in enumerate(plans, start=1):
            one = done.get(plan.content_hash()) or compare_plan(plan, pool.run, code)
            walked.append(one)
            word = "DIFFERS" if one.wrong else "equal"
            print(f"{number:4}/{len(plans)}  {word:7}  {one.peak_error:+7.2%}  {one.plan}")
            for problem in one.problems[:3]:
                print(f"      {problem}")
            sys.stdout.flush()
            if plan.content_hash() not in done:
                append_line(results, asdict(one))
    return walked


def summary(walked: Sequence[BytesComparison], plans: Sequence[Plan]) -> str:
    """Return a table of what was compared, and of the choices that occurred."""
    equal = [one for one in walked if not one.problems]
    near = [one for one in walked if abs(one.peak_error) <= ALLOWED]
    errors = sorted(abs(one.peak_error) for one in walked) or [0.0]
    occurred = {choice for plan in plans for choice in choices(plan)}
    precisions = {str(plan.mathematics.precision) for plan in plans}
    rows = (
        ("plans", f"{len(walked)}, {len({one.plan_hash for one in walked})} distinct"),
        ("choices that occur", f"{len(occurred)}, in {len(precisions)} precisions"),
        ("sums of bytes sent, by axis", f"{sum(one.sent for one in walked):,}"),
        ("sums of bytes held, by term", f"{sum(one.held for one in walked):,}"),
        ("bytes kept after an action", f"{sum(one.kept for one in walked):,}"),
        ("plans with all of these equal", f"{len(equal)} of {len(walked)}"),
        ("plans with the peak within 2 %", f"{len(near)} of {len(walked)}"),
        ("error of the peak", f"median {errors[len(errors) // 2]:.2%}, most {errors[-1]:.2%}"),
    )
    return "\n".join(f"{name:32}{value}" for name, value in rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Walk a sample; return 1 where something differs."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.walks.plans.bytes_walk", description=__doc__
    )
    parser.add_argument("--plans", type=int, default=20, help="how many plans to walk (20)")
    parser.add_argument("--seed", type=int, default=1, help="of the sample (1)")
    parser.add_argument("--max-world", type=int, default=MAX_WORLD, help="most ranks of a plan (8)")
    parser.add_argument("--results", type=Path, help="JSON lines; what is there is not run again")
    options = parser.parse_args(arguments)
    started = time.monotonic()
    plans = sample(options.plans, options.seed, options.max_world)
    walked = compare_plans(plans, options.results)
    print(f"\n{summary(walked, plans)}\n{time.monotonic() - started:.0f} s")
    return int(any(one.wrong for one in walked))


if __name__ == "__main__":
    sys.exit(main())
