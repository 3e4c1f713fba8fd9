"""The layouts of operators that are made again which are proven.

{every set of operators that is legal} x {alone, ZeRO-2, ZeRO-3, tp2, tp2 + sequence parallelism,
cp2 as a ring and by heads, a pipeline with B and W together and apart, and several of these at
once} x {in every block, in those between blocks that are made again whole}. The kind of model, the
optimizer, the sequences of a microbatch and accumulation turn with the case.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations, product, starmap

from echelon.core.mesh import Mesh
from echelon.core.plan import (
    Context,
    ContextKind,
    Layout,
    Pipeline,
    Plan,
    Recompute,
    RecomputedOperator,
    RecomputePolicy,
    ZeroStage,
)
from echelon.proof.shrink import stages_of
from tests.walks.matrix.cases import (
    OPTIMIZERS,
    RECOMPUTE_POLICIES,
    MatrixCase,
    varied_model,
    varied_optimizer,
    varied_zero,
    with_experts,
)

OPERATORS: tuple[RecomputedOperator, ...] = ("norm", "activation", "mlp", "attention")
POLICIES: tuple[RecomputePolicy, ...] = ("selective", RECOMPUTE_POLICIES[-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Say how a model is cut in these cases."""

    mesh: Mesh
    stage: ZeroStage = 0
    sequence_parallel: bool = False
    schedule: str = "1f1b"
    kind: ContextKind = "ring"


SPLITS: dict[str, Split] = {
    "alone": Split(mesh=Mesh()),
    "zero2": Split(mesh=Mesh(dp_shard=2), stage=2),
    "zero3": Split(mesh=Mesh(dp_shard=2), stage=3),
    "tp2": Split(mesh=Mesh(tp=2)),
    "tp2sp": Split(mesh=Mesh(tp=2), sequence_parallel=True),
    "ring2": Split(mesh=Mesh(cp=2)),
    "ulysses2": Split(mesh=Mesh(cp=2), kind="ulysses"),
    "pp2": Split(mesh=Mesh(pp=2)),
    "pp2-zb": Split(mesh=Mesh(pp=2), schedule="zb-h1"),
    "tp2sp-pp2-zb": Split(mesh=Mesh(pp=2, tp=2), sequence_parallel=True, schedule="zb-h1"),
    "ring2-tp2sp": Split(mesh=Mesh(cp=2, tp=2), sequence_parallel=True),
    "zero3-tp2sp-pp2": Split(mesh=Mesh(pp=2, dp_shard=2, tp=2), stage=3, sequence_parallel=True),
    "zero1-ulysses2-pp2-zb": Split(
        mesh=Mesh(pp=2, dp_shard=2, cp=2), stage=1, schedule="zb-h1", kind="ulysses"
    ),
}
"""Splits by name."""


def split_layout(split: Split, counts: list[int], again: Recompute, seed: int) -> Layout:
    """Return the layout of a split whose stages have so many layers, with what varies by `seed`."""
    return Layout(
        mesh=split.mesh,
        microbatch_sequences=1 + seed % 2,
        pipeline=Pipeline(schedule=split.schedule, stages=stages_of(counts)),
        sequence_parallel=split.sequence_parallel,
        context=Context(kind=split.kind, ulysses_degree=2 if split.kind == "ulysses" else 1),
        recompute=again,
        zero=varied_zero(split.stage, seed // 4),
    )


@dataclass(frozen=True, slots=True)
class RecomputeCase(MatrixCase):
    """Name operators that are made again, in one layout."""

    operators: tuple[RecomputedOperator, ...]
    split: str
    policy: RecomputePolicy

    @property
    def name(self) -> str:
        return "-".join(["again", self.split, self.policy, *self.operators])

    @property
    def mesh(self) -> Mesh:
        return SPLITS[self.split].mesh

    def plan(self) -> Plan:
        split, seed = SPLITS[self.split], self.seed
        full = self.policy == "full"
        # A stage has a block that is made again whole, and one that is not.
        counts = [2] * self.mesh.pp
        again = Recompute(policy=self.policy, every=2 if full else 1, operators=self.operators)
        layout = split_layout(split, counts, again, seed)
        model = varied_model(
            seed // 8, tp=self.mesh.tp, layers=sum(counts), tied=seed // 32 % 2 > 0
        )
        optimizer = replace(varied_optimizer(seed), kind=OPTIMIZERS[seed // 64 % len(OPTIMIZERS)])
        count = self.mesh.pp * (1 + seed // 2 % 2)
        plan = self.plan_of(layout, count, model=model, optimizer=optimizer)
        if set(self.operators) <= {"norm", "attention"}:
            # Experts have no operators of their own that are made again.
            return with_experts(plan, self.seed // 256)
        return plan


def operator_sets() -> Iterator[tuple[RecomputedOperator, ...]]:
    """Yield every set of operators; where an MLP is made again its activation is a part of that."""
    for count in range(1, len(OPERATORS) + 1):
        for names in combinations(OPERATORS, count):
            if not {"activation", "mlp"} <= {*names}:
                yield names


def recompute_cases() -> Iterator[RecomputeCase]:
    """Return every case of operators that are made again."""
    return starmap(RecomputeCase, product(operator_sets(), SPLITS, POLICIES))
