"""What `echelon plan` shows of a plan: what each rank holds, who talks to whom, and how much.

Every number is read from `cost/` and `schedule/`; nothing is computed here but sums. Ranks of one
pipeline stage hold and send the same, so a stage is one row.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from echelon.cli.output import table
from echelon.core.axis import DATA_AXES, MESH_AXES, Axis
from echelon.core.parameters import num_parameters
from echelon.core.plan import Plan
from echelon.core.units import binary_bytes, decimal_bytes, short_count
from echelon.cost.bytes_held import HeldTerm, bytes_held
from echelon.cost.bytes_sent import SentTerm, bytes_sent
from echelon.cost.stage import stage_of_rank
from echelon.schedule.build import builder_of
from echelon.schedule.draw import draw_timeline
from echelon.schedule.simulate import Durations, simulate

GROUPS_WIDTH = 76
MOST_MEMBERS = 8
MOST_DRAWN_STAGES = 8
MOST_DRAWN_MICROBATCHES = 16

SENT_HEAD = """Each rank sends per step (n ranks in the group, N tokens of a microbatch, D the
hidden width, V the vocabulary, s bytes of a value):"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRow:
    """Hold what every rank of one pipeline stage holds and sends per step."""

    stage: int
    ranks: tuple[int, ...]
    blocks: tuple[int, ...]
    held: tuple[HeldTerm, ...]
    sent: tuple[SentTerm, ...]

    def alike(self, other: StageRow) -> bool:
        """Return whether `other` holds and sends as much, of as many blocks."""
        mine = (len(self.ranks), len(self.blocks), self.held, self.sent)
        return mine == (len(other.ranks), len(other.blocks), other.held, other.sent)


def runs_of_alike(rows: Sequence[StageRow]) -> list[list[StageRow]]:
    """Return consecutive rows that differ in nothing but their place together."""
    runs: list[list[StageRow]] = []
    for row in rows:
        if runs and runs[-1][-1].alike(row):
            runs[-1].append(row)
        else:
            runs.append([row])
    return runs


def stage_rows(plan: Plan) -> list[StageRow]:
    """Return one row for each pipeline stage."""
    others = [axis for axis in MESH_AXES if axis is not Axis.PP]
    rows: list[StageRow] = []
    for ranks in plan.mesh.groups(*others):
        stage = stage_of_rank(plan, ranks[0])
        rows.append(
            StageRow(
                stage=stage,
                ranks=ranks,
                blocks=plan.layout.pipeline.stages[stage],
                held=bytes_held(plan, ranks[0]),
                sent=bytes_sent(plan, ranks[0]),
            )
        )
    return rows


def groups(plan: Plan) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Return the groups of more than one rank, by axis; both data axes together are `dp`."""
    axes = {"pp": (Axis.PP,), "dp": DATA_AXES, "cp": (Axis.CP,), "tp": (Axis.TP,)}
    return {
        name: plan.mesh.groups(*which)
        for name, which in axes.items()
        if plan.mesh.degree(*which) > 1
    }


def most_held_bytes(rows: Sequence[StageRow]) -> int:
    """Return what the rank that holds most holds between steps."""
    return max(sum(term.bytes for term in row.held) for row in rows)


def plan_json(plan: Plan) -> dict[str, Any]:
    """Return the plan and its report as JSON values."""
    rows = stage_rows(plan)
    return {
        "plan": json.loads(plan.to_json()),
        "hash": plan.content_hash(),
        "num_parameters": num_parameters(plan.model),
        "num_microbatches": plan.num_microbatches,
        "held_bytes_fit": most_held_bytes(rows) <= plan.cluster.device.memory_bytes,
        "stages": [
            {
                "stage": row.stage,
                "ranks": list(row.ranks),
                "blocks": list(row.blocks),
                "held_bytes": {term.name: term.bytes for term in row.held},
                "sent_bytes_per_step": [
                    {
                        "axis": term.axis,
                        "name": term.name,
                        "count": term.count,
                        "each": term.each,
                        "bytes": term.bytes,
                        "formula": term.formula,
                        "source": term.source,
                    }
                    for term in row.sent
                ],
            }
            for row in rows
        ],
        "groups": {axis: [list(group) for group in found] for axis, found in groups(plan).items()},
    }


def plan_text(plan: Plan) -> str:
    """Return the plan as the page that a person reads."""
    rows = stage_rows(plan)
    runs = runs_of_alike(rows)
    device = plan.cluster.device
    fits = most_held_bytes(rows) <= device.memory_bytes
    room = f"{device.name} has {binary_bytes(device.memory_bytes)}"
    room += ", activations come on top" if fits else ": THIS DOES NOT FIT"
    parts = [
        "\n".join(_head(plan)),
        f"Each rank holds between steps ({room}):\n\n{_held(runs)}",
    ]
    if plan.mesh.world_size > 1:
        parts.append("Ranks that talk to one another:\n\n" + "\n".join(_group_lines(plan)))
        parts.append(f"{SENT_HEAD}\n\n{_sent(runs)}")
    if plan.num_stages > 1:
        parts.append(_timeline(plan))
    return "\n\n".join(parts) + "\n"


def _head(plan: Plan) -> Iterator[str]:
    model, numbers, layout = plan.model, plan.mathematics, plan.layout
    shape = f"{model.layers} blocks x {model.hidden} wide, {model.heads} heads"
    if model.kv_heads != model.heads:
        shape += f" ({model.kv_heads} key/value)"
    used = [axis for axis in MESH_AXES if plan.mesh.degree(axis) > 1]
    degrees = " x ".join(f"{axis} {plan.mesh.degree(axis)}" for axis in used)
    ranks = f"{plan.mesh.world_size}" + (f" = {degrees}" if degrees else "")
    if layout.sequence_parallel:
        ranks += ", sequence parallel"
    yield f"plan     {plan.name}  ({plan.content_hash()})"
    yield f"model    {model.name}: {short_count(num_parameters(model))} parameters, {shape}"
    yield f"ranks    {ranks}, on {plan.cluster.name} over {plan.cluster.backend}"
    yield (
        f"batch    {numbers.global_sequences} sequences x {numbers.sequence_length} tokens, "
        f"{plan.num_microbatches} microbatches of {layout.microbatch_sequences} on each data rank"
    )


def _held(runs: Sequence[Sequence[StageRow]]) -> str:
    names = [term.name for term in runs[0][0].held]
    cells = [
        (
            _range([row.stage for row in run]),
            _range([rank for row in run for rank in row.ranks]),
            len(run[0].blocks),
            _range([block for row in run for block in row.blocks]),
            *(binary_bytes(term.bytes) for term in run[0].held),
            binary_bytes(sum(term.bytes for term in run[0].held)),
        )
        for run in runs
    ]
    return table(("stage", "ranks", "blocks", "which", *names, "together"), cells)


def _sent(runs: Sequence[Sequence[StageRow]]) -> str:
    cells = [
        (
            _range([row.stage for row in run]),
            term.axis,
            term.name,
            term.count,
            decimal_bytes(term.bytes),
            term.formula,
        )
        for run in runs
        for term in run[0].sent
    ]
    return table(("stage", "axis", "what", "times", "bytes", "each time"), cells)


def _group_lines(plan: Plan) -> Iterator[str]:
    nodes = plan.cluster.devices_per_node
    for axis, found in groups(plan).items():
        shown = list(_fitting([_members(group) for group in found]))
        more = f"  and {len(found) - len(shown)} more" if len(found) > len(shown) else ""
        across = sum(len({rank // nodes for rank in group}) > 1 for group in found)
        links = f"  ({across} of {len(found)} between nodes)" if across else ""
        yield f"{axis}  {'  '.join(shown)}{more}{links}"


def _fitting(texts: Sequence[str]) -> Iterator[str]:
    width = 0
    for text in texts:
        width += len(text) + 2
        if width > GROUPS_WIDTH:
            return
        yield text


def _members(group: Sequence[int]) -> str:
    names = [str(rank) for rank in group[:MOST_MEMBERS]]
    if len(group) > MOST_MEMBERS:
        names += ["...", str(group[-1])]
    return f"[{' '.join(names)}]"


def _timeline(plan: Plan) -> str:
    builder = builder_of(
        plan.layout.pipeline.schedule,
        num_stages=plan.num_stages,
        num_ranks=plan.mesh.pp,
        num_microbatches=plan.num_microbatches,
    )
    bubble = f"{100 * builder.bubble_fraction():.1f} % of the step is bubble"
    head = f"Each stage runs {builder.name}; if all stages took equally long, {bubble}"
    if plan.num_stages > MOST_DRAWN_STAGES or plan.num_microbatches > MOST_DRAWN_MICROBATCHES:
        return f"{head}."
    durations = Durations.uniform(plan.num_stages)
    events = simulate(builder.schedule(), durations).events
    # One rank runs one stage; the last line is a scale in seconds, which these are not.
    lines = [line.replace("rank", "stage", 1) for line in draw_timeline(events, 95).splitlines()]
    head += "\n(F forward, B backward at twice the time, a dot is waiting):\n\n"
    return head + "\n".join(lines[:-1])


def _range(numbers: Sequence[int]) -> str:
    if len(numbers) > 1 and list(numbers) == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]}-{numbers[-1]}"
    if len(numbers) > MOST_MEMBERS:
        return f"{numbers[0]}, {numbers[1]} ... {numbers[-1]}"
    return ", ".join(map(str, numbers))
