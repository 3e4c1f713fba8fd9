"""`echelon explain zero`: where the bytes of ZeRO's stages come from, line by line.

Every number is a formula of `cost/model_states.py`; without a number of parameters the page is
in units of psi.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite
from typing import Any, Literal

from echelon.cli.output import table
from echelon.core.errors import ConfigError, Problem
from echelon.core.plan import ZeroStage
from echelon.core.rulebook.cost import PREDICTION_IN_RANGE, ZERO_NEEDS_DEGREE
from echelon.core.units import binary_bytes, short_count
from echelon.cost.model_states import (
    FP32,
    MIXED,
    STAGES,
    ModelStates,
    StatePrecision,
    cheapest_stage,
    formula,
    largest_model,
    model_states,
    saving,
    volume,
)

Precision = Literal["mixed", "fp32"]
PRECISIONS: dict[Precision, StatePrecision] = {"mixed": MIXED, "fp32": FP32}

_CUT = ("nothing", "optimizer state", "gradients too", "parameters too")
_COLLECTIVES = (
    "all-reduce of gradients",
    "reduce-scatter of gradients, all-gather of parameters",
    "reduce-scatter of gradients, all-gather of parameters",
    "reduce-scatter of gradients, all-gathers of parameters for forward and for backward",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Hold what was asked: N, and maybe psi and the memory of a rank."""

    degree: int
    num_parameters: int | None
    memory_bytes: int | None
    precision: Precision

    @property
    def sizes(self) -> StatePrecision:
        """Return the bytes that a weight takes of each kind."""
        return PRECISIONS[self.precision]

    def states(self, stage: ZeroStage) -> ModelStates:
        """Return what a rank holds: in bytes, or in bytes a weight."""
        return model_states(self.num_parameters or 1, stage, self.degree, self.sizes)

    def sent(self, stage: ZeroStage) -> float:
        """Return what a rank sends per step: in bytes, or in bytes a weight."""
        num, size = self.num_parameters or 1, self.sizes.parameters
        return volume(stage).sent_bytes(num, self.degree, size)


def ask(
    *,
    degree: int | None,
    parameters: float | None,
    memory_bytes: float | None,
    precision: Precision | None,
) -> Question:
    """Return the question; ConfigError without a degree, or with a number out of range."""
    problems: list[Problem] = []
    if degree is None:
        problems.append(
            ZERO_NEEDS_DEGREE.problem(
                "what a rank holds depends on N, the number of data ranks",
                set_by="the command line",
                works=("--degree 4",),
            )
        )
    elif degree < 1:
        problems.append(_out_of_range("degree", degree, "--degree 1"))
    for flag, value, whole in (
        ("parameters", parameters, True),
        ("memory-bytes", memory_bytes, False),
    ):
        if value is not None and not _counts(value, whole=whole):
            problems.append(_out_of_range(flag, value, f"--{flag} {7e9:.0e}"))
    if problems or degree is None:
        raise ConfigError(problems)
    return Question(
        degree=degree,
        num_parameters=None if parameters is None else int(parameters),
        memory_bytes=None if memory_bytes is None else int(memory_bytes),
        precision=precision or "mixed",
    )


def zero_json(question: Question) -> dict[str, Any]:
    """Return the page as JSON values; without parameters, bytes are those a weight."""
    stages = [
        {
            "stage": stage,
            "formula": formula(stage, question.sizes),
            "parameters_bytes": question.states(stage).parameters,
            "gradients_bytes": question.states(stage).gradients,
            "optimizer_bytes": question.states(stage).optimizer,
            "held_bytes": question.states(stage).total,
            "saving": saving(stage, question.degree, question.sizes),
            "sent_psi": volume(stage).multiples,
            "sent_bytes_per_step": question.sent(stage),
        }
        for stage in STAGES
    ]
    found: dict[str, Any] = {
        "degree": question.degree,
        "num_parameters": question.num_parameters,
        "precision": question.precision,
        "stages": stages,
    }
    if question.memory_bytes is not None:
        found["memory_bytes"] = question.memory_bytes
        found["largest_models"] = [_largest(question, stage) for stage in STAGES]
        if question.num_parameters is not None:
            found["cheapest_stage"] = _cheapest(question)
    return found


def zero_text(question: Question) -> str:
    """Return the page that a person reads."""
    parts = [_title(question), "A weight takes\n\n" + _weight(question.sizes)]
    if question.num_parameters is not None:
        parts.append("\n".join(_derivation(question, question.num_parameters)))
    size = question.sizes.parameters
    parts += [
        f"Each of the {question.degree} ranks holds\n\n{_held(question)}",
        f"and sends in a step of one microbatch (s = {size} bytes)\n\n{_sent(question)}",
        "\n".join(_notes(question)),
    ]
    return "\n\n".join(parts) + "\n"


def _counts(value: float, *, whole: bool) -> bool:
    return isfinite(value) and value >= 1 and (not whole or value == int(value))


def _out_of_range(flag: str, value: float, works: str) -> Problem:
    return PREDICTION_IN_RANGE.problem(
        f"--{flag} {value:g} counts nothing", set_by="the command line", works=(works,)
    )


def _title(question: Question) -> str:
    psi = question.num_parameters
    size = "psi parameters" if psi is None else f"psi = {psi:,} parameters"
    kind = "mixed precision" if question.precision == "mixed" else "fp32"
    return f"Adam in {kind}: {size}, N = {question.degree} data ranks"


def _weight(sizes: StatePrecision) -> str:
    dtype = "bf16 or fp16" if sizes.master else "fp32"
    rows = [
        ("parameter", dtype, sizes.parameters),
        ("gradient", dtype, sizes.gradients),
        *([("master copy", "fp32", sizes.master)] if sizes.master else []),
        ("first moment", "fp32", sizes.moments // 2),
        ("second moment", "fp32", sizes.moments // 2),
        ("together", "", sizes.total),
    ]
    return table(("", "", "bytes"), rows)


def _derivation(question: Question, psi: int) -> Iterator[str]:
    """Yield the arithmetic of one rank without ZeRO, and of what all ranks store."""
    sizes, degree = question.sizes, question.degree
    yield "Without ZeRO a rank holds"
    yield ""
    for name, size in (
        ("parameters", sizes.parameters),
        ("gradients", sizes.gradients),
        ("optimizer state", sizes.optimizer),
        ("together", sizes.total),
    ):
        yield f"  {name:<15}  {size:>2} x {psi:,} = {_gb(size * psi)}"
    total = sizes.total * psi
    yield ""
    yield f"  {total:,} bytes / 2^30 = {binary_bytes(total)}"
    yield f"  optimizer state is {sizes.optimizer}/{sizes.total} = {_percent(sizes)} of it"
    yield (
        f"  {degree} ranks store {degree} x {short_count(psi)} = {short_count(degree * psi)} "
        f"parameters, {short_count((degree - 1) * psi)} of them again; at stage 3 each stores "
        f"{short_count(psi / degree)}"
    )


def _held(question: Question) -> str:
    rows = [
        (
            stage,
            _CUT[stage],
            formula(stage, question.sizes),
            *(
                _bytes(question, value)
                for value in (
                    question.states(stage).parameters,
                    question.states(stage).gradients,
                    question.states(stage).optimizer,
                    question.states(stage).total,
                )
            ),
            *([binary_bytes(question.states(stage).total)] if question.num_parameters else []),
            f"{saving(stage, question.degree, question.sizes):.2f}x",
        )
        for stage in STAGES
    ]
    binary = ["in GiB"] if question.num_parameters else []
    head = ("stage", "cut", "formula", "parameters", "gradients", "optimizer", "together")
    return table((*head, *binary, "saving"), rows)


def _sent(question: Question) -> str:
    rows = [
        (
            stage,
            f"{volume(stage).multiples} psi s (N-1)/N",
            _bytes(question, question.sent(stage)),
            _COLLECTIVES[stage],
        )
        for stage in STAGES
    ]
    return table(("stage", "formula", "bytes", "how"), rows)


def _notes(question: Question) -> Iterator[str]:
    if question.memory_bytes is not None:
        found = [f"{short_count(_largest(question, stage))} at stage {stage}" for stage in STAGES]
        yield f"The largest model whose states fit {_gb(question.memory_bytes)}: {', '.join(found)}"
        if question.num_parameters is not None:
            cheapest = _cheapest(question)
            yield (
                "The states fit at no stage: more ranks, a tensor or pipeline split, or offload"
                if cheapest is None
                else f"The cheapest stage whose states fit: {cheapest}"
            )
    yield "Activations, whole units of parameters and buffers come on top: echelon plan RUN"


def _largest(question: Question, stage: ZeroStage) -> int:
    assert question.memory_bytes is not None
    return largest_model(question.memory_bytes, stage, question.degree, question.sizes)


def _cheapest(question: Question) -> ZeroStage | None:
    assert question.memory_bytes is not None
    assert question.num_parameters is not None
    return cheapest_stage(
        question.num_parameters, question.memory_bytes, question.degree, question.sizes
    )


def _bytes(question: Question, value: float) -> str:
    return f"{value:.4g} psi" if question.num_parameters is None else _gb(value)


def _gb(value: float) -> str:
    """Return bytes in GB whatever their size, so that lines can be compared."""
    return f"{value / 1e9:,.2f} GB"


def _percent(sizes: StatePrecision) -> str:
    return f"{100 * sizes.optimizer / sizes.total:.0f} %"
