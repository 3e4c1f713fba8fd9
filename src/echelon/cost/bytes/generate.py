# SPDX-License-Identifier: Apache-2.0
"""Bytes of a rank that writes: its weights, and what it sends over `tp` and between stages.

A pass has N tokens of B sequences: whole prompts at first, then one token of each sequence.
Source: Pope et al., "Efficiently Scaling Transformer Inference", 2022, section 3.2.1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from echelon.core.axis import Axis
from echelon.core.plan import DTYPE_BYTES, Plan
from echelon.cost.bytes.all_reduce import slices_sent, sums_sent
from echelon.cost.bytes.terms import STATISTICS_BYTES
from echelon.cost.bytes.width_norm import normed_together
from echelon.layout.stage import StagePart, held_parameters, part_of, pieces_of

_NUMBER_BYTES = 8  # of a token id, and of the largest logit beside it


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationPass:
    """Say how many tokens of how many sequences cross the stages together."""

    tokens: int
    sequences: int


def generation_weight_bytes(plan: Plan, rank: int) -> int:
    """Return the bytes of the weights that `rank` generates with, in the dtype of master copies."""
    part = part_of(plan, rank)
    held = sum(spec.local_numel(pieces_of(plan, spec)) for spec in held_parameters(plan, part))
    return held * DTYPE_BYTES[plan.mathematics.precision.master]


def greedy_passes(prompts: Sequence[int], max_tokens: int, pp: int) -> list[GenerationPass]:
    """Return the passes that write `max_tokens` after prompts of so many tokens, none ending.

    There are as many groups of prompts as stages, where there are so many prompts.
    """
    count = min(pp, len(prompts))
    groups = [prompts[place::count] for place in range(count)]
    first = [GenerationPass(tokens=sum(one), sequences=len(one)) for one in groups]
    later = [GenerationPass(tokens=len(one), sequences=len(one)) for one in groups]
    return first + later * (max_tokens - 1)


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
        wide = max(STATISTICS_BYTES, size)
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
