# SPDX-License-Identifier: Apache-2.0
"""`echelon explain memory`, `echelon explain zero`: bytes of a model, line by line.

memory: weights by part, model states at each ZeRO stage for N data ranks, the largest model that
fits, keys and values, what a block keeps for backward. Without N there is no figure of a rank.
zero: what the stages hold and send; without a number of parameters in units of psi.
Every line is a formula of `cost/`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from echelon.cli.flags import bad_argument, read_bytes, read_number
from echelon.config.cluster.devices import common_devices
from echelon.config.load import load_job
from echelon.core.errors import ConfigError, Problem
from echelon.core.plan import DTYPE_BYTES, Plan, ZeroStage
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
    kv_bytes,
    largest_model,
    memory_saving,
    model_states,
    states_formula,
    states_of_rank,
    weights_by_part,
)
from echelon.planner.predict.split_memory import block_activations, state_precision
from echelon.planner.search.request import asks_what_exists
from echelon.planner.view.text_layout import WIDTH, table, wrap_text


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryQuestion:
    """Hold a run, N, the bytes that a weight takes, and the memory of a device."""

    plan: Plan
    degree: int
    precision: StatePrecision
    memory_bytes: int


def ask_memory(
    run: str | None = None,
    settings: Sequence[str] = (),
    *,
    dp: int | None = None,
    memory_bytes: str | None = None,
    precision: StatePrecisionName | None = None,
) -> MemoryQuestion:
    """Return the question; ConfigError without a run, without N, or with numbers out of range."""
    if run is None:
        example = "echelon explain memory llama2-7b --dp 4"
        raise bad_argument("the bytes of which model? Name a run, or a preset", example)
    if asks_what_exists(run, settings):
        # A model without a cluster is explained on the first common device.
        settings = (*settings, f"cluster.preset=1x{common_devices()[0]}")
    plan = load_job(run, settings).plan
    shared = plan.mesh.dp_shard * plan.mesh.cp
    problems: list[Problem] = []
    if dp is None and shared == 1:
        problems.append(
            ZERO_NEEDS_DEGREE.problem(
                f"what a rank holds of {plan.model.name} depends on N, the number of data ranks; "
                "this run shares nothing out",
                suggestions=("--dp 8", "--set mesh.dp_shard=8 --set zero.stage=1"),
            )
        )
    if dp is not None and dp < 1:
        problems.append(out_of_range(f"--dp {dp}", "--dp 1"))
    memory: int | Problem = plan.cluster.device.memory_bytes
    if memory_bytes is not None:
        memory = read_bytes("--memory-bytes", memory_bytes)
    if isinstance(memory, Problem):
        problems.append(memory)
    if problems or isinstance(memory, Problem):
        raise ConfigError(problems)
    return MemoryQuestion(
        plan=plan,
        degree=dp or shared,
        precision=PRECISIONS[precision] if precision else state_precision(plan),
        memory_bytes=memory,
    )


def memory_json(question: MemoryQuestion) -> dict[str, Any]:
    """Return the page as JSON values."""
    plan, mesh = question.plan, question.plan.mesh
    return {
        "model": plan.model.name,
        "degree": question.degree,
        "tp": mesh.tp,
        "pp": mesh.pp,
        "ep": mesh.ep,
        "device": plan.cluster.device.name,
        "memory_bytes": question.memory_bytes,
        "bytes_a_weight": asdict(question.precision),
        "weights": dict(weights_by_part(plan.model)),
        "stages": [
            {
                "stage": stage,
                "formula": states_formula(stage, question.precision),
                **asdict(states := _states(question, stage)),
                "held_bytes": states.total,
                "fits": states.total <= question.memory_bytes,
                "largest_model": _largest(question, stage, offload=False),
                "largest_model_optimizer_offloaded": _largest(question, stage, offload=True),
            }
            for stage in STAGES
        ],
        "kv_bytes_a_layer": _kv(plan, 1),
        "kv_bytes": _kv(plan, plan.model.layers),
        "block_activation_bytes": block_activations(plan),
    }


def memory_text(question: MemoryQuestion, *, columns: int = WIDTH) -> str:
    """Return the page that a person reads."""
    return "\n\n".join("\n".join(part) for part in _parts(question, columns=columns)) + "\n"


def _parts(question: MemoryQuestion, *, columns: int) -> Iterator[list[str]]:
    model, parts = question.plan.model, weights_by_part(question.plan.model)
    size = question.precision.parameters
    total = sum(parts.values())
    rows = [
        (f"  {name}", f"{count:,}", f"{size} x {short_count(count)} = {binary_bytes(size * count)}")
        for name, count in (*parts.items(), ("together", total))
    ]
    device = question.plan.cluster.device.name
    head = f"{model.name} on {device}: weights, and their {size} bytes each"
    yield [head, table(("", "", ""), rows, columns=columns), "", *_mlp(question, columns=columns)]
    sizes = question.precision
    kinds = [("gradients", sizes.gradients), ("master copy", sizes.master)]
    kinds.append(("moments", sizes.moments))
    products = _products(sizes, kinds, total, width=12)
    yield ["Model states without ZeRO, the whole model", "", *products]
    yield list(_stages(question, columns=columns))
    yield list(_largest_models(question, columns=columns))
    yield list(_keys(question.plan))
    yield list(_block(question.plan))


def _mlp(question: MemoryQuestion, *, columns: int) -> Iterator[str]:
    model, size = question.plan.model, question.precision.parameters
    matrices, ffn = (3 if model.gated else 2), model.ffn
    what = "an MLP"
    if model.experts is not None:
        ffn, what = model.experts.ffn, f"one of {model.experts.num_experts} experts"
    count = matrices * model.hidden * ffn
    yield from wrap_text(
        f"{what}: {matrices} x {model.hidden:,} x {ffn:,} = {count:,} weights, "
        f"{binary_bytes(size * count)}",
        "  ",
        "    ",
        columns=columns,
    )


def _products(
    sizes: StatePrecision, kinds: Iterable[tuple[str, int]], psi: int, *, width: int
) -> Iterator[str]:
    """Yield the bytes of psi weights: of parameters, of some kinds, and of all together."""
    for name, size in (("parameters", sizes.parameters), *kinds, ("together", sizes.total)):
        if size:
            yield f"  {name:<{width}}  {size:>2} x {psi:,} = {binary_bytes(size * psi)}"


def _stages(question: MemoryQuestion, *, columns: int) -> Iterator[str]:
    mesh, memory = question.plan.mesh, question.memory_bytes
    yield (
        f"A rank holds of the model, N = {question.degree} data ranks "
        f"(tp {mesh.tp}, pp {mesh.pp}, ep {mesh.ep})"
    )
    yield ""
    rows = [
        (
            stage,
            states_formula(stage, question.precision),
            binary_bytes(states.total),
            f"{100 * states.total / memory:.0f} % of {binary_bytes(memory)}",
            "fits" if states.total <= memory else "does not fit",
        )
        for stage in STAGES
        for states in (_states(question, stage),)
    ]
    yield table(("stage", "a weight", "held", "of a device", ""), rows, columns=columns)


def _largest_models(question: MemoryQuestion, *, columns: int) -> Iterator[str]:
    yield (
        f"Largest dense model whose states fit {binary_bytes(question.memory_bytes)} at "
        f"N = {question.degree}, uncut otherwise"
    )
    yield ""
    rows = [
        (stage, *(short_count(_largest(question, stage, offload=off)) for off in (False, True)))
        for stage in STAGES
    ]
    yield table(("stage", "all on the device", "optimizer state offloaded"), rows, columns=columns)
    yield ""
    yield "Activations come on top of all of these."


def _keys(plan: Plan) -> Iterator[str]:
    model, length = plan.model, plan.mathematics.sequence_length
    size = DTYPE_BYTES[plan.mathematics.precision.parameters]
    yield f"Keys and values of one sequence of {length:,} positions"
    yield ""
    one, whole = _kv(plan, 1), _kv(plan, model.layers)
    yield f"  a layer    2 x {length:,} x {model.kv_dim:,} x {size} = {binary_bytes(one)}"
    yield f"  {model.layers} layers  {binary_bytes(whole)}"
    cp, tp = plan.mesh.cp, plan.mesh.tp
    if cp * tp > 1:
        yield f"  on a rank  {binary_bytes(whole / (cp * tp))} (cp {cp} x tp {tp})"
    if model.kv_heads < model.heads:
        every = kv_bytes(length, model.query_dim, model.layers, size)
        yield (
            f"  {model.kv_heads} of {model.heads} heads have keys: as many as heads would take "
            f"{binary_bytes(every)}"
        )
    yield "  Generation keeps them as a cache; training keeps those that backward needs."


def _block(plan: Plan) -> Iterator[str]:
    yield "What one block keeps of a microbatch for backward, uncut"
    yield ""
    yield (
        f"  {plan.layout.microbatch_sequences} x {plan.mathematics.sequence_length:,} positions: "
        f"{binary_bytes(block_activations(plan))} (cost/peak/fullest_rank.py)"
    )


def _states(question: MemoryQuestion, stage: ZeroStage) -> ModelStates:
    mesh = question.plan.mesh
    return states_of_rank(
        question.plan.model,
        stage,
        question.degree,
        question.precision,
        degrees=(mesh.tp, mesh.pp, mesh.ep),
    )


def _largest(question: MemoryQuestion, stage: ZeroStage, *, offload: bool) -> int:
    return largest_model(
        question.memory_bytes, stage, question.degree, question.precision, optimizer_offload=offload
    )


def _kv(plan: Plan, layers: int) -> int:
    size = DTYPE_BYTES[plan.mathematics.precision.parameters]
    return kv_bytes(plan.mathematics.sequence_length, plan.model.kv_dim, layers, size)


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
        found["largest_models"] = _largest_by_stage(question, question.memory_bytes)
        if question.num_parameters is not None:
            found["cheapest_stage"] = _cheapest(question, question.memory_bytes)
    return found


def zero_text(question: ZeroQuestion, *, columns: int = WIDTH) -> str:
    """Return the page that a person reads."""
    parts = [_title(question), "A weight takes\n\n" + _weight(question.sizes, columns=columns)]
    if question.num_parameters is not None:
        parts.append("\n".join(_states_alone(question, question.num_parameters)))
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


def _states_alone(question: ZeroQuestion, psi: int) -> Iterator[str]:
    """Yield the arithmetic of one rank without ZeRO, and of what all ranks store."""
    sizes, degree = question.sizes, question.degree
    yield "Without ZeRO a rank holds"
    yield ""
    kinds = (("gradients", sizes.gradients), ("optimizer state", sizes.optimizer))
    yield from _products(sizes, kinds, psi, width=15)
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
            *(
                _amount(question, held, binary_bytes)
                for held in (*asdict(states).values(), states.total)
            ),
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
            _amount(question, question.sent(stage), decimal_bytes),
            _COLLECTIVES[stage],
        )
        for stage in STAGES
    ]
    return table(("stage", "formula", "bytes", "how"), rows, columns=columns)


def _notes(question: ZeroQuestion) -> Iterator[str]:
    memory = question.memory_bytes
    if memory is not None:
        largest = zip(_largest_by_stage(question, memory), STAGES, strict=True)
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


def _largest_by_stage(question: ZeroQuestion, memory: int) -> list[int]:
    return [largest_model(memory, stage, question.degree, question.sizes) for stage in STAGES]


def _cheapest(question: ZeroQuestion, memory: int) -> ZeroStage | None:
    return cheapest_stage(question.num_parameters or 0, memory, question.degree, question.sizes)


def _amount(question: ZeroQuestion, value: float, text: Callable[[float], str]) -> str:
    return f"{value:.4g} psi" if question.num_parameters is None else text(value)
