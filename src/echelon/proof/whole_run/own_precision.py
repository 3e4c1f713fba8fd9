# SPDX-License-Identifier: Apache-2.0
"""The trainer in the run's own precision: overflows at known steps, and resumes between them.

The trainer takes a few steps of the shrunk plan, and resumes from some of their checkpoints under
the same layout. Nothing depends on rounding: a resume restores every number of its checkpoint, and
the steps after it have the same bits. An infinite number is put into a gradient of some steps. The
independent rule gives the scale of each step (`proof/independent/optimizers.py`). Its window is so
short that the scale grows between two overflows, after a resume.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

from echelon.core.plan import Plan
from echelon.core.rulebook.prove import PROVE_TRAINER_RESUME, PROVE_TRAINER_SCALE
from echelon.proof.claims.checks import Check
from echelon.proof.claims.claims import judged
from echelon.proof.claims.tolerance import is_low
from echelon.proof.independent.optimizers import ScaleOfLoss
from echelon.proof.replays.runs import RankRunner
from echelon.proof.run import offloaded_to
from echelon.proof.shrink import shrink
from echelon.proof.verdict import ProofPass
from echelon.proof.whole_run.one_device import (
    equal_check,
    events_of_runs,
    pass_of,
    texts_for,
    with_bytes,
)

WRITE_DATA = "echelon.training.whole_run:write_data"
RESUME = "echelon.training.whole_run:train_and_resume"
NUM_STEPS = 8
SAVED_AFTER = (3, 5)
"""Steps before the checkpoints from which a run goes on: an overflow, or growth, comes next."""
OVERFLOWS = (1, 3, 6)
"""Steps, counted from 0, whose gradients are not finite."""
_WINDOW = 2  # steps until the scale doubles
_LARGEST_SCALE = 16.0  # of the first step, so that nothing else overflows
_LONGEST_HISTORY = 3  # steps that scales of fp8 look back on, and overflows of a hysteresis
_SCALES, _RESTORED, _SAME = (
    "loss scale of every step, and the steps that are skipped",
    "state that a resume restores, bit for bit",
    "steps after a resume, and their last state, bit for bit",
)

_Run: TypeAlias = Sequence[Sequence[Mapping[str, Any]]]
"""The events of each rank."""


def has_own_run(plan: Plan) -> bool:
    """True if a run in the plan's own precision has digits or scales that float64 does not show."""
    precision = plan.mathematics.precision
    return is_low(plan) or precision.is_fp8 or precision.loss_scaling != "none"


def own_precision_pass(plan: Plan, *, run_ranks: RankRunner, train: str = RESUME) -> ProofPass:
    """Prove the trainer in the precision of `plan`, which loses no island."""
    small = _with_short_histories(with_bytes(shrink(plan)))
    texts, mesh = texts_for(small), small.mesh
    with tempfile.TemporaryDirectory(prefix="echelon-prove-") as folder:
        argument = {
            **texts.argument(folder),
            "plan": offloaded_to(small, folder).to_json(),
            "num_steps": NUM_STEPS,
            "saved_after": list(SAVED_AFTER),
            "overflows": list(overflows_of(small)),
            "validation_batches": 1,
        }
        run_ranks(WRITE_DATA, argument, 1, labels=[""])
        labels = [mesh.label(rank) for rank in range(mesh.world_size)]
        run_ranks(train, argument, len(labels), labels=labels)
        runs = events_of_runs(Path(folder), 1 + len(SAVED_AFTER), len(labels))
    precision = small.mathematics.precision
    claims = (
        judged(PROVE_TRAINER_SCALE, _SCALES, list(_scale_checks(small, runs[0]))),
        judged(PROVE_TRAINER_RESUME, _RESTORED, list(_restored_checks(runs))),
        judged(PROVE_TRAINER_RESUME, _SAME, list(_step_checks(runs))),
    )
    return pass_of(precision.parameters + ", fp8" * precision.is_fp8, claims, "after {} steps")


def overflows_of(plan: Plan) -> tuple[int, ...]:
    """Steps whose gradients are to overflow: none where that would end a run."""
    return OVERFLOWS if plan.mathematics.precision.loss_scaling != "none" else ()


def _with_short_histories(plan: Plan) -> Plan:
    """The plan with a scale that is small and grows soon, and histories of few steps."""
    precision = plan.mathematics.precision
    scale = min(precision.loss_scale, _LARGEST_SCALE)
    precision = replace(
        precision,
        loss_scale=scale,
        loss_scale_min=min(precision.loss_scale_min, scale / 2 ** len(OVERFLOWS)),
        loss_scale_window=_WINDOW,
        loss_scale_hysteresis=min(precision.loss_scale_hysteresis, _LONGEST_HISTORY),
        fp8_history=min(precision.fp8_history, _LONGEST_HISTORY),
    )
    return replace(plan, mathematics=replace(plan.mathematics, precision=precision))


def predicted_scales(plan: Plan) -> list[float]:
    """The scale of each step, and of the one that would follow."""
    rule = ScaleOfLoss.first(plan.mathematics.precision)
    scales = [rule.scale]
    for step in range(NUM_STEPS):
        rule.after(overflow=step in overflows_of(plan))
        scales.append(rule.scale)
    return scales


def _scale_checks(plan: Plan, run: _Run) -> Iterator[Check]:
    scales, overflows = predicted_scales(plan), overflows_of(plan)
    for rank, events in enumerate(run):
        steps = {event["step"] - 1: event for event in events if event["kind"] == "step"}
        for step in range(NUM_STEPS):
            event = steps.get(step, {})
            for key, right in (("loss_scale", scales[step]), ("skipped", step in overflows)):
                subject = f"{key.replace('_', ' ')} on rank {rank}"
                yield equal_check(step, subject, event.get(key), right, rank)
        states = {event["step"]: event["state"] for event in events if event["kind"] == "state"}
        last = states[NUM_STEPS]["loss_scale.value"]
        yield equal_check(NUM_STEPS, f"last loss scale on rank {rank}", last, scales[-1], rank)
        # Islands synchronize after a skipped step as after any other.
        for step in overflows if not plan.mathematics.local_sgd.active else ():
            before, after = (_without_scales(states[count]) for count in (step, step + 1))
            yield from _state_checks(step, rank, after, before)


def _without_scales(state: Mapping[str, Any]) -> dict[str, Any]:
    """The entries that a skipped step does not change."""
    return {
        name: value
        for name, value in state.items()
        if not name.startswith(("loss_scale.", "fp8_scales."))
    }


def _restored_checks(runs: Sequence[_Run]) -> Iterator[Check]:
    """Compare the state of a resumed run with the state that was saved."""
    for step, resumed in zip(SAVED_AFTER, runs[1:], strict=True):
        for rank, events in enumerate(resumed):
            saved = next(
                event["state"]
                for event in runs[0][rank]
                if event["kind"] == "state" and event["step"] == step
            )
            yield from _state_checks(step, rank, events[0]["state"], saved)


def _step_checks(runs: Sequence[_Run]) -> Iterator[Check]:
    for start, resumed in zip(SAVED_AFTER, runs[1:], strict=True):
        for rank, events in enumerate(resumed):
            right = {(event["kind"], event["step"]): event for event in runs[0][rank]}
            for event in events:
                step = event["step"]
                if event["kind"] == "state" and step > start:
                    wanted = right["state", step]["state"]
                    yield from _state_checks(step, rank, event["state"], wanted)
                elif event["kind"] == "step":
                    for key, value in event.items():
                        subject = f"{key.replace('_', ' ')} on rank {rank}"
                        yield equal_check(step, subject, value, right["step", step][key], rank)


def _state_checks(
    step: int, rank: int, state: Mapping[str, Any], right: Mapping[str, Any]
) -> Iterator[Check]:
    for position, name in enumerate(sorted({*state, *right})):
        subject = f"{name} on rank {rank}"
        yield equal_check(step, subject, state.get(name), right.get(name), position)
