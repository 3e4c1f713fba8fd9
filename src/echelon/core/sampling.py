"""How the next token is chosen from its logits."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Say how a token is chosen; a temperature of 0 takes the likeliest.

    `top_k` leaves so many of the likeliest ids, `top_p` the fewest likeliest whose probabilities
    add up to it (Holtzman et al., "The Curious Case of Neural Text Degeneration", 2019).
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
