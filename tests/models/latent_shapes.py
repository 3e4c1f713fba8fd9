"""Shapes with latent attention, for tests: no two widths alike, so none can stand for another."""

from __future__ import annotations

from dataclasses import replace

from echelon.core.model_shape import LatentAttention
from tests.parallel.layouts import NANO

LATENT = replace(
    NANO,
    name="latent",
    layers=2,
    hidden=32,
    kv_heads=4,
    head_dim=10,
    latent=LatentAttention(query_rank=12, kv_rank=8, nope_dim=6, rope_dim=4, value_dim=7),
)
"""A small DeepSeek: values are narrower than keys."""

EQUAL_WIDTHS = replace(
    LATENT,
    name="latent, equal widths",
    latent=LatentAttention(query_rank=16, kv_rank=4, nope_dim=4, rope_dim=6, value_dim=10),
)
"""Values are as wide as keys, so nothing is put behind them."""
