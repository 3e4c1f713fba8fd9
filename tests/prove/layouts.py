"""Plans for tests of the prover: small ones, with the mesh that a test asks for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from echelon.core.plan import Plan
from echelon.prove.matrix import Case, plan_of


def layout(*, model: dict[str, Any] | None = None, **chosen: Any) -> Plan:
    """Return a Llama-like plan: untied, 1F1B, three microbatches, but for what is chosen."""
    defaults: dict[str, Any] = {
        "dp": 1,
        "tp": 1,
        "pp": 1,
        "sequence_parallel": False,
        "schedule": "1f1b",
        "uneven_stages": False,
        "tied": False,
        "accumulation": 3,
        "recompute": "none",
    }
    plan = plan_of(Case(**{**defaults, **chosen}))
    tp = plan.mesh.tp
    shape = replace(
        plan.model,
        **{
            "hidden": 32 * tp,
            "heads": 4 * tp,
            "kv_heads": 2 * tp,
            "head_dim": 8,
            "vocab": 24 * tp + 1,
            "gated": True,
            "activation": "silu",
            "norm": "rmsnorm",
            "positions": "rope",
            "rope_scaling": None,
            "qk_norm": False,
            "qkv_bias": False,
            "output_bias": False,
            "mlp_bias": False,
            "dropout": 0.0,
            **(model or {}),
        },
    )
    optimizer = replace(plan.mathematics.optimizer, clip_norm=1.0, warmup_steps=10)
    mathematics = replace(
        plan.mathematics,
        model=shape,
        optimizer=optimizer,
        seed=0,
        global_sequences=plan.mathematics.global_sequences,
    )
    return replace(plan, mathematics=mathematics)
