"""What must hold between settings: mesh, model, batch, pipeline, cluster.

Each check reads the settings it needs and yields its problems; one that cannot be judged because a
setting is missing or wrong is skipped (see `config/view.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from math import gcd

from echelon.config.view import Unavailable, View
from echelon.core.axis import MESH_AXES
from echelon.core.errors import Problem
from echelon.core.mesh import Mesh
from echelon.core.rulebook.batch import BATCH_DIVIDES, SEQUENCE_FITS_POSITIONS
from echelon.core.rulebook.mesh import (
    LAYERS_FILL_STAGES,
    SEQUENCE_PARALLEL_DIVIDES_SEQUENCE,
    STAGES_COVER_LAYERS,
    STAGES_MATCH_MESH,
    TP_DIVIDES_FFN,
    TP_DIVIDES_HEADS,
    TP_DIVIDES_KV_HEADS,
)
from echelon.core.rulebook.schedule import SCHEDULE_NEEDS_MICROBATCHES
from echelon.core.rules import Rule, nearest_divisors
from echelon.schedule.build import SCHEDULES, schedule_problems

Check = Callable[[View], Iterable[Problem]]


def run_checks(view: View, checks: Iterable[Check]) -> list[Problem]:
    """Return the problems that these checks find, skipping those that cannot be judged."""
    problems: list[Problem] = []
    for check in checks:
        try:
            problems.extend(check(view))
        except Unavailable:
            continue
    return problems


def mesh_of(view: View) -> Mesh:
    """Return the mesh; Unavailable where a degree is wrong."""
    degrees = {axis.value: view.integer(f"mesh.{axis.value}") for axis in MESH_AXES}
    return Mesh(**degrees, ep=view.integer("mesh.ep"))


def data_ranks(view: View) -> int:
    """Return how many ranks read different samples."""
    return view.integer("mesh.dp_replicate") * view.integer("mesh.dp_shard")


def num_stages(view: View) -> int:
    """Return how many pipeline stages there are."""
    return view.integer("mesh.pp") * view.integer("pipeline.virtual_stages")


def _tp_divides(view: View, rule: Rule, key: str, what: str) -> Iterator[Problem]:
    tp, count = view.integer("mesh.tp"), view.integer(key)
    if count % tp:
        yield rule.problem(
            f"mesh.tp = {tp}, but {view.model_name} has {what} {count} ({count} % {tp} = "
            f"{count % tp})",
            key="mesh.tp",
            set_by=view.set_by("mesh.tp", key),
            works=nearest_divisors(_divided_by_tp(view), tp),
        )


def _divided_by_tp(view: View) -> int:
    keys = ["model.heads", "model.kv_heads", "model.ffn", "model.experts.ffn"]
    if view.flag("mesh.sequence_parallel"):
        keys.append("batch.sequence_length")
    return gcd(*(view.integer(key) for key in keys if view.has(key)))


def tp_divides_heads(view: View) -> Iterator[Problem]:
    """Check that every tensor rank gets whole query heads."""
    return _tp_divides(view, TP_DIVIDES_HEADS, "model.heads", "heads =")


def tp_divides_kv_heads(view: View) -> Iterator[Problem]:
    """Check that every tensor rank gets whole key/value heads."""
    return _tp_divides(view, TP_DIVIDES_KV_HEADS, "model.kv_heads", "kv_heads =")


def tp_divides_ffn(view: View) -> Iterator[Problem]:
    """Check that the inner width of every MLP is cut evenly."""
    yield from _tp_divides(view, TP_DIVIDES_FFN, "model.ffn", "ffn =")
    if view.has_table("model.experts"):
        yield from _tp_divides(view, TP_DIVIDES_FFN, "model.experts.ffn", "experts.ffn =")


def sequence_parallel_divides_sequence(view: View) -> Iterator[Problem]:
    """Check that every tensor rank gets an equal piece of a sequence."""
    tp, length = view.integer("mesh.tp"), view.integer("batch.sequence_length")
    if view.flag("mesh.sequence_parallel") and length % tp:
        below = length - length % tp
        yield SEQUENCE_PARALLEL_DIVIDES_SEQUENCE.problem(
            f"batch.sequence_length = {length} is not a multiple of mesh.tp = {tp} "
            f"({length} % {tp} = {length % tp}), and mesh.sequence_parallel cuts it",
            key="batch.sequence_length",
            set_by=view.set_by("batch.sequence_length", "mesh.tp"),
            works=[value for value in (below, below + tp) if value > 0],
        )


def sequence_fits_positions(view: View) -> Iterator[Problem]:
    """Check that a sequence is not longer than the positions of the model."""
    length, positions = view.integer("batch.sequence_length"), view.integer("model.max_positions")
    if length > positions:
        yield SEQUENCE_FITS_POSITIONS.problem(
            f"batch.sequence_length = {length}, but {view.model_name} has {positions} positions",
            key="batch.sequence_length",
            set_by=view.set_by("batch.sequence_length", "model.max_positions"),
            works=(f"1 to {positions}",),
        )


def batch_divides(view: View) -> Iterator[Problem]:
    """Check that the global batch is shared out evenly."""
    total, size = (
        view.integer("batch.global_sequences"),
        view.integer("batch.microbatch_sequences"),
    )
    dp = data_ranks(view)
    rest = total % (size * dp)
    if rest == 0:
        return
    works = [f"global_sequences = {n}" for n in (total - rest, total - rest + size * dp) if n > 0]
    if total % dp == 0:
        sizes = nearest_divisors(total // dp, size, limit=2)
        works += [f"microbatch_sequences = {n}" for n in sizes]
    yield BATCH_DIVIDES.problem(
        f"batch.global_sequences = {total} is not a multiple of microbatch_sequences x data "
        f"ranks = {size} x {dp} = {size * dp} ({total} % {size * dp} = {rest})",
        key="batch.global_sequences",
        set_by=view.set_by(
            "batch.global_sequences",
            "batch.microbatch_sequences",
            "mesh.dp_replicate",
            "mesh.dp_shard",
        ),
        works=works,
    )


def schedule_fits(view: View) -> Iterator[Problem]:
    """Check that the schedule exists and has the stages and microbatches that it needs."""
    name = view.word("pipeline.schedule")
    if name not in SCHEDULES:
        # The other numbers do not matter: it reports the name alone.
        problems = schedule_problems(name, num_stages=1, num_ranks=1, num_microbatches=1)
    else:
        total, size = (
            view.integer("batch.global_sequences"),
            view.integer("batch.microbatch_sequences"),
        )
        pp, dp = view.integer("mesh.pp"), data_ranks(view)
        if total % (size * dp):
            return
        problems = schedule_problems(
            name,
            num_stages=pp,
            num_ranks=pp,
            num_microbatches=total // (size * dp),
        )
    keys = ["pipeline.schedule"]
    if name in SCHEDULES:
        keys += ["mesh.pp", "batch.global_sequences", "batch.microbatch_sequences"]
    for problem in problems:
        works = problem.works
        if problem.rule == SCHEDULE_NEEDS_MICROBATCHES.id:
            works = (*_smaller_microbatches(view), *works)
        yield replace(problem, set_by=view.set_by(*keys), works=works)


def _smaller_microbatches(view: View) -> Iterator[str]:
    """Yield the largest microbatch with which there are as many as stages, if there is one."""
    share, rest = divmod(view.integer("batch.global_sequences"), data_ranks(view))
    sizes = [n for n in range(1, share // view.integer("mesh.pp") + 1) if share % n == 0]
    if sizes and rest == 0:
        yield f"batch.microbatch_sequences = {sizes[-1]}"


def layers_fill_stages(view: View) -> Iterator[Problem]:
    """Check that every stage gets a block."""
    stages, layers = num_stages(view), view.integer("model.layers")
    if layers < stages:
        yield LAYERS_FILL_STAGES.problem(
            f"mesh.pp = {view.integer('mesh.pp')} makes {stages} stages, but "
            f"{view.model_name} has {layers} blocks",
            key="mesh.pp",
            set_by=view.set_by("mesh.pp", "model.layers"),
            works=(f"1 to {layers // view.integer('pipeline.virtual_stages')}",),
        )


def stages_match_mesh(view: View) -> Iterator[Problem]:
    """Check that there is one explicit list for each stage."""
    stages = view.stage_lists()
    if stages is not None and len(stages) != num_stages(view):
        yield STAGES_MATCH_MESH.problem(
            f"pipeline.stages lists {len(stages)} stages, but pp x virtual_stages = "
            f"{view.integer('mesh.pp')} x {view.integer('pipeline.virtual_stages')} = "
            f"{num_stages(view)}",
            key="pipeline.stages",
            set_by=view.set_by("pipeline.stages", "mesh.pp"),
            works=("one list for each stage", '"auto"'),
        )


def stages_cover_layers(view: View) -> Iterator[Problem]:
    """Check that explicit stages hold each block once, in order, and no stage is empty."""
    stages = view.stage_lists()
    if stages is None:
        return
    layers = view.integer("model.layers")
    listed = [block for stage in stages for block in stage]
    faults = [f"stage {s} has no block" for s, stage in enumerate(stages) if not stage]
    if missing := sorted(set(range(layers)) - set(listed)):
        faults.append(f"blocks {_ranges(missing)} are in no stage")
    if extra := sorted(set(listed) - set(range(layers))):
        faults.append(f"blocks {_ranges(extra)} do not exist ({layers} blocks, from 0)")
    if twice := sorted({block for block in listed if listed.count(block) > 1}):
        faults.append(f"blocks {_ranges(twice)} are named more than once")
    if not faults and listed != sorted(listed):
        at = next(i for i, block in enumerate(listed) if block != i)
        faults.append(f"block {listed[at]} stands where block {at} belongs")
    if faults:
        yield STAGES_COVER_LAYERS.problem(
            f"pipeline.stages: {'; '.join(faults)}",
            key="pipeline.stages",
            set_by=view.set_by("pipeline.stages"),
            works=('"auto"',),
        )


def _ranges(numbers: list[int]) -> str:
    parts: list[str] = []
    start = previous = numbers[0]
    for number in (*numbers[1:], None):
        if number is not None and number == previous + 1:
            previous = number
            continue
        parts.append(str(start) if start == previous else f"{start}-{previous}")
        if number is not None:
            start = previous = number
    return ", ".join(parts[:6]) + (", ..." if len(parts) > 6 else "")


CHECKS: tuple[Check, ...] = (
    tp_divides_heads,
    tp_divides_kv_heads,
    tp_divides_ffn,
    sequence_parallel_divides_sequence,
    sequence_fits_positions,
    batch_divides,
    schedule_fits,
    layers_fill_stages,
    stages_match_mesh,
    stages_cover_layers,
)
