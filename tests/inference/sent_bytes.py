"""Bytes that a rank sends to write text: over `tp`, and between stages.

A pass has N tokens of B sequences: whole prompts at first, then one token of each sequence.
Source: Pope et al., "Efficiently Scaling Transformer Inference", 2022, section 3.2.1.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from echelon.core.axis import Axis
from echelon.core.plan import DTYPE_BYTES, Plan
from echelon.cost.bytes.all_reduce import slices_sent, sums_sent
from echelon.cost.bytes.sent import normed_together
from echelon.cost.bytes.terms import WIDE_BYTES
from echelon.layout.stage import StagePart, part_of

_NUMBER_BYTES = 8  # of a token id, and of the largest logit beside it


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationPass:
    """Say how many tokens of how many sequences cross the stages together."""

    tokens: int
    sequences: int


def generated_bytes(
    plan: Plan, rank: int, passes: Iterable[GenerationPass], *, greedy: bool
) -> dict[str, int]:
    """Return the bytes that `rank` sends in the given passes, by axis; none where it has no peer.

    `greedy`: only the largest logit of a sequence is told, else all of them are.
    """
    (stage,) = part_of(plan, rank).stages
    found = {Axis.TP.value: 0, Axis.PP.value: 0}
    for one in passes:
        found[Axis.TP.value] += _over_tensor(plan, rank, stage, one, greedy=greedy)
        found[Axis.PP.value] += _over_pipeline(plan, stage, one)
    return {axis: num_bytes for axis, num_bytes in found.items() if num_bytes}


def _over_tensor(
    plan: Plan, rank: int, stage: StagePart, one: GenerationPass, *, greedy: bool
) -> int:
    model, ranks = plan.model, plan.mesh.group(rank, Axis.TP)
    size = DTYPE_BYTES[plan.mathematics.precision.master]
    sums = stage.first + len(stage.blocks)
    for layer in stage.blocks:
        if not model.layer_has_experts(layer):
            sums += 1
            continue
        assert model.experts is not None
        sums += plan.mesh.ep > 1 or plan.layout.experts.expert_tp > 1
        sums += model.experts.shared_experts > 0
    sent = sums * sums_sent(plan, ranks, rank, (one.tokens * model.hidden,), size)[0]
    if normed_together(model):
        wide = max(WIDE_BYTES, size)
        sent += len(stage.blocks) * sums_sent(plan, ranks, rank, (2 * one.tokens,), wide)[0]
    if stage.last:
        local_vocab = -(-model.vocab // len(ranks))
        # Whether to stop is told with them: once, or beside the logits of each sequence.
        greedily, drawn = 2 * _NUMBER_BYTES * (one.sequences + 1), (local_vocab + 1) * size
        piece = greedily if greedy else one.sequences * drawn
        sent += slices_sent(plan, ranks, rank, piece)[0]
    return sent


def _over_pipeline(plan: Plan, stage: StagePart, one: GenerationPass) -> int:
    if stage.last:
        return (plan.mesh.pp - 1) * (one.sequences + 1) * _NUMBER_BYTES
    return one.tokens * plan.model.hidden * DTYPE_BYTES[plan.mathematics.precision.master]
