"""Predicted = executed, in bytes: ``python -m echelon.prove.bytes_walk --plans 200 --results F``.

A sample of the plan matrix (`bytes_sample.py`) runs on ranks here. What each rank sent over each
axis in a step, what it holds of each term after it, and what it keeps of activations after every
action must equal `cost/` to the byte; the most that activations take at a time may be 2 % off. Each
plan leaves one JSON line. Exit 1 where one differs.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from echelon.core.plan import Plan
from echelon.cost.activations import RankActivations
from echelon.launch.pool import RankPool
from echelon.prove.bytes_recorded import RankBytes, record_rank, step_data
from echelon.prove.bytes_sample import choices, sample
from echelon.prove.cases import MAX_WORLD
from echelon.prove.matrix import code_hash
from echelon.prove.promises import bytes_by_axis, bytes_by_term
from echelon.prove.run import OUR_ENGINE, RankRunner

ALLOWED = 0.02
"""How far the most that activations take at a time may be from the formula's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Walked:
    """Say how one plan fared: numbers compared, what differs, and the peaks of the worst rank.

    `kept` is the most that is kept after an action, `predicted` and `recorded` the most that there
    is at any time.
    """

    plan: str
    plan_hash: str
    code: str
    world_size: int
    sent: int
    held: int
    kept: int
    actions: int
    kept_bytes: int
    predicted_peak: float
    recorded_peak: int
    problems: tuple[str, ...]

    @property
    def peak_error(self) -> float:
        """Return how far the predicted peak is off, relative to the recorded one."""
        return self.predicted_peak / max(self.recorded_peak, 1) - 1.0


def walk_plan(plan: Plan, run_ranks: RankRunner, code: str = "") -> Walked:
    """Run a plan on its ranks and compare all that it recorded with the formulas."""
    with tempfile.TemporaryDirectory(prefix="echelon-bytes-") as directory:
        zero = plan.layout.zero
        if "nvme" in (zero.optimizer_offload, zero.parameter_offload):
            zero = replace(zero, offload_dir=directory)
        there = replace(plan, layout=replace(plan.layout, zero=zero))
        argument = {"plan": there.to_json(), "subject": OUR_ENGINE}
        labels = [plan.mesh.label(rank) for rank in range(plan.mesh.world_size)]
        recorded: Sequence[RankBytes] = run_ranks(  # type: ignore[assignment]
            f"{record_rank.__module__}:record_rank", argument, plan.mesh.world_size, labels=labels
        )
    return compare(plan, recorded, code)


def compare(plan: Plan, recorded: Sequence[RankBytes], code: str = "") -> Walked:
    """Compare what the ranks of a plan recorded with the formulas."""
    problems: list[str] = []
    sent = held = kept = actions = most_kept = 0
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
            kept += 1
            if str(want.action) != got.action or want.kept != got.kept_bytes:
                problems.append(
                    f"rank {rank} keeps {got.kept_bytes} after {got.action}, "
                    f"{want.kept} after {want.action} by the formulas"
                )
        most_kept = max(most_kept, max((a.kept_bytes for a in one.actions), default=0))
        planned = max((float(want.peak) for want in told), default=0.0)
        peaks.append((planned, max((got.peak_bytes for got in one.actions), default=0)))
    predicted, found = max(peaks, key=lambda pair: abs(pair[0] / max(pair[1], 1) - 1.0))
    return Walked(
        plan=plan.name,
        plan_hash=plan.content_hash(),
        code=code,
        world_size=plan.mesh.world_size,
        sent=sent,
        held=held,
        kept=kept,
        actions=actions,
        kept_bytes=most_kept,
        predicted_peak=predicted,
        recorded_peak=found,
        problems=tuple(problems),
    )


def _differences(what: str, wanted: dict[str, int], found: object) -> list[str]:
    assert isinstance(found, dict)
    return [
        f"{what} {name}: {found.get(name, 0)}, {wanted.get(name, 0)} by the formulas"
        for name in sorted({*wanted, *found})
        if found.get(name, 0) != wanted.get(name, 0)
    ]


def walk(plans: Sequence[Plan], results: Path | None) -> list[Walked]:
    """Walk the plans, one line each; those that `results` has of this very code are not run."""
    code = code_hash()
    done = _read(results, code)
    walked: list[Walked] = []
    with RankPool(max((plan.mesh.world_size for plan in plans), default=1)) as pool:
        for number, plan in enumerate(plans, start=1):
            one = done.get(plan.content_hash()) or walk_plan(plan, pool.run, code)
            walked.append(one)
            wrong = bool(one.problems) or abs(one.peak_error) > ALLOWED
            word = "DIFFERS" if wrong else "equal"
            print(f"{number:4}/{len(plans)}  {word:7}  {one.peak_error:+7.2%}  {one.plan}")
            for problem in one.problems[:3]:
                print(f"      {problem}")
            sys.stdout.flush()
            if results is not None and plan.content_hash() not in done:
                with results.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(one)) + "\n")
    return walked


def _read(results: Path | None, code: str) -> dict[str, Walked]:
    if results is None or not results.exists():
        return {}
    lines = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    found = [Walked(**{**line, "problems": tuple(line["problems"])}) for line in lines]
    return {one.plan_hash: one for one in found if one.code == code}


def summary(walked: Sequence[Walked], plans: Sequence[Plan]) -> str:
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
    parser = argparse.ArgumentParser(prog="python -m echelon.prove.bytes_walk", description=__doc__)
    parser.add_argument("--plans", type=int, default=20, help="how many plans to walk (20)")
    parser.add_argument("--seed", type=int, default=1, help="of the sample (1)")
    parser.add_argument("--max-world", type=int, default=MAX_WORLD, help="most ranks of a plan (8)")
    parser.add_argument("--results", type=Path, help="JSON lines; what is there is not run again")
    options = parser.parse_args(arguments)
    started = time.monotonic()
    plans = sample(options.plans, options.seed, options.max_world)
    walked = walk(plans, options.results)
    print(f"\n{summary(walked, plans)}\n{time.monotonic() - started:.0f} s")
    wrong = [one for one in walked if one.problems or abs(one.peak_error) > ALLOWED]
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
