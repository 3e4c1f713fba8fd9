"""Wrong forward passes, run on one device: the one that gives the observed losses is the mistake.

A wrong forward leaves every gradient wrong with no clean factor. So the oracle is made to commit
each known mistake in turn, on its own weights; losses of all microbatches that agree to rounding
with those of the ranks name the mistake, its tensor and its axis.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as fn

from echelon.core.model_shape import ModelShape
from echelon.core.plan import Plan
from echelon.models.batch import TokenBatch
from echelon.models.decoder import Block, Decoder
from echelon.models.operations import Operations
from echelon.models.rotary import rotary_tables
from echelon.prove.diagnosis import Finding
from echelon.prove.factors import Factor
from echelon.prove.names import family_of
from echelon.prove.oracle import OracleStep, build_decoder

Build = Callable[[], Decoder]


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One mistake: the tensor it is told under, what it is, and a model that commits it."""

    tensor: str
    finding: Finding
    build: Build


class Positions(Operations):
    """Give each position an index of the caller's choice."""

    def __init__(self, index: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Use `index` of the positions 0 to T - 1 in their place."""
        self.index = index

    def rotary_tables(
        self, shape: ModelShape, batch: TokenBatch, like: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tables of other positions."""
        positions_T = self.index(batch.positions_T.to(like.device))
        return rotary_tables(shape, positions_T, like.dtype)

    def embed(
        self, weight_VD: nn.Parameter, positions: nn.Parameter | None, batch: TokenBatch
    ) -> torch.Tensor:
        """Return x_ND with the vectors of other positions."""
        x_ND = super().embed(weight_VD, None, batch)
        if positions is None:
            return x_ND
        index_T = self.index(batch.positions_T)
        return x_ND + positions[index_T].repeat_interleave(batch.num_sequences, dim=0)


class KeyValueHeads(Operations):
    """Give each query head the key/value head of the caller's choice."""

    def __init__(self, choose: Callable[[int, int, int], int]) -> None:
        """Use ``choose(query head, repeats, key/value heads)``."""
        self.choose = choose

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        shape: ModelShape,
        batch: TokenBatch,
    ) -> torch.Tensor:
        """Return attention over the chosen heads."""
        heads, kv_heads = q.shape[2], k.shape[2]
        chosen = [self.choose(head, heads // kv_heads, kv_heads) for head in range(heads)]
        return super().attend(q, k[:, :, chosen], v[:, :, chosen], shape, batch)


class PaddedVocabulary(Operations):
    """Let `padding` ids that do not exist take part in the softmax, with logits of 0."""

    def __init__(self, padding: int) -> None:
        """Pad the vocabulary by `padding` ids."""
        self.padding = padding

    def logits(self, x_ND: torch.Tensor, weight_VD: nn.Parameter) -> torch.Tensor:
        """Return the logits and those of the padding."""
        return fn.pad(super().logits(x_ND, weight_VD), (0, self.padding))


def variants(plan: Plan, oracle: OracleStep, known: tuple[Factor, ...]) -> Iterator[Variant]:
    """Return every mistake that is tried, the most likely first."""
    yield from _blocks(plan, oracle)
    yield from _vocabulary(plan, oracle)
    yield from _positions(plan, oracle)
    yield from _kv_heads(plan, oracle)
    yield from _scaled(plan, oracle, known)


def _blocks(plan: Plan, oracle: OracleStep) -> Iterator[Variant]:
    def without(layer: int) -> Decoder:
        model = build_decoder(plan, oracle.before, routing=oracle.routing)

        def run(block: Block, x_ND: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
            return x_ND if block.index == layer else block(x_ND, batch)

        model.run_block = run
        return model

    for layer in range(plan.model.layers):
        yield Variant(
            tensor=f"layers.{layer}",
            finding=Finding(factor="zero", says="block left out", axis="pp", value=0.0),
            build=lambda layer=layer: without(layer),
        )


def _vocabulary(plan: Plan, oracle: OracleStep) -> Iterator[Variant]:
    tp, vocab = plan.mesh.tp, plan.model.vocab
    padding = -vocab % tp
    if padding:
        name = "embedding.weight" if plan.model.tied else "head.weight"
        says = f"the {padding} ids of vocabulary padding take part in the softmax: not masked"
        yield Variant(
            tensor=name,
            finding=Finding(factor="padding", says=says, axis="tp"),
            build=lambda: build_decoder(
                plan, oracle.before, PaddedVocabulary(padding), routing=oracle.routing
            ),
        )


def _positions(plan: Plan, oracle: OracleStep) -> Iterator[Variant]:
    shape, length = plan.model, plan.mathematics.sequence_length
    name = "layers.0.attention.q.weight" if shape.positions == "rope" else "positions.weight"

    def variant(says: str, axis: str, index: Callable[[torch.Tensor], torch.Tensor]) -> Variant:
        return Variant(
            tensor=name,
            finding=Finding(factor="positions", says=says, axis=axis),
            build=lambda: build_decoder(
                plan, oracle.before, Positions(index), routing=oracle.routing
            ),
        )

    tp = plan.mesh.tp
    if tp > 1:
        says = f"positions begin anew in each of the {tp} chunks of the sequence"
        yield variant(says, "tp", lambda index: index % (length // tp))
    yield variant("every token is at position 0", "", lambda index: index * 0)
    if shape.positions == "learned":
        yield variant("positions are one too large", "", lambda index: index + 1)


def _kv_heads(plan: Plan, oracle: OracleStep) -> Iterator[Variant]:
    tp = plan.mesh.tp
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
    for says, choose in rows:
        yield Variant(
            tensor="layers.0.attention.k.weight",
            finding=Finding(factor="wrong heads", says=says, axis="tp" if tp > 1 else ""),
            build=lambda choose=choose: build_decoder(
                plan, oracle.before, KeyValueHeads(choose), routing=oracle.routing
            ),
        )


def _scaled(plan: Plan, oracle: OracleStep, known: tuple[Factor, ...]) -> Iterator[Variant]:
    """Scale a parameter, alone or with its namesakes of all blocks, by each known factor."""
    simple = [f for f in known if f.axis in ("tp", "dp", "pp") and "token" not in f.name]
    simple += [f for f in known if f.name in ("zero", "sign", "2", "1/2")]
    distinct: dict[float, Factor] = {}
    for factor in simple:
        distinct.setdefault(round(factor.value, 9), factor)
    for names in _families(oracle.before):
        if all(not bool(oracle.before[name].any()) for name in names):
            continue
        for factor in distinct.values():
            yield Variant(
                tensor=names[0],
                finding=_scaled_finding(names, factor, simple),
                build=lambda names=names, value=factor.value: build_decoder(
                    plan, scaled(oracle.before, names, value), routing=oracle.routing
                ),
            )


def _scaled_finding(names: tuple[str, ...], factor: Factor, simple: list[Factor]) -> Finding:
    same = [other for other in simple if abs(other.value - factor.value) < 1e-9]
    axes = dict.fromkeys(other.axis for other in same if other.axis)
    family = "it" if len(names) == 1 else f"it and its namesakes ({len(names)} tensors)"
    return Finding(
        factor=factor.name,
        says=f"the forward pass uses {family} {factor.value:.6g} times ({factor.name})",
        axis=" or ".join(axes),
        value=factor.value,
    )


def _families(values: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, ...]]:
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


def scaled(
    values: Mapping[str, torch.Tensor], names: tuple[str, ...], factor: float
) -> dict[str, torch.Tensor]:
    """Return `values` with those of `names` multiplied by `factor`."""
    return {n: value * factor if n in names else value for n, value in values.items()}
