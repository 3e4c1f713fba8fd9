"""The context parallelism that is proven: every kind, every mask, alone and beside the others.

Kind x cp {2, 4} x mask {causal, full, documents of very unequal length, sliding window} x {as many
key/value heads as query heads, half, one for each tensor rank} x {alone, tp2 with and without
sequence parallelism, dp2 with ZeRO-3, pp2 with 1F1B, tp2 x pp2 (up to 16 ranks)}. What else there
is turns with the case: the kind of model (positions, norms, biases, dropout), the length of the
window, masks that are two of these at once, a soft cap, recompute, accumulation, the optimizer,
experts.
Token counts are uneven over the data ranks everywhere, and over the context ranks in nearly all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product, starmap

from echelon.core.choices.context_kinds import CONTEXT_KINDS
from echelon.core.mesh import Mesh
from echelon.core.model_shape import ModelShape
from echelon.core.plan import Context, ContextKind, Layout, Pipeline, Plan, Recompute, Zero
from echelon.proof.shrink import stages_of
from tests.walks.matrix.cases import (
    OPTIMIZERS,
    MatrixCase,
    varied_model,
    varied_optimizer,
    with_experts,
)
from tests.walks.matrix.pipeline_cases import KINDS

MASKS = ("causal", "full", "documents", "window")
HEADS = ("mha", "gqa", "mqa")
CONTEXT_COMBINATIONS = ("alone", "tp2", "tp2sp", "zero3", "pp2", "tp2pp2")
_CHUNK = 8  # tokens
_WINDOWS = (2, 5, _CHUNK, _CHUNK + 3, 2 * _CHUNK + 5)


@dataclass(frozen=True, slots=True)
class ContextCase(MatrixCase):
    """Name one way to cut sequences."""

    kind: ContextKind
    cp: int
    mask: str
    heads: str
    combination: str

    @property
    def name(self) -> str:
        return "-".join(
            ["context", self.kind, f"cp{self.cp}", self.mask, self.heads, self.combination]
        )

    @property
    def mesh(self) -> Mesh:
        return Mesh(
            cp=self.cp,
            tp=2 if self.combination.startswith("tp2") else 1,
            pp=2 if self.combination.endswith("pp2") else 1,
            dp_shard=2 if self.combination == "zero3" else 1,
        )

    def plan(self) -> Plan:
        mesh, seed = self.mesh, self.seed
        layout = Layout(
            mesh=mesh,
            microbatch_sequences=1 + seed % 2,
            pipeline=Pipeline(schedule="1f1b", stages=stages_of([2 // mesh.pp] * mesh.pp)),
            sequence_parallel=self.combination == "tp2sp",
            context=Context(kind=self.kind, ulysses_degree=_ulysses_degree(self)),
            recompute=Recompute(policy="full" if seed // 4 % 4 == 0 else "none"),
            zero=Zero(stage=3, prefetch=seed // 16 % 3) if self.combination == "zero3" else Zero(),
        )
        length = 2 * self.cp * _CHUNK
        plan = self.plan_of(
            layout,
            seed // 2 % 2 + mesh.pp,
            model=_model(self, length),
            sequence_length=length,
            documents="separate" if self.mask == "documents" else "joined",
            optimizer=replace(varied_optimizer(seed), kind=OPTIMIZERS[seed // 32 % 3]),
        )
        return with_experts(plan, self.seed // 8192)


def context_cases() -> Iterator[ContextCase]:
    """Return every case of context parallelism."""
    return starmap(ContextCase, product(KINDS, (2, 4), MASKS, HEADS, CONTEXT_COMBINATIONS))


def _ulysses_degree(case: ContextCase) -> int:
    """Return the degree; for two ranks at once it is all of them, or none, in turn."""
    inner = 2 if case.cp == 4 else 1 + case.seed // 64 % 2
    return CONTEXT_KINDS[case.kind].exchange_degree(case.cp, inner)


def _model(case: ContextCase, length: int) -> ModelShape:
    """Return a model with the mask and the heads of the case; documents meet other masks too."""
    seed, tp = case.seed // 128, case.mesh.tp
    model = varied_model(seed, tp=tp, layers=2, tied=seed // 4 % 2 == 0)
    window = _WINDOWS[seed // 8 % len(_WINDOWS)]
    windowed = case.mask == "window" or (case.mask == "documents" and seed // 64 % 3 == 0)
    hidden = case.mask == "causal" or (case.mask != "full" and seed // 256 % 4 > 0)
    return replace(
        model,
        kv_heads=tp * {"mha": 4, "gqa": 2, "mqa": 1}[case.heads],
        max_positions=length + model.max_positions % 3,
        causal=hidden,
        window=window if windowed else None,
        soft_cap=2.0 if seed // 1024 % 8 == 0 else None,
    )
