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
from itertools import product, starmap

from echelon.core.choices.context_kinds import CONTEXT_KINDS
from echelon.core.mesh import Mesh
from echelon.core.plan import (
    Context,
    ContextKind,
    Layout,
    Pipeline,
    Plan,
    Recompute,
    RecomputePolicy,
)
from echelon.proof.shrink import stages_of
from echelon.schedule.action import Action, ActionKind
from echelon.schedule.automatic import find_schedule
from echelon.schedule.build import SCHEDULES
from echelon.schedule.simulate import Durations
from tests.walks.matrix.cases import (
    OPTIMIZERS,
    RECOMPUTE_POLICIES,
    STAGES,
    MatrixCase,
    varied_model,
    varied_optimizer,
    varied_zero,
    with_experts,
)

FILE, AUTO = "file", "auto"
KINDS: tuple[ContextKind, ...] = tuple(CONTEXT_KINDS)
PIPELINE_COMBINATIONS = ("alone", "tp2", "cp2", "zero0", "zero1", "zero2", "zero3")
_MICROBATCHES = ("p", "2p", "3p+1")
_KINDS = ((ActionKind.F, ActionKind.BW), (ActionKind.F, ActionKind.B, ActionKind.W))


@dataclass(frozen=True, slots=True)
class PipelineCase(MatrixCase):
    """Name one pipeline; `microbatches` is a number in the words of the schedule's papers."""

    schedule: str
    pp: int
    combination: str
    recompute: RecomputePolicy
    tied: bool
    microbatches: str

    @property
    def name(self) -> str:
        parts = ["pipe", self.schedule, f"pp{self.pp}", self.combination, self.recompute]
        return "-".join([*parts, "tied" if self.tied else "untied", f"m{self.microbatches}"])

    @property
    def mesh(self) -> Mesh:
        """Return the mesh; at stage 0 every other one has replicas in the place of shards."""
        tp, dp = int(self.combination == "tp2") + 1, int(self.combination.startswith("zero")) + 1
        if self.combination == "cp2":
            return Mesh(pp=self.pp, cp=2)
        if self.combination == "zero0" and self.seed % 2:
            return Mesh(pp=self.pp, tp=tp, dp_replicate=dp)
        return Mesh(pp=self.pp, tp=tp, dp_shard=dp)

    def plan(self) -> Plan:
        mesh, seed = self.mesh, self.seed
        count = num_microbatches(self.schedule, self.pp, self.microbatches)
        pipeline = _pipeline(self, count)
        zero_stage = STAGES[int(self.combination[-1])] if mesh.dp > 1 else 0
        layout = Layout(
            mesh=mesh,
            microbatch_sequences=1 + seed % 2,
            pipeline=pipeline,
            sequence_parallel=mesh.tp > 1 and seed // 2 % 2 == 1,
            context=_context(self),
            recompute=Recompute(policy=self.recompute, every=1 + seed // 4 % 2),
            zero=varied_zero(zero_stage, seed // 64),
        )
        layers = sum(len(stage) for stage in pipeline.stages)
        model = varied_model(seed // 8, tp=mesh.tp, layers=layers, tied=self.tied)
        optimizer = replace(varied_optimizer(seed), kind=OPTIMIZERS[seed // 32 % 3])
        plan = self.plan_of(layout, count, model=model, optimizer=optimizer)
        return with_experts(plan, seed // 4096)


def pipeline_cases() -> Iterator[PipelineCase]:
    """Return every case of pipelines."""
    schedules = (*SCHEDULES, FILE, AUTO)
    dimensions = (PIPELINE_COMBINATIONS, RECOMPUTE_POLICIES, (False, True), _MICROBATCHES)
    return starmap(PipelineCase, product(schedules, (2, 4), *dimensions))


def num_microbatches(schedule: str, num_ranks: int, word: str) -> int:
    """Return the microbatches of a case: those of its word, or the next that a schedule takes."""
    count = {"p": num_ranks, "2p": 2 * num_ranks, "3p+1": 3 * num_ranks + 1}[word]
    builder = SCHEDULES.get(schedule)
    while builder is not None and not builder.allows_microbatches(num_ranks, count):
        count += 1
    return count


def _pipeline(case: PipelineCase, count: int) -> Pipeline:
    rng = random.Random(case.seed)
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
        schedule=case.schedule, virtual_stages=virtual, stages=_stages(stages, rng), rows=rows
    )


def _stages(num_stages: int, rng: random.Random) -> tuple[tuple[int, ...], ...]:
    """Return a block for each stage, and in some cases one stage with two and one with none."""
    counts = [1] * num_stages
    counts[rng.randrange(num_stages)] += rng.choice((0, 0, 1))
    if rng.random() < 1 / 3:
        counts[rng.randrange(num_stages)] = 0
    return stages_of(counts)


def _context(case: PipelineCase) -> Context:
    if case.combination != "cp2":
        return Context()
    kind = KINDS[case.seed // 16 % len(KINDS)]
    return Context(kind=kind, ulysses_degree=CONTEXT_KINDS[kind].exchange_degree(2, 2))


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
