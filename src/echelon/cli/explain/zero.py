# SPDX-License-Identifier: Apache-2.0
"""`echelon explain zero`: where the bytes of ZeRO's stages come from, line by line.

Every number is a formula of `cost/bytes/model_sizes.py`; without a number of parameters the page
is in units of psi.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from echelon.cli.flags import read_bytes, read_number
from echelon.core.errors import ConfigError, Problem
from echelon.core.plan import ZeroStage
from echelon.core.rulebook.planner import PREDICTION_IN_RANGE, ZERO_NEEDS_DEGREE
from echelon.core.units import binary_bytes, decimal_bytes, short_count
from echelon.cost.bytes.model_sizes import (
    FP32_PRECISION,
    MIXED_PRECISION,
    STAGES,
    ModelStates,
    StatePrecision,
    cheapest_stage,
    communication_volume,
    largest_model,
    memory_saving,
    model_states,
    states_formula,
)
from echelon.planner.view.text_layout import WIDTH, table

StatePrecisionName = Literal["mixed", "fp32"]
PRECISIONS: dict[StatePrecisionName, StatePrecision] = {
    "mixed": MIXED_PRECISION,
    "fp32": FP32_PRECISION,
}

_CUT = ("nothing", "optimizer state", "gradients too", "parameters too")
_COLLECTIVES = (
    "all-reduce of gradients",
    "reduce-scatter of gradients, all-gather of parameters",
    "reduce-scatter of gradients, all-gather of parameters",
    "reduce-scatter of gradients, all-gathers of parameters for forward and for backward",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroQuestion:
    """Hold what was asked: N, and maybe psi and the memory of a rank."""

    degree: int
    num_parameters: int | None
    memory_bytes: int | None
    precision: StatePrecisionName

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
        return communication_volume(stage).sent_bytes(num, self.degree, size)


def ask_zero(
    *,
    dp: int | None = None,
    parameters: str | None = None,
    memory_bytes: str | None = None,
    precision: StatePrecisionName | None = None,
) -> ZeroQuestion:
    """Return the question; ConfigError without a degree, or with a number out of range."""
    problems: list[Problem] = []
    if dp is None:
        problems.append(
            ZERO_NEEDS_DEGREE.problem(
                "what a rank holds depends on N, the number of data ranks",
                suggestions=("--dp 4",),
            )
        )
    elif dp < 1:
        problems.append(out_of_range(f"--dp {dp:g}", "--dp 1"))
    count = None if parameters is None else read_number("--parameters", parameters)
    if isinstance(count, Problem):
        problems.append(count)
    memory = None if memory_bytes is None else read_bytes("--memory-bytes", memory_bytes)
    if isinstance(memory, Problem):
        problems.append(memory)
    if problems or dp is None or isinstance(count, Problem) or isinstance(memory, Problem):
        raise ConfigError(problems)
    return ZeroQuestion(
        degree=dp,
        num_parameters=count,
        memory_bytes=memory,
        precision=precision or "mixed",
    )


def zero_json(question: ZeroQuestion) -> dict[str, Any]:
    """Return the page as JSON values; without parameters, bytes are those a weight."""
    stages = [
        {
            "stage": stage,
            "formula": states_formula(stage, question.sizes),
            **{f"{kind}_bytes": held for kind, held in asdict(states).items()},
            "held_bytes": states.total,
            "saving": memory_saving(stage, question.degree, question.sizes),
            "sent_psi": communication_volume(stage).multiples,
            "sent_bytes_per_step": question.sent(stage),
        }
        for stage in STAGES
        for states in (question.states(stage),)
    ]
    found: dict[str, Any] = {
        "degree": question.degree,
        "num_parameters": question.num_parameters,
        "precision": question.precision,
        "stages": stages,
    }
    if question.memory_bytes is not None:
        found["memory_bytes"] = question.memory_bytes
        found["largest_models"] = _largest(question, question.memory_bytes)
        if question.num_parameters is not None:
            found["cheapest_stage"] = _cheapest(question, question.memory_bytes)
    return found


def zero_text(question: ZeroQuestion, *, columns: int = WIDTH) -> str:
    """Return the page that a person reads."""
    parts = [_title(question), "A weight takes\n\n" + _weight(question.sizes, columns=columns)]
    if question.num_parameters is not None:
        parts.append("\n".join(_derivation(question, question.num_parameters)))
    size = question.sizes.parameters
    parts += [
        f"Each of the {question.degree} ranks holds\n\n{_held(question, columns=columns)}",
        f"and sends in a step of one microbatch (s = {size} bytes)\n\n"
        + _sent(question, columns=columns),
        "\n".join(_notes(question)),
    ]
    return "\n\n".join(parts) + "\n"


def out_of_range(typed: str, suggestion: str) -> Problem:
    """Return the problem of a flag whose number counts nothing."""
    return PREDICTION_IN_RANGE.problem(
        f"{typed} counts nothing", set_by=typed, suggestions=(suggestion,)
    )


def _title(question: ZeroQuestion) -> str:
    psi = question.num_parameters
    size = "psi parameters" if psi is None else f"psi = {psi:,} parameters"
    kind = "mixed precision" if question.precision == "mixed" else "fp32"
    return f"Adam in {kind}: {size}, N = {question.degree} data ranks"


def _weight(sizes: StatePrecision, *, columns: int) -> str:
    dtype = "bf16 or fp16" if sizes.master else "fp32"
    rows = [
        ("parameter", dtype, sizes.parameters),
        ("gradient", dtype, sizes.gradients),
        *([("master copy", "fp32", sizes.master)] if sizes.master else []),
        ("first moment", "fp32", sizes.moments // 2),
        ("second moment", "fp32", sizes.moments // 2),
        ("together", "", sizes.total),
    ]
    return table(("", "", "bytes"), rows, columns=columns)


def _derivation(question: ZeroQuestion, psi: int) -> Iterator[str]:
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
        yield f"  {name:<15}  {size:>2} x {psi:,} = {binary_bytes(size * psi)}"
    total = sizes.total * psi
    yield ""
    yield f"  {total:,} bytes / 2^30 = {binary_bytes(total)}"
    share = f"{100 * sizes.optimizer / sizes.total:.0f} %"
    yield f"  optimizer state is {sizes.optimizer}/{sizes.total} = {share} of it"
    yield (
        f"  {degree} ranks store {degree} x {short_count(psi)} = {short_count(degree * psi)} "
        f"parameters, {short_count((degree - 1) * psi)} of them again; at stage 3 each stores "
        f"{short_count(psi / degree)}"
    )


def _held(question: ZeroQuestion, *, columns: int) -> str:
    rows = [
        (
            stage,
            _CUT[stage],
            states_formula(stage, question.sizes),
            *(_held_bytes(question, held) for held in (*asdict(states).values(), states.total)),
            f"{memory_saving(stage, question.degree, question.sizes):.2f}x",
        )
        for stage in STAGES
        for states in (question.states(stage),)
    ]
    head = ("stage", "cut", "formula", "parameters", "gradients", "optimizer", "together")
    return table((*head, "saving"), rows, columns=columns)


def _sent(question: ZeroQuestion, *, columns: int) -> str:
    rows = [
        (
            stage,
            f"{communication_volume(stage).multiples} psi s (N-1)/N",
            _sent_bytes(question, question.sent(stage)),
            _COLLECTIVES[stage],
        )
        for stage in STAGES
    ]
    return table(("stage", "formula", "bytes", "how"), rows, columns=columns)


def _notes(question: ZeroQuestion) -> Iterator[str]:
    memory = question.memory_bytes
    if memory is not None:
        largest = zip(_largest(question, memory), STAGES, strict=True)
        found = [f"{short_count(count)} at stage {stage}" for count, stage in largest]
        yield f"The largest model whose states fit {binary_bytes(memory)}: {', '.join(found)}"
        if question.num_parameters is not None:
            cheapest = _cheapest(question, memory)
            yield (
                "The states fit at no stage: more ranks, a tensor or pipeline split, or offload"
                if cheapest is None
                else f"The cheapest stage whose states fit: {cheapest}"
            )
    yield "Activations, whole units of parameters and buffers come on top: echelon plan RUN"


def _largest(question: ZeroQuestion, memory: int) -> list[int]:
    return [largest_model(memory, stage, question.degree, question.sizes) for stage in STAGES]


def _cheapest(question: ZeroQuestion, memory: int) -> ZeroStage | None:
    return cheapest_stage(question.num_parameters or 0, memory, question.degree, question.sizes)


def _held_bytes(question: ZeroQuestion, value: float) -> str:
    return f"{value:.4g} psi" if question.num_parameters is None else binary_bytes(value)


def _sent_bytes(question: ZeroQuestion, value: float) -> str:
    return f"{value:.4g} psi" if question.num_parameters is None else decimal_bytes(value)
