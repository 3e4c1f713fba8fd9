# SPDX-License-Identifier: Apache-2.0
"""Run the trainer as a user does, in small, and compare every number that it says with one device.

The trainer reads prepared data from files, validates, saves in the middle and at the end. Another
layout with the same mathematics on the same ranks resumes from the middle and goes on to the same
end. Its last checkpoint is read on one device, which writes a few tokens, and may be exported to
other tools (`exported.py`). The functions of the trainer are named, for a proof imports no
training. Each island of local SGD is a training of the independent implementation over its part of
the samples; islands synchronize by the formula of the oracle (`proof/oracle/local_sgd.py`).
"""

from __future__ import annotations

import json
import math
import random
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from echelon.config.rules.finders import require_trainable
from echelon.core.axis import MESH_AXES
from echelon.core.errors import ConfigError
from echelon.core.mesh import Mesh
from echelon.core.messages.notes import PROGRESS
from echelon.core.plan import DType, Layout, Pipeline, Plan, Recompute, Zero
from echelon.core.rulebook import prove as rules
from echelon.core.rulebook.config import BAD_ARGUMENT
from echelon.cost.seconds.stages import split_layers
from echelon.layout.islands import island_of, island_plan, without_losses
from echelon.layout.stage import with_rounding
from echelon.proof.claims.checks import Check, exact_check, relative_error
from echelon.proof.claims.claims import ClaimResult, judged
from echelon.proof.evidence.evidence import FLOAT64_TOLERANCE
from echelon.proof.evidence.fits import FLOOR
from echelon.proof.independent.optimizers import has_formula
from echelon.proof.independent.training import IndependentRun, IndependentStep
from echelon.proof.oracle.local_sgd import as_sent, meets, outer_formula
from echelon.proof.run import OUR_ENGINE, RankRunner, mesh_text, offloaded_to, prove
from echelon.proof.shrink import shrink
from echelon.proof.sum_bounds import with_exact_sums
from echelon.proof.verdict import Proof, ProofPass
from echelon.proof.whole_run.exported import Export, RunExports, exports_of, has_own_layout
from echelon.proof.whole_run.one_device import (
    END_OF_DOCUMENT,
    PROMPTS,
    OneDeviceRun,
    RunTexts,
    batch_of_step,
    continuation,
    equal_check,
    events_of_runs,
    held_out_loss,
    num_samples_of,
    pass_of,
    run_on_one_device,
    texts_for,
    with_bytes,
)
from echelon.proof.whole_run.own_precision import has_own_run, own_precision_pass

_OURS = "echelon.training.whole_run"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerTargets:
    """Name the functions of a trainer, "module:function", that its ranks call in turn."""

    write_data: str = f"{_OURS}:write_data"
    train: str = f"{_OURS}:train"
    read_back: str = f"{_OURS}:read_back"
    export: str = f"{_OURS}:export"


OUR_TRAINER = TrainerTargets()

NUM_STEPS = 3
"""Optimizer steps of the run; an epoch ends after one and a half."""
SAVED_AFTER = 1
"""Optimizer steps before the save that is resumed from: two more follow it."""
VALIDATED_AFTER = ((0, NUM_STEPS), (SAVED_AFTER, NUM_STEPS))
"""Optimizer steps before each validation: a run validates where it starts, and at its end."""
_WRITTEN = 4  # tokens written after each prompt
_SUMS = ("loss", "grad_norm", "learning_rate")
_STEPS, _VALIDATIONS, _RESUMED = (
    "steps of the trainer over its own data",
    "validation losses of the trainer",
    "steps and validation after a resume under another layout",
)
OVER_A_CACHE = "over a cache"
"""The way to write a text that ends with its document."""
_READ, _TEXT = "weights that are read from the last checkpoint", "text that these weights write"


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeRun:
    """The events of both runs, the weights and texts that were read back, and one device."""

    plans: tuple[Plan, Plan]
    events: tuple[list[list[dict[str, Any]]], list[list[dict[str, Any]]]]
    """Of each run, by rank."""
    weights: Mapping[str, torch.Tensor]
    written: Mapping[str, list[list[int]]]
    """The tokens after each prompt, by the way to write them."""
    right: OneDeviceRun
    exported: tuple[ClaimResult, ...]
    """The claims about exports; empty without exports."""


def prove_with_whole_run(
    plan: Plan,
    *,
    run_ranks: RankRunner,
    subject: str | None = None,
    late: bool = False,
    own_precision: bool = True,
    export: bool = False,
) -> Proof:
    """Prove a plan, as `echelon prove` does; `own_precision` and `late` as in `proof.run.prove`.

    If all of it holds, and no other engine is the subject, a whole run of the trainer follows, and
    a run in a precision of few digits with overflows and resumes. With `export` the whole run ends
    with exports, and always if adapters are merged or a family of transformers has another layout
    of weights. ConfigError for `export` if no whole run follows.
    """
    engine = subject or OUR_ENGINE
    apart = plan.mathematics.updates.is_asynchronous
    ours = subject is None and has_formula(plan.mathematics.optimizer) and not apart
    if export and not ours:
        reason = (
            "exports end a whole run, which only our trainer makes, with an optimizer of ours and "
            "no asynchronous servers"
        )
        problem = BAD_ARGUMENT.problem(reason, key="--export", suggestions=("no --export",))
        raise ConfigError(problem)
    proof = prove(plan, run_ranks=run_ranks, subject=engine, own_precision=own_precision, late=late)
    if not ours or not proof.proven:
        return proof
    if own_precision and has_own_run(plan):
        PROGRESS.info("a run in its own precision: overflows, resumes")
        resumed = own_precision_pass(without_losses(plan), run_ranks=run_ranks)
        proof = replace(proof, resumed=resumed)
    # Rounded sums are judged by their bounds, and a lost island by its replay. The trainer runs
    # with exact sums, and loses none.
    small = shrink(with_exact_sums(without_losses(plan)), precision="fp64")
    export = export or plan.model.lora is not None or has_own_layout(plan.model)
    PROGRESS.info(f"a whole run: data, training, resume, text{', exports' * export}")
    own = plan.mathematics.precision.parameters if export else None
    return replace(proof, whole_run=whole_run_pass(small, run_ranks=run_ranks, exported_in=own))


def whole_run_pass(
    shrunk: Plan,
    *,
    run_ranks: RankRunner,
    trainer: TrainerTargets = OUR_TRAINER,
    exported_in: DType | None = None,
) -> ProofPass:
    """Prove a whole run of a shrunk float64 plan by `trainer`.

    Its exports are in float64 and in the dtype `exported_in`; None for no exports.
    """
    first = _dropping_by_position(with_bytes(shrunk))
    second = other_layout(first)
    texts = texts_for(first)
    exports = () if exported_in is None else exports_of(first, exported_in)
    with tempfile.TemporaryDirectory(prefix="echelon-prove-") as folder:
        plans = offloaded_to(first, folder), second
        run = _run(folder, plans, texts, run_ranks, trainer, exports)
    claims = (
        judged(
            rules.PROVE_TRAINER_STEPS,
            _STEPS,
            list(_step_checks(run, 0)),
            note="" if first == with_bytes(shrunk) else "experts drop by position here",
        ),
        judged(rules.PROVE_TRAINER_VALIDATION, _VALIDATIONS, list(_validation_checks(run, 0))),
        judged(
            rules.PROVE_TRAINER_RESUME,
            _RESUMED,
            [*_step_checks(run, 1), *_validation_checks(run, 1)],
            note=f"{mesh_text(first)}, then {mesh_text(second)}",
        ),
        judged(rules.PROVE_TRAINER_CHECKPOINT, _READ, list(_weight_checks(run))),
        judged(rules.PROVE_TRAINER_TEXT, _TEXT, list(_text_checks(run))),
        *run.exported,
    )
    return pass_of("fp64", claims)


def _dropping_by_position(plan: Plan) -> Plan:
    """Return the plan whose experts drop tokens by their positions, not by their scores.

    A text repeats itself: a padded end, or "aa" at the start of a sample, has tokens with equal
    scores, and rounding decides which of them stays. The proof of the ranks, which knows such ties,
    has the drops by score.
    """
    balance = plan.mathematics.balance
    if balance.drop == "position":
        return plan
    balance = replace(balance, drop="position")
    return replace(plan, mathematics=replace(plan.mathematics, balance=balance))


def _run(
    folder: str,
    plans: tuple[Plan, Plan],
    texts: RunTexts,
    run_ranks: RankRunner,
    trainer: TrainerTargets,
    exports: Sequence[Export],
) -> WholeRun:
    first = plans[0]
    samples = num_samples_of(first, texts.validation_tokens)
    argument = {
        **texts.argument(folder),
        "plans": [plan.to_json() for plan in plans],
        "num_steps": NUM_STEPS,
        "saved_after": SAVED_AFTER,
        "validation_batches": -(-samples // first.mathematics.global_sequences),
        "prompts": [list(prompt) for prompt in PROMPTS],
        "count": _WRITTEN,
        "exports": [asdict(export) for export in exports],
    }
    labels = [first.mesh.label(rank) for rank in range(first.mesh.world_size)]
    # One device computes while the ranks do: they leave cores idle when they wait for each other.
    with ThreadPoolExecutor(1) as executor:
        after = sorted({count for counts in VALIDATED_AFTER for count in counts})
        alone = run_on_one_device
        if first.mathematics.local_sgd.active:
            alone = run_islands_on_one_device
        right = executor.submit(alone, first, texts, NUM_STEPS, validated_after=after)
        run_ranks(trainer.write_data, argument, 1, labels=[""])
        run_ranks(trainer.train, argument, len(labels), labels=labels)
        run_ranks(trainer.read_back, argument, 1, labels=[""])
        if exports:
            # Two ranks write the parts of a folder.
            run_ranks(trainer.export, argument, len(labels[:2]), labels=labels[:2])
    place = Path(folder)
    first_events, second_events = events_of_runs(place, 2, len(labels))
    exported = RunExports(
        plan=first, exports=exports, folder=place, texts=texts, right=right.result()
    )
    return WholeRun(
        plans=plans,
        events=(first_events, second_events),
        weights=load_file(place / "read-back.safetensors"),
        written=json.loads((place / "written.json").read_text(encoding="utf-8")),
        right=right.result(),
        exported=exported.claims() if exports else (),
    )


def _step_checks(run: WholeRun, number: int) -> Iterator[Check]:
    """Compare every rank's events of every step: sums closely, counts and decisions exactly."""
    first_step = SAVED_AFTER if number else 0
    for rank, events in enumerate(run.events[number]):
        steps = {event["step"]: event for event in events if event["kind"] == "step"}
        island = island_of(run.plans[number], rank)
        for right in run.right.islands[0 if island is None else island.index][first_step:]:
            event, place = steps.pop(right.step + 1, None), f"on rank {rank}"
            if event is None:
                yield exact_check(right.step, f"step {place}", "it was not taken", rank)
                continue
            for name in _SUMS:
                subject = f"{name.replace('_', ' ')} {place}"
                yield _close(right.step, subject, event[name], getattr(right, name), rank)
            # An island takes its tokens times the number of islands.
            facts = {
                "tokens": right.tokens * len(run.right.islands),
                "loss_scale": right.loss_scale,
                "skipped": right.skipped,
            }
            for name, wanted in facts.items():
                subject = f"{name.replace('_', ' ')} {place}"
                yield equal_check(right.step, subject, event[name], wanted, rank)
        additional = f"steps {sorted(steps)} were taken too" * bool(steps)
        yield exact_check(NUM_STEPS, f"steps on rank {rank}", additional, rank)


def _validation_checks(run: WholeRun, number: int) -> Iterator[Check]:
    for rank, events in enumerate(run.events[number]):
        losses = {event["step"]: event["loss"] for event in events if event["kind"] == "validation"}
        for step in VALIDATED_AFTER[number]:
            wanted, loss = run.right.validations[step], losses.get(step, math.nan)
            yield _close(step - 1, f"validation loss on rank {rank}", loss, wanted, rank)


def _weight_checks(run: WholeRun) -> Iterator[Check]:
    last = NUM_STEPS - 1
    for position, (name, wanted) in enumerate(run.right.weights.items()):
        weight = run.weights.get(name)
        if weight is None or weight.shape != wanted.shape:
            yield exact_check(last, name, "it is not there, or of another shape", position)
            continue
        error = relative_error(weight, wanted, FLOOR)
        yield Check(last, name, error, allowed=FLOAT64_TOLERANCE, position=position)


def _text_checks(run: WholeRun) -> Iterator[Check]:
    for place, prompt in enumerate(PROMPTS):
        right = continuation(run.plans[0], run.right, prompt, _WRITTEN)
        for how, texts in run.written.items():
            wanted = right
            if how == OVER_A_CACHE and END_OF_DOCUMENT in right:
                wanted = right[: right.index(END_OF_DOCUMENT)]
            subject = f"tokens written {how} after {list(prompt)}"
            yield equal_check(NUM_STEPS, subject, texts[place], wanted)


def _close(step: int, subject: str, value: float, wanted: float, rank: int) -> Check:
    error = abs(value - wanted) / max(abs(wanted), FLOOR)
    detail = f"{value:.10g} instead of {wanted:.10g}"
    return Check(step, subject, error, allowed=FLOAT64_TOLERANCE, detail=detail, position=rank)


def run_islands_on_one_device(
    plan: Plan, texts: RunTexts, num_steps: int, *, validated_after: Collection[int]
) -> OneDeviceRun:
    """Return the run of `plan` over the texts; it validates after so many steps, 0 among them."""
    local = plan.mathematics.local_sgd
    runs = [IndependentRun(island_plan(plan, index)) for index in range(local.islands)]
    outer = runs[0].values
    momentum = {name: torch.zeros_like(value) for name, value in outer.items()}
    met: dict[str, list[torch.Tensor]] = {}
    due: dict[int, list[str]] = {}
    steps: list[list[IndependentStep]] = [[] for _ in runs]
    validations: dict[int, float] = {}
    for step in range(num_steps):
        if step in validated_after:
            validations[step] = _validation(plan, texts, runs)
        for index, run in enumerate(runs):
            share = index, local.islands
            steps[index].append(run.step(batch_of_step(plan, texts, step, share)))
        values = [run.values for run in runs]
        due[step + local.delay] = [name for name in outer if meets(local, name, step)]
        for name in due[step + local.delay]:
            met[name] = [as_sent(local, outer[name] - own[name]) for own in values]
        changed = due.pop(step, [])
        for name in changed:
            mean = torch.stack(met[name]).sum(0) / local.islands
            outer[name], momentum[name] = outer_formula(local, outer[name], mean, momentum[name])
        for run, own in zip(runs, values, strict=True):
            kept = 0.5 if local.delay else 0.0
            run.begin_with({n: kept * own[n] + (1.0 - kept) * outer[n] for n in changed})
    if num_steps in validated_after:
        validations[num_steps] = _validation(plan, texts, runs)
    return OneDeviceRun(islands=tuple(map(tuple, steps)), validations=validations, weights=outer)


def _validation(plan: Plan, texts: RunTexts, runs: list[IndependentRun]) -> float:
    """Return the mean over all held-out tokens, of each island's part by its own weights."""
    passes = [
        held_out_loss(
            plan, texts.validation_tokens, run.values, (run.state, run.fp8), (index, len(runs))
        )
        for index, run in enumerate(runs)
    ]
    return sum(total for total, _ in passes) / sum(counted for _, counted in passes)


def other_layout(plan: Plan) -> Plan:
    """Return the plan under another layout: of those that differ on most axes, one by its hash.

    Where no other is legal, it is the same layout.
    """
    legal = [one for one in _candidates(plan) if _is_legal(one)]
    if not legal:
        return plan
    most = max(_distance(plan, one) for one in legal)
    furthest = [one for one in legal if _distance(plan, one) == most]
    return random.Random(plan.content_hash()).choice(furthest)


def _candidates(plan: Plan) -> Iterator[Plan]:
    layout, world = plan.layout, plan.mesh.world_size
    for degrees in _meshes(world):
        mesh = replace(degrees, replicas_outermost=plan.mesh.replicas_outermost)
        if mesh.pp > plan.model.layers:
            continue
        sliced = mesh.dp_shard > 1 or mesh.cp > 1
        other = Layout(
            mesh=mesh,
            # The auxiliary loss may be one of microbatches: these stay as they are.
            microbatch_sequences=layout.microbatch_sequences,
            pipeline=Pipeline(stages=split_layers(plan.model.layers, mesh.pp)),
            zero=Zero(stage=1 if sliced else 0),
            recompute=Recompute(policy="full" if world == 1 else "none"),
        )
        yield replace(plan, layout=with_rounding(plan, other))


def _meshes(world: int) -> Iterator[Mesh]:
    def factors(left: int, axes: int) -> Iterator[tuple[int, ...]]:
        if axes == 1:
            yield (left,)
            return
        for degree in range(1, left + 1):
            if left % degree == 0:
                yield from ((degree, *rest) for rest in factors(left // degree, axes - 1))

    for degrees in factors(world, len(MESH_AXES)):
        named = {axis.value: d for axis, d in zip(MESH_AXES, degrees, strict=True)}
        yield replace(Mesh(), **named)


def _is_legal(plan: Plan) -> bool:
    sequences = plan.layout.microbatch_sequences * plan.mesh.dp
    if plan.mathematics.global_sequences % sequences:
        return False
    try:
        require_trainable(plan)
    except ConfigError:
        return False
    return True


def _distance(one: Plan, other: Plan) -> int:
    return sum(one.mesh.degree(axis) != other.mesh.degree(axis) for axis in MESH_AXES)
