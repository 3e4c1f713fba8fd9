"""The pipelines that are proven: every schedule, alone and beside other parallelisms.

Every schedule, one of a file and one that the search found x pp {2, 4} x {alone, tp2, cp2, dp2 with
ZeRO 0 to 3} x recompute {none, full} x {tied, untied} x microbatches {p, 2p, 3p + 1} (where the
schedule takes them, else the next number that it takes). What else there is turns with the case:
uneven stages and empty ones, sequence parallelism, when gradients are reduced and parameters freed,
the optimizer, and of a schedule that no builder makes the placement of its stages, its order, which
backward passes are split, whether microbatches cross the ranks both ways, and experts.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, product
from typing import get_args

from echelon.core.mesh import Mesh
from echelon.core.plan import (
    Context,
    ContextKind,
    Layout,
    Mathematics,
    OptimizerKind,
    Pipeline,
    Plan,
    Recompute,
    RecomputePolicy,
    Zero,
    ZeroStage,
)
from echelon.prove.cases import POLICIES, one_machine, turn_of, turned_model, turned_optimizer
from echelon.prove.mixed_in import with_experts
from echelon.schedule.action import Action, ActionKind
from echelon.schedule.automatic import find_schedule
from echelon.schedule.build import SCHEDULES
from echelon.schedule.simulate import Durations

FILE, AUTO = "file", "auto"
KINDS: tuple[ContextKind, ...] = get_args(ContextKind)
BESIDE = ("alone", "tp2", "cp2", "zero0", "zero1", "zero2", "zero3")
OPTIMIZERS: tuple[OptimizerKind, ...] = ("adamw", "sgd", "muon")
_MICROBATCHES = ("p", "2p", "3p+1")
_KINDS = ((ActionKind.F, ActionKind.BW), (ActionKind.F, ActionKind.B, ActionKind.W))


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineCase:
    """Name one pipeline; `microbatches` is a number in the words of the schedule's papers."""

    schedule: str
    pp: int
    beside: str
    recompute: RecomputePolicy
    tied: bool
    microbatches: str

    @property
    def name(self) -> str:
        """Return a name that is unique in the matrix."""
        parts = ["pipe", self.schedule, f"pp{self.pp}", self.beside, self.recompute]
        return "-".join([*parts, "tied" if self.tied else "untied", f"m{self.microbatches}"])

    @property
    def turn(self) -> int:
        """Return a number that depends on the name: it picks what is not a dimension."""
        return turn_of(self.name)

    @property
    def mesh(self) -> Mesh:
        """Return the mesh; at stage 0 every other one has replicas in the place of shards."""
        tp, dp = int(self.beside == "tp2") + 1, int(self.beside.startswith("zero")) + 1
        if self.beside == "cp2":
            return Mesh(pp=self.pp, cp=2)
        if self.beside == "zero0" and self.turn % 2:
            return Mesh(pp=self.pp, tp=tp, dp_replicate=dp)
        return Mesh(pp=self.pp, tp=tp, dp_shard=dp)

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return self.mesh.world_size

    def plan(self) -> Plan:
        """Return the plan of this case; it is small already, so shrinking leaves little to do."""
        return _plan(self)


def pipeline_cases() -> Iterator[PipelineCase]:
    """Return every case of pipelines."""
    for schedule, pp, beside, recompute, tied, microbatches in product(
        (*SCHEDULES, FILE, AUTO), (2, 4), BESIDE, POLICIES, (False, True), _MICROBATCHES
    ):
        yield PipelineCase(
            schedule=schedule,
            pp=pp,
            beside=beside,
            recompute=recompute,
            tied=tied,
            microbatches=microbatches,
        )


def num_microbatches(schedule: str, num_ranks: int, word: str) -> int:
    """Return the microbatches of a case: those of its word, or the next that a schedule takes."""
    count = {"p": num_ranks, "2p": 2 * num_ranks, "3p+1": 3 * num_ranks + 1}[word]
    builder = SCHEDULES.get(schedule)
    while builder is not None and not builder.allows_microbatches(num_ranks, count):
        count += 1
    return count


def _plan(case: PipelineCase) -> Plan:
    mesh, turn = case.mesh, case.turn
    count = num_microbatches(case.schedule, case.pp, case.microbatches)
    pipeline = _pipeline(case, count)
    microbatch = 1 + turn % 2
    layout = Layout(
        mesh=mesh,
        microbatch_sequences=microbatch,
        pipeline=pipeline,
        sequence_parallel=mesh.tp > 1 and turn // 2 % 2 == 1,
        context=_context(case),
        recompute=Recompute(policy=case.recompute, every=1 + turn // 4 % 2),
        zero=_zero(case),
    )
    layers = sum(len(stage) for stage in pipeline.stages)
    mathematics = Mathematics(
        model=turned_model(turn // 8, tp=mesh.tp, layers=layers, tied=case.tied),
        global_sequences=microbatch * mesh.dp * count,
        sequence_length=16,
        seed=turn % 1000,
        optimizer=replace(turned_optimizer(turn), kind=OPTIMIZERS[turn // 32 % 3]),
    )
    plan = Plan(name=case.name, mathematics=mathematics, layout=layout, cluster=one_machine())
    return with_experts(plan, turn // 4096)


def _pipeline(case: PipelineCase, count: int) -> Pipeline:
    rng = random.Random(case.turn)
    builder = SCHEDULES.get(case.schedule)
    if builder is None:
        virtual = rng.choice((1, 2))
        stages = case.pp * virtual
        if case.schedule == FILE:
            rows = _any_rows(case, stages, count, rng)
        else:
            rows = _found_rows(case.pp, virtual, count, rng)
    else:
        virtual = builder.default_virtual_stages
        rows, stages = (), builder.stages_for(case.pp, virtual)
    return Pipeline(
        schedule=case.schedule,
        virtual_stages=virtual,
        stages=_stages(stages, rng),
        rows=rows,
    )


def _stages(num_stages: int, rng: random.Random) -> tuple[tuple[int, ...], ...]:
    """Return a block for each stage, and in some cases one stage with two and one with none."""
    counts = [1] * num_stages
    counts[rng.randrange(num_stages)] += rng.choice((0, 0, 1))
    if rng.random() < 1 / 3:
        counts[rng.randrange(num_stages)] = 0
    ends = [0, *accumulate(counts)]
    return tuple(tuple(range(start, end)) for start, end in pairwise(ends))


def _context(case: PipelineCase) -> Context:
    if case.beside != "cp2":
        return Context()
    kind = KINDS[case.turn // 16 % len(KINDS)]
    return Context(kind=kind, ulysses_degree=2 if kind.startswith("ulysses") else 1)


def _zero(case: PipelineCase) -> Zero:
    if not case.beside.startswith("zero"):
        return Zero()
    stage: ZeroStage = (0, 1, 2, 3)[int(case.beside[-1])]
    turn = case.turn // 64
    zero = Zero(stage=stage, accumulate="slices" if stage and turn % 2 else "whole")
    if stage < 3:
        return zero
    return replace(
        zero,
        reshard_after_forward=turn // 4 % 3 > 0,
        prefetch=turn // 12 % 3,
        unit_blocks=1 + turn // 36 % 2,
        keep_whole_below=turn // 72 % 2 * 512,
    )


def _owners(num_ranks: int, virtual: int, rng: random.Random) -> tuple[int, ...]:
    looped = [stage % num_ranks for stage in range(num_ranks * virtual)]
    folded = [r if s < num_ranks else num_ranks - 1 - r for s, r in enumerate(looped)]
    return tuple(rng.choice((looped, folded, rng.sample(looped, len(looped)))))


def _any_rows(
    case: PipelineCase, num_stages: int, count: int, rng: random.Random
) -> tuple[str, ...]:
    """Return the rows of some order in which everything can run: nobody's schedule.

    In some cases microbatches cross the ranks both ways, where a tied embedding allows that.
    """
    num_ranks, last = case.pp, num_stages - 1
    owners = _owners(num_ranks, num_stages // num_ranks, rng)
    both_ways = rng.random() < 1 / 2 and (not case.tied or owners[0] + owners[-1] == num_ranks - 1)
    mirrored = range(1, count, 2) if both_ways else ()
    left = [
        Action(kind, stage, microbatch)
        for stage in range(last + 1)
        for microbatch in range(count)
        for kind in rng.choice(_KINDS)
    ]
    rows: list[list[str]] = [[] for _ in range(num_ranks)]
    done: set[tuple[str, int, int]] = set()

    def can_run(action: Action) -> bool:
        stage, one = action.stage, action.microbatch
        if action.kind is ActionKind.F:
            return stage == 0 or ("F", stage - 1, one) in done
        if action.kind is ActionKind.W:
            return ("B", stage, one) in done
        ahead = stage == last or ("B", stage + 1, one) in done
        return ahead and ("F", stage, one) in done

    while left:
        action = rng.choice([one for one in left if can_run(one)])
        left.remove(action)
        kind = "F" if action.kind is ActionKind.F else action.kind.value[0]
        done.add((kind, action.stage, action.microbatch))
        owner = owners[action.stage]
        rank = num_ranks - 1 - owner if action.microbatch in mirrored else owner
        rows[rank].append(str(action))
    return tuple(" ".join(row) for row in rows)


def _found_rows(num_ranks: int, virtual: int, count: int, rng: random.Random) -> tuple[str, ...]:
    """Return the rows that the search finds for stages of unequal times."""
    owners = _owners(num_ranks, virtual, rng)

    def times() -> tuple[float, ...]:
        return tuple(rng.uniform(0.5, 2.0) for _ in owners)

    halves = times(), times()
    durations = Durations(
        forward_s=times(),
        backward_s=tuple(0.9 * (b + w) for b, w in zip(*halves, strict=True)),
        input_gradient_s=halves[0],
        weight_gradient_s=halves[1],
        transfer_s=tuple(rng.uniform(0.0, 0.3) for _ in owners[1:]),
    )
    limit = rng.choice((None, (num_ranks * virtual + 1,) * num_ranks))
    found = find_schedule(owners, count, durations, most_in_flight=limit)
    return tuple(" ".join(map(str, row)) for row in found.schedule.actions)
