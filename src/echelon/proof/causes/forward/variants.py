# SPDX-License-Identifier: Apache-2.0
"""Wrong forward passes, run on one device: the one that gives the observed losses is the mistake.

A wrong forward leaves every gradient wrong with no clean factor. So the oracle is made to commit
each known mistake in turn, on its own weights; losses of all microbatches that agree to rounding
with those of the ranks name the mistake, its tensor and its axis.

A dropout mask is a function of the seed, the step, the place in the model and the token: one that
is keyed by where a row lies on its rank is the same on ranks that must differ.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, replace

import torch
from torch import nn

from echelon.core.model_shape import ModelShape
from echelon.core.parameters import family_of
from echelon.core.plan import Plan
from echelon.models.batch import TokenBatch
from echelon.models.decoder import Decoder
from echelon.models.operations import Operations, apply_dropout
from echelon.models.rotary import rotary_tables
from echelon.proof.causes.factors import Factor, in_forward
from echelon.proof.causes.finding import ProofFinding
from echelon.proof.causes.forward.attention import remapped_heads
from echelon.proof.claims.systematic import PaddedVocabulary
from echelon.proof.oracle.oracle import OracleStep, build_decoder
from echelon.proof.oracle.routing import RoutingState

Values = Mapping[str, torch.Tensor]
"""Parameters by name."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One mistake: what it is, and what of a right model is otherwise (None: nothing)."""

    finding: ProofFinding
    operations: Operations | None = None
    _: KW_ONLY
    values: Values | None = None
    routing: RoutingState | None = None

    def build(self, plan: Plan, oracle: OracleStep) -> Decoder:
        """Return a model that makes the mistake in a step."""
        return build_decoder(
            plan,
            self.values or oracle.before,
            self.operations,
            routing=self.routing or oracle.routing,
            rounding=oracle.rounding,
        )


class RemappedRows(Operations):
    """Take the rows of positions for those of others."""

    def __init__(
        self,
        *,
        positions: Callable[[torch.Tensor], torch.Tensor] | None = None,
        tokens_T: torch.Tensor | None = None,
        labels_T: torch.Tensor | None = None,
        dropout_T: torch.Tensor | None = None,
    ) -> None:
        """Say which position stands for t, in one thing or several.

        `positions` of the positions 0 to T - 1 are those of rotations and vectors; at t the token
        of `tokens_T[t]` is read, label t meets the logits of `labels_T[t]`, and what dropout drops
        is keyed by `dropout_T[t]`.
        """
        self.index = positions or (lambda positions_T: positions_T)
        self.tokens_T, self.labels_T, self.dropout_T = tokens_T, labels_T, dropout_T

    def rotary_tables(
        self, shape: ModelShape, batch: TokenBatch, like: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tables of other positions."""
        at_T = self.index(batch.positions_T.to(like.device))
        return rotary_tables(shape, at_T, like.dtype, length=batch.whole_length)

    def embed(
        self, weight_VD: nn.Parameter, positions: nn.Parameter | None, batch: TokenBatch
    ) -> torch.Tensor:
        """Return x_ND of other tokens, with the vectors of other positions."""
        x_ND = super().embed(weight_VD, None, batch)
        if self.tokens_T is not None:
            x_ND = x_ND[_rows(self.tokens_T, batch.num_sequences)]
        if positions is None:
            return x_ND
        at_T = self.index(batch.positions_T)
        return x_ND + positions[at_T].repeat_interleave(batch.num_sequences, dim=0)

    def logits(self, x_ND: torch.Tensor, weight_VD: nn.Parameter) -> torch.Tensor:
        """Return the logits, those of other positions for each label."""
        logits_NV = super().logits(x_ND, weight_VD)
        if self.labels_T is None:
            return logits_NV
        return logits_NV[_rows(self.labels_T, logits_NV.shape[0] // len(self.labels_T))]

    def dropout(
        self, x_ND: torch.Tensor, probability: float, site: str, batch: TokenBatch
    ) -> torch.Tensor:
        """Return x with what other positions would drop dropped."""
        if self.dropout_T is None:
            return super().dropout(x_ND, probability, site, batch)
        rows = _rows(self.dropout_T, batch.num_sequences)
        return apply_dropout(x_ND, rows, probability, site, batch)


def _rows(index_T: torch.Tensor, num_sequences: int) -> torch.Tensor:
    """Return the rows of tokens (t, b), sequence first, of the positions `index_T`."""
    return (index_T[:, None] * num_sequences + torch.arange(num_sequences)).reshape(-1)


def variants(plan: Plan, oracle: OracleStep, known: tuple[Factor, ...]) -> Iterator[Variant]:
    """Return every mistake that is tried, the most likely first."""
    yield from _blocks(oracle.before)
    yield from vocabulary_variants(plan)
    yield from _positions(plan)
    yield from _kv_heads(plan.mesh.tp)
    yield from _scaled(oracle.before, known)


def _blocks(values: Values) -> Iterator[Variant]:
    """Leave each block out: what it adds to the stream is 0."""
    layers = {name.split(".")[1]: None for name in values if name.startswith("layers.")}
    for layer in layers:
        block = f"layers.{layer}"
        last = re.compile(rf"{block}\..*\.(o|down)\.(weight|bias)")
        left_out = scaled(values, [name for name in values if last.fullmatch(name)], 0.0)
        finding = ProofFinding("zero", "block left out", "pp", value=0.0, tensor=block)
        yield Variant(finding, values=left_out)


def vocabulary_variants(plan: Plan) -> Iterator[Variant]:
    padding = -plan.model.vocab % plan.mesh.tp
    if padding:
        name = "embedding.weight" if plan.model.tied else "head.weight"
        says = f"the {padding} ids of vocabulary padding take part in the softmax: not masked"
        finding = ProofFinding("padding", says, "tp", tensor=name)
        yield Variant(finding, PaddedVocabulary(padding))


def positions_tensor(shape: ModelShape) -> str:
    """Return the first parameter that meets positions."""
    return "layers.0.attention.q.weight" if shape.positions == "rope" else "positions.weight"


def _positions(plan: Plan) -> Iterator[Variant]:
    shape, length, tp = plan.model, plan.mathematics.sequence_length, plan.mesh.tp

    def variant(says: str, axis: str, index: Callable[[torch.Tensor], torch.Tensor]) -> Variant:
        finding = ProofFinding("positions", says, axis, tensor=positions_tensor(shape))
        return Variant(finding, RemappedRows(positions=index))

    if tp > 1:
        says = f"positions begin anew in each of the {tp} chunks of the sequence"
        yield variant(says, "tp", lambda index: index % (length // tp))
    yield variant("every token is at position 0", "", lambda index: index * 0)
    if shape.positions == "learned":
        yield variant("positions are one too large", "", lambda index: index + 1)


def _kv_heads(tp: int) -> Iterator[Variant]:
    rows: tuple[tuple[str, Callable[[int, int, int], int]], ...] = (
        ("query head h reads key/value head h mod K", lambda h, _, kv: h % kv),
        (
            "each tensor rank reads the key/value heads of the next",
            lambda h, repeats, kv: (h // repeats + kv // tp) % kv,
        ),
        (
            "every tensor rank reads the key/value heads of tp 0",
            lambda h, repeats, kv: h // repeats % (kv // tp),
        ),
        (
            "each tensor rank takes the first of its key/value heads for all",
            lambda h, repeats, kv: h // repeats // (kv // tp) * (kv // tp),
        ),
        (
            "on each tensor rank query head h reads key/value head h mod (K / tp)",
            lambda h, repeats, kv: h // (repeats * kv // tp) * (kv // tp) + h % (kv // tp),
        ),
    )
    axis = "tp" if tp > 1 else ""
    for says, choose in rows:
        finding = ProofFinding("wrong heads", says, axis, tensor="layers.0.attention.k.weight")
        yield Variant(finding, remapped_heads(choose))


def _scaled(values: Values, known: tuple[Factor, ...]) -> Iterator[Variant]:
    """Scale a parameter, alone or with its namesakes of all blocks, by each known factor."""
    simple = [f for f in known if f.axis in ("tp", "dp", "pp") and "token" not in f.name]
    simple += [f for f in known if f.name in ("zero", "sign", "2", "1/2")]
    distinct: dict[float, Factor] = {}
    for factor in simple:
        distinct.setdefault(round(factor.value, 9), factor)
    for names in _families(values):
        if any(bool(values[name].any()) for name in names):
            for factor in distinct.values():
                finding = _scaled_finding(names, factor, simple)
                yield Variant(finding, values=scaled(values, names, factor.value))


def _scaled_finding(names: tuple[str, ...], factor: Factor, simple: list[Factor]) -> ProofFinding:
    same = [other for other in simple if abs(other.value - factor.value) < 1e-9]
    same = in_forward(same) or same
    factor = same[0]
    axes = dict.fromkeys(other.axis for other in same if other.axis)
    family = "it" if len(names) == 1 else f"it and its namesakes ({len(names)} tensors)"
    says = f"the forward pass uses {family} {factor.value:.6g} times ({factor.name})"
    axis = " or ".join(axes)
    return ProofFinding(factor.name, says, axis, value=factor.value, tensor=names[0])


def _families(values: Values) -> Iterator[tuple[str, ...]]:
    """Return all row-parallel biases or weights, each name over all blocks, each name alone."""
    for kind in ("bias", "weight"):
        rows = (f"attention.o.{kind}", f"mlp.down.{kind}")
        if family := tuple(name for name in values if name.endswith(rows)):
            yield family
    by_suffix: dict[str, list[str]] = {}
    for name in values:
        by_suffix.setdefault(family_of(name), []).append(name)
    yield from (tuple(names) for names in by_suffix.values())
    yield from ((name,) for name in values)


def scaled(values: Values, names: Collection[str], factor: float) -> Values:
    """Return `values` with those of `names` multiplied by `factor`."""
    return {n: value * factor if n in names else value for n, value in values.items()}


ChangeBatch = Callable[[TokenBatch], TokenBatch]
"""From what a mask is keyed by to what it is keyed by instead."""


class WrongDropout(Operations):
    """Drop by another batch, or by another place in the model, or not at all."""

    def __init__(self, batch: ChangeBatch, *, site: str = "", factor: float = 1.0) -> None:
        """Key masks by `batch` of a batch and by `site` (if any); drop `factor` x as often."""
        self.batch, self.site, self.factor = batch, site, factor

    def dropout(
        self, x_ND: torch.Tensor, probability: float, site: str, batch: TokenBatch
    ) -> torch.Tensor:
        """Return x with other elements dropped."""
        by = self.batch(batch)
        return super().dropout(x_ND, probability * self.factor, self.site or site, by)


def dropout_variants(plan: Plan) -> Iterator[Variant]:
    """Return the mistakes in what is dropped, the most likely first."""
    if not plan.model.dropout:
        return
    size, share = plan.layout.microbatch_sequences, plan.num_microbatches
    rows = torch.arange(plan.mathematics.global_sequences)

    def variant(says: str, axis: str, operations: Operations) -> Variant:
        finding = ProofFinding("dropout", says, axis, tensor="embedding.weight")
        return Variant(finding, operations)

    def keyed(ids_B: torch.Tensor) -> WrongDropout:
        return WrongDropout(lambda batch: replace(batch, sample_ids_B=ids_B))

    axis = "dp" if plan.mesh.dp > 1 else "microbatches"
    says = "masks are keyed by the row in its microbatch: all ranks and microbatches share one"
    yield variant(says, axis, keyed(rows % size))
    if plan.mesh.dp > 1:
        says = "masks are keyed by the row on its replica: replicas share one"
        yield variant(says, "dp", keyed(rows % (size * share)))
    says = "masks are keyed by the row in the global batch, not by the sample"
    yield variant(says, "", keyed(rows))
    for says, wrong in (
        ("every step has the mask of step 0", WrongDropout(lambda batch: replace(batch, step=0))),
        ("nothing is dropped", WrongDropout(lambda batch: replace(batch, train=False))),
        ("every place in the model has one mask", WrongDropout(_same, site="embedding")),
        ("twice as much is dropped", WrongDropout(_same, factor=2.0)),
    ):
        yield variant(says, "", wrong)


def _same(batch: TokenBatch) -> TokenBatch:
    return batch
