"""What a row says of recompute: the share of blocks that run forward again, or their attention."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompute:
    """Give a policy: the share of blocks that run forward again, or their attention only."""

    name: str
    share: float
    selective: float
    per_op: float = 0.0
    """Flag: blocks keep attention and every second product (torchtitan)."""


NO_RECOMPUTE = Recompute(name="none", share=0.0, selective=0.0)
SELECTIVE = Recompute(name="selective", share=0.0, selective=1.0)
QUARTER = Recompute(name="full, every 4", share=0.25, selective=0.0)
HALF = Recompute(name="full, every 2", share=0.5, selective=0.0)
MOST = Recompute(name="full, 3 of 4", share=0.75, selective=0.0)
FULL = Recompute(name="full", share=1.0, selective=0.0)
PER_OP = Recompute(name="selective (per-op)", share=0.5, selective=0.0, per_op=1.0)
NONE_WORDS = ("none", "no", "false", "off", "0", "n", "disabled", "without")


def recomputes_of(text: str, on_rank: float, *, cuts_parameters: bool) -> list[Recompute]:
    """Return the policies that a text can mean, of a rank of so many layers; it is not blank.

    To trainers that cut parameters "selective" means some blocks, as many as must be.
    """
    lower = text.lower()
    if re.split(r"[\s(,;]", lower)[0] in NONE_WORDS:
        return [NO_RECOMPUTE]
    share = _share(lower, on_rank)
    if share is not None:
        return [Recompute(name=lower, share=min(1.0, max(0.0, share)), selective=0.0)]
    if lower.startswith("selective"):
        if "other" in lower or "per-op" in lower:
            return [Recompute(name=lower, share=0.5, selective=0.0, per_op=1.0)]
        return [QUARTER, HALF, MOST] if cuts_parameters else [SELECTIVE]
    return [SELECTIVE] if "attn" in lower or "attention" in lower else [FULL]


def _share(text: str, on_rank: float) -> float | None:
    """Return the share of blocks that a text gives: in percent, as a part, or of so many layers."""
    percent = re.search(r"(\d+(?:\.\d+)?)\s*%", text)
    if percent:
        return float(percent[1]) / 100.0
    part = re.search(r"([1-9]\d*)\s*(?:of|/)\s*([1-9]\d*)", text)
    if part:
        return float(part[1]) / float(part[2])
    if re.search(r"every[\s-]*other", text) and not text.startswith("selective"):
        return 0.5
    every = re.search(r"every[\s-]*(?:n=)?([1-9]\d*)", text)
    if every:
        return 1.0 / float(every[1])
    if re.fullmatch(r"0?\.\d+", text):
        return float(text)
    counted = re.search(r"(\d+)\s*(?:layer|block)s?\b", text)
    # Megatron's method "block" does so many blocks of a rank; "uniform" does all, in such groups.
    counted = counted or re.search(r"block\W*(\d+)|^(\d+)$", text)
    if counted and not text.startswith("selective"):
        count = next(one for one in counted.groups() if one)
        return float(count) / on_rank
    return None
