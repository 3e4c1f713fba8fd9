"""What the ranks tell one another at the end of a step: all that every one of them must know."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from echelon.train.routing import RoutingSummary


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Hold what the ranks told one another at the end of a step, bitwise the same on each."""

    loss: float
    grad_norm: float
    stop_requests: int
    rank_waits_s: tuple[float, ...]
    rank_used_bytes: tuple[int, ...]
    routing: RoutingSummary | None

    @classmethod
    def of(cls, rows: torch.Tensor, *, has_experts: bool) -> Agreement:
        """Return what `rows` say, one of each rank: loss, squared norm, stop, wait, bytes, loads.

        Losses and squares are summed: a rank that holds copies of another's tells 0.
        """
        total = rows.sum(0)
        return cls(
            loss=float(total[0]),
            grad_norm=float(total[1].sqrt()),
            stop_requests=int(total[2]),
            rank_waits_s=tuple(float(value) for value in rows[:, 3]),
            rank_used_bytes=tuple(int(value) for value in rows[:, 4]),
            routing=RoutingSummary.of(rows[:, 5:]) if has_experts else None,
        )
