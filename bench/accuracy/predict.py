"""Predict rows: one call of the formulas for every split that any row can mean."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar, cast

import numpy as np

from bench.accuracy.published.machines import machine_of
from bench.accuracy.published.measured import Measured, measured
from bench.accuracy.published.models import model_of
from bench.accuracy.published.neighbours import with_neighbours
from bench.accuracy.published.plans import Candidate, candidates_of, sequences_of
from bench.accuracy.published.programs import Program, program_of, software_of
from bench.accuracy.published.rows import Refused, Row
from echelon.core.rulebook.config import OUT_OF_RANGE
from echelon.cost.inputs.cost_inputs import CostInputs, TrainerConstants
from echelon.cost.inputs.numbers import LayoutNumbers, MachineNumbers, ModelNumbers
from echelon.cost.peak.fullest_rank import fullest_rank_bytes, rank_bytes
from echelon.cost.seconds.step import step_seconds

Record = TypeVar("Record")
OK = "ok"
BELIEVED = 1.1
"""How far above a device's memory a prediction can be, for a split of which we know that it ran."""
BESIDE_GRACE = 2.2
"""The same where activations can wait in the memory of a host that is as near as another device."""
KEPT = 1.05
"""How far above a device's memory what is held can be: an allocator gives back what it keeps."""
GB = 2.0**30
"""Frameworks print their allocators' bytes in units of 2^30, and call them GB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Hold a row that can be predicted: what the formulas read, and what was measured."""

    row: Row
    program: Program
    model: ModelNumbers
    machine: MachineNumbers
    software: TrainerConstants
    candidates: tuple[Candidate, ...]
    measured: Measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Give the prediction of a row; `status` is "ok", or the rule that refused it."""

    row: Row
    status: str = OK
    message: str = ""
    step_s: float | None = None
    tokens_per_s: float | None = None
    memory_gb: float | None = None
    """Memory of the kind that the row gives."""
    allocated_gb: float | None = None
    """Peak of what tensors have."""
    driver_gb: float | None = None
    """All that a device has in use: the allocator's memory, context and buffers of collectives."""
    memory_band_gb: tuple[float, float] | None = None
    """Of `memory_gb`: over all splits that the row can mean and that fit, four of five inside."""
    fits: bool | None = None
    case: Case | None = None
    chosen: Candidate | None = None


Adjust = Callable[[Sequence[Case]], Sequence[Case]]
"""What a fit does to cases: other constants of devices, links and programs."""
Predict = Callable[[Sequence[Case]], Sequence[Prediction]]


def cases_of(rows: Sequence[Row]) -> tuple[list[Case], list[Prediction]]:
    """Return the rows that can be predicted, and for the others which rule refused them."""
    return _cases(with_neighbours(rows))


def _cases(rows: Sequence[Row]) -> tuple[list[Case], list[Prediction]]:
    cases: list[Case] = []
    refused: list[Prediction] = []
    for row in rows:
        try:
            cases.append(case_of(row))
        except Refused as why:
            refused.append(Prediction(row=row, status=why.rule.id, message=why.message))
        except (ArithmeticError, AssertionError, LookupError, TypeError, ValueError) as error:
            # Whatever a cell holds, it refuses its own row and not the file.
            refused.append(_unreadable(row, f"its numbers make no run: {error or type(error)}"))
    return cases, refused


def _unreadable(row: Row, message: str) -> Prediction:
    return Prediction(row=row, status=OUT_OF_RANGE.id, message=message)


def case_of(row: Row) -> Case:
    """Return what the formulas read of a row; Refused where it cannot be known."""
    model, machine, program = model_of(row), machine_of(row), program_of(row)
    candidates = candidates_of(row, model, program)
    devices = cast(float, candidates[0].layout.devices)
    if program.pads_vocabulary:
        unit = 128.0 * cast(float, candidates[0].layout.tp)
        model = replace(model, vocab=-(-model.vocab // unit) * unit)
    return Case(
        row=row,
        program=program,
        model=model,
        machine=machine,
        software=software_of(row, program),
        candidates=tuple(candidates),
        measured=measured(row, model, devices, _peak(row, machine)),
    )


def _peak(row: Row, machine: MachineNumbers) -> float:
    """Return the peak of which a row's utilisation is a share: bf16's, but where it says fp8's."""
    eight = "fp8" in row.word("flops_convention").lower()
    return cast(float, machine.peak_flops if eight else machine.attention_flops)


def work_of(cases: Sequence[Case]) -> CostInputs:
    """Return all candidates of all cases as arrays, case after case."""
    repeated = [(case, one.layout) for case in cases for one in case.candidates]
    return CostInputs(
        model=stacked([case.model for case, _ in repeated]),
        machine=stacked([case.machine for case, _ in repeated]),
        software=stacked([case.software for case, _ in repeated]),
        layout=stacked([layout for _, layout in repeated]),
    )


def stacked(records: Sequence[Record]) -> Record:
    """Return one record whose fields are the arrays of those of `records`."""
    first = records[0]
    together: dict[str, Any] = {}
    for item in fields(cast(Any, first)):
        values = [getattr(record, item.name) for record in records]
        if isinstance(values[0], tuple):
            tiers = zip(*values, strict=True)
            together[item.name] = tuple(stacked(list(tier)) for tier in tiers)
        else:
            together[item.name] = np.asarray(values, dtype=np.float64)
    return cast(Record, replace(cast(Any, first), **together))


def predict(rows: Sequence[Row], how: Predict | None = None) -> list[Prediction]:
    """Return a prediction for each row, in order; `how` predicts those that no rule refuses."""
    filled = with_neighbours(rows)
    cases, refused = _cases(filled)
    found = {id(one.row): one for one in (*(how or predict_cases)(cases), *refused)}
    return [found[id(row)] for row in filled]


def predict_cases(cases: Sequence[Case]) -> list[Prediction]:
    """Return a prediction for each case: of its fastest split that fits, or its smallest."""
    if not cases:
        return []
    work = work_of(cases)
    with np.errstate(all="ignore"):
        seconds = np.asarray(step_seconds(work).total)
        memory = fullest_rank_bytes(work)
        held = np.asarray(memory.total)
        reserved = held - memory.terms["context"]
        allocated = reserved - memory.terms["slack"]
    capacity = np.asarray(work.machine.memory_bytes)
    found: list[Prediction] = []
    start = 0
    for case in cases:
        part = slice(start, start + len(case.candidates))
        start = part.stop
        # What a row does not say was chosen so that it ran: memory a little over is believed.
        believed = (
            BESIDE_GRACE if re.search(r"\bg[bh]-?\d", case.row.word("gpu").lower()) else BELIEVED
        )
        fits = held[part] <= believed * capacity[part]
        known = np.isfinite(seconds[part]) & np.isfinite(held[part]) & (seconds[part] > 0.0)
        best = int(np.argmin(np.where(fits & known, seconds[part], np.inf)))
        if not (fits & known).any():
            best = int(np.argmin(np.where(known, held[part], np.inf)))
        if known[best]:
            one = _prediction(case, best, (seconds[part][best], held[part][best]))
            fullest = {"driver": held, "reserved": reserved, "allocated": allocated}
            kinds = _of_rank(case, best) or {
                name: float(values[part][best]) / GB for name, values in fullest.items()
            }
            one = replace(
                one,
                memory_gb=kinds[case.measured.memory_kind],
                allocated_gb=kinds["allocated"],
                driver_gb=kinds["driver"],
            )
            # A row that leaves much blank fits where any split that it can mean does.
            found.append(replace(one, fits=bool((held[part] <= KEPT * capacity[part]).any())))
        else:
            found.append(_unreadable(case.row, "its numbers make no time that is one"))
    return found


def _of_rank(case: Case, best: int) -> dict[str, float]:
    """Return the GB of the stage that a row's memory is of, by kind; {} for the fullest rank."""
    layout = case.candidates[best].layout
    stage = case.row.word("mem_rank").lower()
    if stage not in ("first stage", "last stage") or float(np.asarray(layout.pp)) == 1.0:
        return {}
    work = CostInputs(model=case.model, machine=case.machine, software=case.software, layout=layout)
    memory = rank_bytes(work, last=stage == "last stage")
    driver = float(np.asarray(memory.total))
    reserved = driver - float(np.asarray(memory.terms["context"]))
    allocated = reserved - float(np.asarray(memory.terms["slack"]))
    return {"driver": driver / GB, "reserved": reserved / GB, "allocated": allocated / GB}


def _prediction(case: Case, best: int, numbers: tuple[float, float]) -> Prediction:
    seconds, held = (float(number) for number in numbers)
    chosen = case.candidates[best]
    for column, value in chosen.chosen:
        case.row.say(column, value, "fastest that fits of the usual values")
    layout: LayoutNumbers = chosen.layout
    batch = sequences_of(case.row, case.model) or float(
        layout.microbatch * layout.microbatches * layout.dp
    )
    return Prediction(
        row=case.row,
        step_s=seconds,
        tokens_per_s=batch * float(case.model.length) / float(layout.devices) / seconds,
        memory_gb=held / GB,
        fits=held <= KEPT * float(case.machine.memory_bytes),
        case=case,
        chosen=chosen,
    )
