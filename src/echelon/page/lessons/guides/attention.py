# SPDX-License-Identifier: Apache-2.0
"""What attention needs: every key for every query, the bytes of keys, and why a cut won't do."""

from __future__ import annotations

from echelon.core.attention_mask import AttentionMask, Placement
from echelon.core.units import binary_bytes, decimal_bytes
from echelon.cost.bytes.model_sizes import attention_merge_errors, kv_bytes, model_states
from echelon.layout.context_work import pairs_between
from echelon.page.lessons.corrections import corrections
from echelon.page.lessons.lesson import Fold, FoldsFigure, Frame, Lesson, LessonControl, Scene
from echelon.planner.view.document import Fact, HeatFigure, HeatRow

TOKENS = 16  # of the example
RANKS = 4  # that share it out
# A 7B model, 128k positions, bytes of a 16-bit value.
POSITIONS = 131_072
HIDDEN = 4096
LAYERS = 32
WEIGHTS = 7e9
SIZE = 2
MASKS = {"none": False, "causal": True}


def attention_guide() -> Lesson:
    """Return the guide: three facts, each with its numbers."""
    control = LessonControl(name="mask", label="mask", values=tuple(MASKS))
    return Lesson(
        id="guide-attention",
        topic="Guides",
        title="What attention needs, and why a long sequence is more than a cut",
        rows=("M25",),
        summary=(
            "Each query meets each key that it may see. Keys and values of a long sequence take "
            "more than the weights, and a sequence that is only cut gives another result."
        ),
        source="the formulas of keys and values, and attention computed three ways",
        controls=(control,),
        scenes=tuple(
            Scene(frames=(_all_pairs(mask), _storage(), _cut(mask)))
            for mask in (AttentionMask(causal=causal) for causal in MASKS.values())
        ),
        corrections=corrections("llm-training-43", "llm-training-44", "llm-training-41"),
        commands=("echelon explain context",),
    )


def pairs_of_ranks(mask: AttentionMask) -> list[list[int]]:
    """Return the visible pairs of the queries of each rank with the keys of each rank."""
    placed = Placement(kind="contiguous", ring_degree=RANKS, ulysses_degree=1, length=TOKENS)
    runs = [placed.ring_runs(rank) for rank in range(RANKS)]
    return [[pairs_between(queries, keys, mask) for keys in runs] for queries in runs]


def _all_pairs(mask: AttentionMask) -> Frame:
    pairs = mask.num_pairs(TOKENS)
    return Frame(
        caption=(
            "Fact 1: a token's output is a weighted mean of the values of all tokens that it may "
            "see, so it needs all of their keys and values."
        ),
        figures=(
            _grid(mask, alone=False),
            FoldsFigure(
                folds=(
                    Fold(
                        title="Pairs of a query and a key",
                        result=f"{pairs}",
                        lines=(
                            f"{TOKENS} queries x {TOKENS} keys = {TOKENS * TOKENS} pairs.",
                            f"With a causal mask a token meets itself and those before it: "
                            f"{TOKENS} x {TOKENS + 1} / 2 = "
                            f"{AttentionMask(causal=True).num_pairs(TOKENS)}.",
                            "Twice the tokens are about four times the pairs.",
                        ),
                    ),
                )
            ),
        ),
        facts=(Fact(f"pairs of {TOKENS} tokens", str(pairs)),),
    )


def _storage() -> Frame:
    whole, weights = kv_bytes(POSITIONS, HIDDEN, LAYERS), model_states(WEIGHTS, 0, 1).parameters
    grouped = kv_bytes(POSITIONS, HIDDEN // 4, LAYERS)
    return Frame(
        caption=(
            "Fact 2: keys and values grow with the sequence. At 128k positions those of a 7B model "
            "take more than its weights."
        ),
        figures=(
            FoldsFigure(
                folds=(
                    Fold(
                        title=f"Keys and values of {POSITIONS:,} positions",
                        result=binary_bytes(whole),
                        lines=(
                            "A key and a value for each position, in each layer: 2 T D L numbers.",
                            f"2 x {POSITIONS:,} x {HIDDEN:,} x {LAYERS} x {SIZE} bytes = "
                            f"{whole:,} bytes.",
                            f"{binary_bytes(whole)} = {decimal_bytes(whole)}.",
                        ),
                    ),
                    Fold(
                        title="With the weights beside them",
                        result=decimal_bytes(whole + weights),
                        lines=(
                            f"{decimal_bytes(whole)} + {decimal_bytes(weights)} of 16-bit weights.",
                        ),
                    ),
                    Fold(
                        title="Where four query heads share a key head",
                        result=binary_bytes(grouped),
                        lines=(f"{binary_bytes(whole)} / 4 = {binary_bytes(grouped)}.",),
                    ),
                )
            ),
        ),
        facts=(
            Fact("keys and values", binary_bytes(whole)),
            Fact("with 16-bit weights", decimal_bytes(whole + weights)),
        ),
    )


def _cut(mask: AttentionMask) -> Frame:
    alone, equal, merged = attention_merge_errors(TOKENS, RANKS)
    blocks = [pairs for row in pairs_of_ranks(mask) for pairs in row if pairs]
    return Frame(
        caption=(
            f"Fact 3: {RANKS} ranks that only cut the sequence see their own keys alone. Of "
            f"{len(blocks)} blocks {len(blocks) - RANKS} are missing, and the result is wrong."
        ),
        figures=(
            _grid(mask, alone=True),
            FoldsFigure(
                folds=(
                    Fold(
                        title="Own keys alone: the largest error of the last rank, causal mask",
                        result=f"{alone:.2g}",
                        lines=("Its queries meet the keys of its own chunk only.",),
                    ),
                    Fold(
                        title="All chunks, their outputs averaged",
                        result=f"{equal:.2g}",
                        lines=("Each chunk counts alike, whatever its keys weigh.",),
                    ),
                    Fold(
                        title="All chunks, merged by their log-sum-exp",
                        result=f"{merged:.1g}",
                        lines=(
                            "out = sum of out_i exp(lse_i - lse), with lse over all chunks.",
                            "Only rounding is left: this is what a ring does.",
                        ),
                    ),
                )
            ),
        ),
        facts=(
            Fact("blocks missing", f"{len(blocks) - RANKS} of {len(blocks)}"),
            Fact("error of a plain cut", f"{alone:.2g}"),
        ),
    )


def _grid(mask: AttentionMask, *, alone: bool) -> HeatFigure:
    pairs = pairs_of_ranks(mask)
    rows: list[HeatRow] = []
    for rank, row in enumerate(pairs):
        seen = [
            many if many and (rank == owner or not alone) else None
            for owner, many in enumerate(row)
        ]
        missing = [alone and many > 0 and rank != owner for owner, many in enumerate(row)]
        texts = [
            "missing" if gone else "" if many is None else str(many)
            for many, gone in zip(seen, missing, strict=True)
        ]
        values = tuple(None if many is None else float(many) for many in seen)
        rows.append(HeatRow(label=f"queries of rank {rank}", values=values, texts=tuple(texts)))
    return HeatFigure(
        columns=tuple(f"keys of rank {owner}" for owner in range(RANKS)),
        rows=tuple(rows),
        most=float(max(map(max, pairs))),
        legend=f"Pairs of positions that meet, {TOKENS // RANKS} tokens a rank",
    )
