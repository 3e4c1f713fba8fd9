# SPDX-License-Identifier: Apache-2.0
"""`echelon explain memory`: the bytes of a model, line by line, and the largest model that fits.

Weights by part, model states at each ZeRO stage for N data ranks, keys and values, what a block
keeps for backward. Every line is a formula of `cost/`; without N there is no figure of a rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from echelon.cli.explain.zero import PRECISIONS, StatePrecisionName, out_of_range
from echelon.cli.flags import bad_argument, read_bytes
from echelon.config.cluster.devices import common_devices
from echelon.config.load import load_job
from echelon.core.errors import ConfigError, Problem
from echelon.core.plan import DTYPE_BYTES, Plan, ZeroStage
from echelon.core.rulebook.planner import ZERO_NEEDS_DEGREE
from echelon.core.units import binary_bytes, short_count
from echelon.cost.bytes.model_sizes import (
    STAGES,
    ModelStates,
    StatePrecision,
    kv_bytes,
    largest_model,
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
    yield ["Model states without ZeRO, the whole model", "", *_derivation(question, total)]
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


def _derivation(question: MemoryQuestion, psi: int) -> Iterator[str]:
    sizes = question.precision
    for name, size in (
        ("parameters", sizes.parameters),
        ("gradients", sizes.gradients),
        ("master copy", sizes.master),
        ("moments", sizes.moments),
        ("together", sizes.total),
    ):
        if size:
            yield f"  {name:<12}  {size:>2} x {psi:,} = {binary_bytes(size * psi)}"


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
