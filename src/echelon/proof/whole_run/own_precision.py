# SPDX-License-Identifier: Apache-2.0
"""The trainer in the run's own precision: overflows at known steps, and resumes between them.

The trainer takes a few steps of the shrunk plan, and resumes from some of their checkpoints under
the same layout. Nothing depends on rounding: a resume restores every number of its checkpoint, and
the steps after it have the same bits. A gradient of some steps gets an infinite number or NaN, in
the first parameter, the last, or one between. The independent rule gives the scale of each step
(`proof/independent/optimizers.py`). Its window is so short that the scale grows between two
overflows, after a resume, and its floor so high that it stops a fall. At the end a run starts from
exported weights.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch

from echelon.core.errors import EchelonError, first_line
from echelon.core.plan import DType, Plan
from echelon.core.rulebook.precision import LOSS_SCALE_EXHAUSTED
from echelon.core.rulebook.prove import (
    PROVE_TRAINER_IMPORT,
    PROVE_TRAINER_RESUME,
    PROVE_TRAINER_SCALE,
)
from echelon.core.rulebook.run import LOSS_NOT_FINITE
from echelon.proof.claims.checks import Check, exact_check
from echelon.proof.claims.claims import ClaimResult, judged
from echelon.proof.claims.tolerance import is_low
from echelon.proof.independent.fp8 import TABLE, TABLE_E5M2, fitting
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
_SCALES, _SCALES_OF_8_BITS, _RESTORED, _SAME, _STARTED = (
    "loss scale of every step, and the steps that are skipped",
    "scales of 8 bits after every step, from the steps that they look back on",
    "state that a resume restores, bit for bit",
    "steps after a resume, and their last state, bit for bit",
    "start of a run from exported weights, bit for bit",
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
            "exported": exported_in(small),
        }
        run_ranks(WRITE_DATA, argument, 1, labels=[""])
        labels = [mesh.label(rank) for rank in range(mesh.world_size)]
        ended = _ended(partial(run_ranks, train, argument, len(labels), labels=labels))
        count = 1 + len(SAVED_AFTER) + (argument["exported"] is not None)
        runs = events_of_runs(Path(folder), 1 if ended else count, len(labels))
    precision = small.mathematics.precision
    claims = _claims(small, runs, ended)
    return pass_of(precision.parameters + ", fp8" * precision.is_fp8, claims, "after {} steps")


def exported_in(plan: Plan) -> DType | None:
    """Dtype of the exported weights that a run starts from; None for adapters and islands.

    An export has merged adapters, and each island has other weights.
    """
    numbers = plan.mathematics
    without = numbers.model.lora is not None or numbers.local_sgd.active
    return None if without else numbers.precision.master


def _ended(run: Callable[[], object]) -> str:
    """Error by which an overflow ends the run; empty for a complete run."""
    try:
        run()
    except EchelonError as error:
        line = first_line(error)
        if not any(rule.id in line for rule in (LOSS_NOT_FINITE, LOSS_SCALE_EXHAUSTED)):
            raise
        return line.rpartition("RunFailed: ")[2]
    return ""


def _claims(plan: Plan, runs: Sequence[_Run], ended: str) -> tuple[ClaimResult, ...]:
    if ended:
        checks = list(_scale_checks(plan, runs[0], ended))
        return (judged(PROVE_TRAINER_SCALE, _SCALES, checks),)
    resumed, started = runs[: 1 + len(SAVED_AFTER)], runs[1 + len(SAVED_AFTER) :]
    claims = [judged(PROVE_TRAINER_SCALE, _SCALES, list(_scale_checks(plan, runs[0])))]
    if plan.mathematics.precision.has_tensor_scales:
        claims.append(judged(PROVE_TRAINER_SCALE, _SCALES_OF_8_BITS, list(_fp8_checks(plan, runs))))
    claims += [
        judged(PROVE_TRAINER_RESUME, _RESTORED, list(_restored_checks(resumed))),
        judged(PROVE_TRAINER_RESUME, _SAME, list(_step_checks(resumed))),
    ]
    for run in started:
        checks = list(_start_checks(plan, runs[0], run))
        claims.append(judged(PROVE_TRAINER_IMPORT, _STARTED, checks))
    return tuple(claims)


def overflows_of(plan: Plan) -> tuple[int, ...]:
    """Steps whose gradients are to overflow: none where that would end a run."""
    return OVERFLOWS if plan.mathematics.precision.loss_scaling != "none" else ()


def _with_short_histories(plan: Plan) -> Plan:
    """The plan with a scale that is small and grows soon, and histories of few steps."""
    precision = plan.mathematics.precision
    precision = replace(
        precision,
        loss_scale=min(precision.loss_scale, _LARGEST_SCALE),
        loss_scale_min=0.0,
        loss_scale_window=_WINDOW,
        loss_scale_hysteresis=min(precision.loss_scale_hysteresis, _LONGEST_HISTORY),
        fp8_history=min(precision.fp8_history, _LONGEST_HISTORY),
    )
    small = replace(plan, mathematics=replace(plan.mathematics, precision=precision))
    # Half a step above the least scale without a floor: the last fall is cut short, and no other.
    floor = 1.5 * min(predicted_scales(small))
    if floor > precision.loss_scale:
        return small
    precision = replace(precision, loss_scale_min=floor)
    return replace(small, mathematics=replace(small.mathematics, precision=precision))


def predicted_scales(plan: Plan) -> list[float]:
    """The scale of each step, and of the one that would follow."""
    rule = ScaleOfLoss.first(plan.mathematics.precision)
    scales = [rule.scale]
    for step in range(NUM_STEPS):
        rule.after(overflow=step in overflows_of(plan))
        scales.append(rule.scale)
    return scales


def _scale_checks(plan: Plan, run: _Run, ended: str = "") -> Iterator[Check]:
    """Compare the scale and the decision of each step; `ended` is the error that ends the run."""
    scales, overflows = predicted_scales(plan), overflows_of(plan)
    for rank, events in enumerate(run):
        if ended and not events:
            continue
        steps = {event["step"] - 1: event for event in events if event["kind"] == "step"}
        for step in range(NUM_STEPS):
            event = steps.get(step, {})
            if ended and not event:
                yield exact_check(step, f"step on rank {rank}", f"it ends the run: {ended}", rank)
                break
            for key, right in (("loss_scale", scales[step]), ("skipped", step in overflows)):
                subject = f"{key.replace('_', ' ')} on rank {rank}"
                yield equal_check(step, subject, event.get(key), right, rank)
        states = {event["step"]: event["state"] for event in events if event["kind"] == "state"}
        last = states.get(NUM_STEPS, {}).get("loss_scale.value")
        if not ended:
            yield equal_check(NUM_STEPS, f"last loss scale on rank {rank}", last, scales[-1], rank)
        # Islands synchronize after a skipped step as after any other.
        for step in overflows if not plan.mathematics.local_sgd.active else ():
            if not {step, step + 1} <= states.keys():
                break
            before, after = (_without_scales(states[count]) for count in (step, step + 1))
            yield from _state_checks(step, rank, after, before)


def _without_scales(state: Mapping[str, Any]) -> dict[str, Any]:
    """The entries that a skipped step does not change."""
    return {
        name: value
        for name, value in state.items()
        if not name.startswith(("loss_scale.", "fp8_scales."))
    }


def _fp8_checks(plan: Plan, runs: Sequence[_Run]) -> Iterator[Check]:
    """Compare the history of scales of whole tensors, and the scales, with the rule."""
    precision = plan.mathematics.precision
    of_gradients = TABLE_E5M2 if precision.fp8_gradients == "e5m2" else TABLE
    for rank, events in enumerate(runs[0]):
        before: list[Any] = []
        for event in (event for event in events if event["kind"] == "state"):
            step, state = event["step"], event["state"]
            history, weights = (state[f"fp8_scales.{name}"] for name in ("history", "weights"))
            right = [*before, *history[-1:]][-precision.fp8_history :]
            problem = f"{len(history)} steps instead of {len(right)}, or others"
            subject = f"steps that scales of 8 bits look back on, on rank {rank}"
            yield exact_check(step, subject, problem * (history != right), rank)
            before = history
            if not history:
                continue
            largest = [*torch.tensor(right).amax(0), torch.tensor(weights)]
            tables = {"inputs": TABLE, "gradients": of_gradients, "weights": TABLE}
            for place, (kind, table) in enumerate(tables.items()):
                subject = f"scales of {kind} in 8 bits on rank {rank}"
                scales = fitting(largest[place].double(), table).tolist()
                yield equal_check(step, subject, state["fp8_scales.scales"][place], scales, rank)


def _start_checks(plan: Plan, trained: _Run, started: _Run) -> Iterator[Check]:
    """Compare the start of a run from exported weights with the end of the run that wrote them.

    The validation losses are equal, too, except with scales of whole tensors or biases of routers,
    which an export does not have.
    """
    numbers = plan.mathematics
    biased = numbers.model.experts is not None and numbers.balance.has_bias
    for rank, events in enumerate(started):
        last = [event["state"] for event in trained[rank] if event["kind"] == "state"][-1]
        for position, (name, value) in enumerate(events[0]["state"].items()):
            if name.startswith("parameters "):
                yield equal_check(0, f"{name} on rank {rank}", value, last.get(name), position)
        if not (biased or numbers.precision.has_tensor_scales):
            losses = [
                next(event["loss"] for event in run if event["kind"] == "validation")
                for run in (events, trained[rank][::-1])
            ]
            yield equal_check(0, f"validation loss on rank {rank}", losses[0], losses[1], rank)


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
