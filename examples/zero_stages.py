"""What ZeRO's four stages keep whole, what they cut, and when it travels: measured, and drawn.

    python examples/zero_stages.py

Four ranks take one step of the preset nano at each stage, all dtypes as in the ZeRO paper: 2 bytes
a weight for parameters and gradients (bf16), 12 for the fp32 master copy and AdamW's moments. What
a rank holds is counted from the storages that are alive after the step, what it sends from the
collectives that it called; both must equal the formulas, to the byte.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
2020, sections 3.1, 5 and 7. The formulas: `echelon explain zero --dp 4`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import echelon as ec
from echelon.core.parameters import num_parameters
from echelon.core.plan import Plan, ZeroStage
from echelon.cost.bytes.model_sizes import (
    MIXED_PRECISION,
    STAGES,
    communication_volume,
    model_states,
)
from echelon.launch.context import RankContext
from echelon.launch.local.supervisor import RankPool
from echelon.proof.oracle.batches import global_batch
from echelon.training.subject import EngineSubject

TARGET = "zero_stages:one_rank"
"""What the ranks import: they are processes of their own."""

RANKS = 4
SHOWN = 1
"""The rank that is drawn."""

SETTINGS = (
    "batch.sequence_length=16",
    f"batch.global_sequences={RANKS}",
    "batch.microbatch_sequences=1",
    *(f"precision.{role}=bf16" for role in ("parameters", "gradients", "reduction")),
)
WEIGHT = {"parameters": 2, "gradients": 2, "master parameters": 4, "optimizer state": 8}
"""The bytes of a weight, by kind."""

PHASES = {"F": "forward", "BW": "backward", "update": "update"}
"""What a rank is doing, by the kind of the event that says so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What one rank held after a step, by kind, and sent in it, by phase and collective."""

    held: Mapping[str, int]
    sent: Mapping[tuple[str, str], int]


def stage_plan(stage: ZeroStage) -> Plan:
    """Return the plan of a stage; at stage 0 nothing is cut, and the ranks are replicas."""
    mesh = f"mesh.dp_shard={RANKS}" if stage else f"mesh.dp_replicate={RANKS}"
    return ec.plan("nano", settings=[*SETTINGS, mesh, f"zero.stage={stage}"])


def one_rank(context: RankContext, plans: Sequence[Plan]) -> list[Measured]:
    """Take a step under each plan; return what was held and sent."""
    return [measure(context, plan) for plan in plans]


def measure(context: RankContext, plan: Plan) -> Measured:
    """Take one step, and find what the rank was doing when it started each collective."""
    subject = EngineSubject(plan, context)
    held = subject.step(global_batch(plan, 0), 0).bytes_held
    phases = [event for event in subject.events.events if event.kind in PHASES]
    sent: Counter[tuple[str, str]] = Counter()
    for event in subject.events.events:
        if event.axis == "world" or event.name == "tokens":
            continue  # Some bytes of counts and losses, at every stage.
        for phase in phases:
            if event.axis and phase.start <= event.start <= phase.end:
                sent[PHASES[phase.kind], event.kind.replace("_", "-")] += event.bytes
    subject.close()
    return Measured(held=held, sent=sent)


def bar(kind: str, held: int, psi: int) -> str:
    """Draw what a rank holds of a kind; one sign is a quarter of a byte of each weight."""
    length = 4 * WEIGHT[kind]
    filled = round(length * held / (WEIGHT[kind] * psi))
    before = SHOWN * filled if filled < length else 0
    return ("." * before + "#" * filled).ljust(length, ".").ljust(len(kind))


def sendings(one: Measured, phase: str, psi: int) -> str:
    """Return what was started in a phase, as "3 psi in an all-reduce"."""
    found = [(kind, sent / psi) for (when, kind), sent in one.sent.items() if when == phase]
    return ", ".join(f"{kind} {size:g} psi" for kind, size in sorted(found)) or "-"


def agrees(one: Measured, stage: ZeroStage, psi: int) -> bool:
    """Return whether what was held and sent are what the formulas of the stage give."""
    stated = model_states(psi, stage, RANKS, MIXED_PRECISION)
    optimizer = one.held["master parameters"] + one.held["optimizer state"]
    held = (one.held["parameters"], one.held["gradients"], optimizer)
    sent = communication_volume(stage).sent_bytes(psi, RANKS, MIXED_PRECISION.parameters)
    right = (stated.parameters, stated.gradients, stated.optimizer)
    return held == right and sum(one.sent.values()) == sent


def report(ranks: Sequence[Sequence[Measured]], psi: int) -> str:
    """Return what the shown rank held and sent at each stage, and whether all ranks agree."""
    columns = "  ".join(kind.ljust(4 * size) for kind, size in WEIGHT.items())
    lines = [
        f"nano, psi = {psi:,} parameters, {RANKS} ranks. Between steps rank {SHOWN} holds #, other",
        "ranks hold the rest (one sign is psi/4 bytes):",
        "",
        f"stage  {columns}  together",
    ]
    for stage, one in zip(STAGES, ranks[SHOWN], strict=True):
        bars = "  ".join(bar(kind, one.held[kind], psi) for kind in WEIGHT)
        lines.append(f"{stage}      {bars}  {sum(one.held.values()) / psi:4g} psi")
    lines += ["", "Bytes that it starts to send in a step of one microbatch:", ""]
    lines.append(f"stage  {'in forward':18}  {'in backward':44}  with the update")
    for stage, one in zip(STAGES, ranks[SHOWN], strict=True):
        forward, backward, update = (sendings(one, phase, psi) for phase in PHASES.values())
        lines.append(f"{stage}      {forward:18}  {backward:44}  {update}")
    equal = all(
        agrees(one, stage, psi) for rank in ranks for stage, one in zip(STAGES, rank, strict=True)
    )
    verdict = "are" if equal else "are NOT"
    lines += ["", f"On every rank these {verdict} the bytes of the formulas, without remainder."]
    return "\n".join(lines)


def main() -> None:
    """Start the ranks, and print what they held and sent."""
    plans = [stage_plan(stage) for stage in STAGES]
    with RankPool(RANKS) as pool:
        ranks = pool.run(TARGET, plans, world_size=RANKS)
    print(report(ranks, num_parameters(plans[0].model)))


if __name__ == "__main__":
    main()
