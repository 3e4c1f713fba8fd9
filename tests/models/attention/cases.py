"""Queries and keys for tests of attention: positions in runs, masks, and what is expected."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from echelon.core.attention_mask import AttentionMask, DocumentStarts, PositionRun
from echelon.layout.attention_tiles import AttentionTile, tiles_between
from echelon.models.attention.reference import ScoreForm, attention_reference, visible

SEQUENCES = 2
HEAD_DIM = 8
TILE_ROWS = 2  # of windows, at the least

MASKS: dict[str, tuple[AttentionMask, DocumentStarts | None]] = {
    "causal": (AttentionMask(), None),
    "full": (AttentionMask(causal=False), None),
    "window": (AttentionMask(window=7), None),
    "window both ways": (AttentionMask(causal=False, window=5), None),
    "documents": (AttentionMask(), ((0, 3, 21), (0, 30, 31))),
    "documents in full": (AttentionMask(causal=False), ((0, 3, 21), (0, 30))),
    "documents in a window": (AttentionMask(window=4), ((0, 3, 21), (0, 20, 30))),
}

RUNS: dict[str, tuple[tuple[PositionRun, ...], tuple[PositionRun, ...]]] = {
    "whole": ((PositionRun(0, 1, 40),), (PositionRun(0, 1, 40),)),
    "zigzag, own": (
        (PositionRun(8, 1, 8), PositionRun(24, 1, 8)),
        (PositionRun(8, 1, 8), PositionRun(24, 1, 8)),
    ),
    "zigzag, earlier": (
        (PositionRun(8, 1, 8), PositionRun(24, 1, 8)),
        (PositionRun(0, 1, 8), PositionRun(32, 1, 8)),
    ),
    "zigzag, later": (
        (PositionRun(0, 1, 8), PositionRun(32, 1, 8)),
        (PositionRun(8, 1, 8), PositionRun(24, 1, 8)),
    ),
    "zigzag, gathered": (
        (PositionRun(10, 1, 10), PositionRun(20, 1, 10)),
        (
            PositionRun(0, 1, 10),
            PositionRun(30, 1, 10),
            PositionRun(10, 1, 10),
            PositionRun(20, 1, 10),
        ),
    ),
    "striped, earlier": ((PositionRun(1, 2, 20),), (PositionRun(0, 2, 20),)),
    "striped, later": ((PositionRun(0, 2, 20),), (PositionRun(1, 2, 20),)),
}


@dataclass(frozen=True, slots=True)
class Case:
    """Hold the tensors of a case, its pieces, and which pairs are visible."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    pieces: tuple[AttentionTile, ...]
    seen: torch.Tensor


def positions(runs: tuple[PositionRun, ...]) -> torch.Tensor:
    """Return the positions that runs name, in order."""
    return torch.tensor([run.position(i) for run in runs for i in range(run.count)])


def case(
    runs: str, mask: str, heads: tuple[int, int] = (4, 2), dtype: torch.dtype = torch.float64
) -> Case:
    """Return random tensors, as strided views, for (query heads, key heads)."""
    torch.manual_seed(5)
    (queries, keys), (rule, documents) = RUNS[runs], MASKS[mask]
    query_T, key_S = positions(queries), positions(keys)

    def random(length: int, num_heads: int) -> torch.Tensor:
        wide = torch.randn(length, SEQUENCES, num_heads + 1, 2 * HEAD_DIM, dtype=torch.float64)
        return wide.to(dtype)[:, :, 1:, HEAD_DIM:]

    return Case(
        random(len(query_T), heads[0]),
        random(len(key_S), heads[1]),
        random(len(key_S), heads[1]),
        random(len(query_T), heads[0]),
        tiles_between(queries, keys, rule, documents, TILE_ROWS),
        visible(query_T, key_S, rule, documents),
    )


def expected(
    case: Case, soft_cap: float | None = None, sinks_H: torch.Tensor | None = None
) -> tuple[torch.Tensor, ...]:
    """Return out, lse, dq, dk, dv of the reference in float64, for the values of a case.

    With sinks their gradient comes last.
    """
    q, k, v = (x.double().detach().requires_grad_() for x in (case.q, case.k, case.v))
    sinks = None if sinks_H is None else sinks_H.double().detach().requires_grad_()
    out, lse = attention_reference(q, k, v, case.seen, ScoreForm(soft_cap=soft_cap), sinks)
    leaves = (q, k, v) if sinks is None else (q, k, v, sinks)
    gradients = torch.autograd.grad(out, leaves, case.dout.double())
    return out.detach(), lse.detach(), *gradients
