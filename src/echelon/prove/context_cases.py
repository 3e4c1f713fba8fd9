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
from itertools import product

from echelon.core.mesh import Mesh
from echelon.core.model_shape import ModelShape
from echelon.core.plan import (
    Context,
    ContextKind,
    Layout,
    Mathematics,
    Pipeline,
    Plan,
    Recompute,
    Zero,
)
from echelon.prove.cases import one_machine, turn_of, turned_model, turned_optimizer
from echelon.prove.mixed_in import with_experts
from echelon.prove.pipeline_cases import KINDS, OPTIMIZERS

MASKS = ("causal", "full", "documents", "window")
HEADS = ("mha", "gqa", "mqa")
BESIDE = ("alone", "tp2", "tp2sp", "zero3", "pp2", "tp2pp2")
_CHUNK = 8
_WINDOWS = (2, 5, _CHUNK, _CHUNK + 3, 2 * _CHUNK + 5)


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextCase:
    """Name one way to cut sequences."""

    kind: ContextKind
    cp: int
    mask: str
    heads: str
    beside: str

    @property
    def name(self) -> str:
        """Return a name that is unique in the matrix."""
        return "-".join(["context", self.kind, f"cp{self.cp}", self.mask, self.heads, self.beside])

    @property
    def turn(self) -> int:
        """Return a number that depends on the name: it picks what is not a dimension."""
        return turn_of(self.name)

    @property
    def mesh(self) -> Mesh:
        """Return the mesh."""
        return Mesh(
            cp=self.cp,
            tp=2 if self.beside.startswith("tp2") else 1,
            pp=2 if self.beside.endswith("pp2") else 1,
            dp_shard=2 if self.beside == "zero3" else 1,
        )

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return self.mesh.world_size

    def plan(self) -> Plan:
        """Return the plan of this case; it is small already, so shrinking leaves little to do."""
        return _plan(self)


def context_cases() -> Iterator[ContextCase]:
    """Return every case of context parallelism."""
    for kind, cp, mask, heads, beside in product(KINDS, (2, 4), MASKS, HEADS, BESIDE):
        yield ContextCase(kind=kind, cp=cp, mask=mask, heads=heads, beside=beside)


def _plan(case: ContextCase) -> Plan:
    mesh, turn = case.mesh, case.turn
    stages = ((0,), (1,)) if mesh.pp == 2 else ((0, 1),)
    microbatch, num_microbatches = 1 + turn % 2, (1, 2)[turn // 2 % 2] + mesh.pp - 1
    layout = Layout(
        mesh=mesh,
        microbatch_sequences=microbatch,
        pipeline=Pipeline(schedule="1f1b", stages=stages),
        sequence_parallel=case.beside == "tp2sp",
        context=Context(kind=case.kind, ulysses_degree=_ulysses_degree(case)),
        recompute=Recompute(policy="full" if turn // 4 % 4 == 0 else "none"),
        zero=Zero(stage=3, prefetch=turn // 16 % 3) if case.beside == "zero3" else Zero(),
    )
    length = 2 * case.cp * _CHUNK
    mathematics = Mathematics(
        model=_model(case, length),
        global_sequences=microbatch * mesh.dp * num_microbatches,
        sequence_length=length,
        documents="separate" if case.mask == "documents" else "joined",
        seed=turn % 1000,
        optimizer=replace(turned_optimizer(turn), kind=OPTIMIZERS[turn // 32 % 3]),
    )
    plan = Plan(name=case.name, mathematics=mathematics, layout=layout, cluster=one_machine())
    return with_experts(plan, case.turn // 8192)


def _ulysses_degree(case: ContextCase) -> int:
    """Return the degree; for two ranks at once it is all of them, or none, in turn."""
    if case.kind == "ulysses":
        return case.cp
    if case.kind == "ulysses-ring":
        return 2 if case.cp == 4 else 1 + case.turn // 64 % 2
    return 1


def _model(case: ContextCase, length: int) -> ModelShape:
    """Return a model with the mask and the heads of the case; documents meet other masks too."""
    turn, tp = case.turn // 128, case.mesh.tp
    model = turned_model(turn, tp=tp, layers=2, tied=turn // 4 % 2 == 0)
    window = _WINDOWS[turn // 8 % len(_WINDOWS)]
    windowed = case.mask == "window" or (case.mask == "documents" and turn // 64 % 3 == 0)
    hidden = case.mask == "causal" or (case.mask != "full" and turn // 256 % 4 > 0)
    return replace(
        model,
        kv_heads=tp * {"mha": 4, "gqa": 2, "mqa": 1}[case.heads],
        max_positions=length + model.max_positions % 3,
        causal=hidden,
        window=window if windowed else None,
        soft_cap=2.0 if turn // 1024 % 8 == 0 else None,
    )
