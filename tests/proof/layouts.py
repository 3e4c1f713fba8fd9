"""Plans for tests of the prover: small ones, with the mesh that a test asks for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from echelon.core.plan import Documents, Plan
from echelon.proof.shrink import shrink
from tests.walks.matrix.cases import Case

Changes = dict[str, Any]

BF16: Changes = {"parameters": "bf16"}
"""bfloat16 parameters with a float32 master copy; gradients add up and are summed in float32."""

BF16_SUMS: Changes = {"parameters": "bf16", "gradients": "bf16", "reduction": "bf16"}
"""The same, with gradients in bfloat16 on the rank and on the wire."""

FP16: Changes = {
    "parameters": "fp16",
    "gradients": "fp16",
    "reduction": "fp16",
    "loss_scaling": "dynamic",
}
"""float16 throughout, but for a float32 master copy, with a loss scale that follows overflows."""


def layout(
    *,
    model: Changes | None = None,
    optimizer: Changes | None = None,
    precision: Changes | None = None,
    zero: Changes | None = None,
    mesh: Changes | None = None,
    context: Changes | None = None,
    documents: Documents = "joined",
    **chosen: Any,
) -> Plan:
    """Return a Llama-like plan: untied, 1F1B, three microbatches, but for what is chosen.

    Where `zero` is given, data ranks are shards; `mesh` says otherwise. `context` says how
    sequences are split over the `cp` of `mesh`.
    """
    defaults: Changes = {
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
    plan = Case(**{**defaults, **chosen}).plan()
    tp, cp = plan.mesh.tp, (mesh or {}).get("cp", 1)
    shards: Changes = {} if zero is None else {"dp_replicate": 1, "dp_shard": plan.mesh.dp}
    ranks = replace(plan.mesh, **{**shards, **(mesh or {})})
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
            "max_positions": plan.model.max_positions * cp,
            **(model or {}),
        },
    )
    rules: Changes = {"clip_norm": 1.0, "warmup_steps": 10, **(optimizer or {})}
    mathematics = replace(
        plan.mathematics,
        model=shape,
        global_sequences=plan.mathematics.global_sequences // plan.mesh.dp * ranks.dp,
        sequence_length=plan.mathematics.sequence_length * cp,
        optimizer=replace(plan.mathematics.optimizer, **rules),
        precision=replace(plan.mathematics.precision, **(precision or {})),
        documents=documents,
        seed=0,
    )
    placed = replace(
        plan.layout,
        mesh=ranks,
        zero=replace(plan.layout.zero, **(zero or {})),
        context=replace(plan.layout.context, **(context or {})),
    )
    return replace(plan, mathematics=mathematics, layout=placed)


CONTEXTS: dict[str, Changes] = {
    "ring": {"mesh": {"cp": 2}, "dp": 2, "tied": True},
    "striped": {"mesh": {"cp": 4}, "documents": "separate", "model": {"qk_norm": True}},
    "gathered": {"mesh": {"cp": 2}, "model": {"window": 5, "soft_cap": 2.0}, "tp": 2},
    "ulysses-ring": {"mesh": {"cp": 4}, "ulysses": 2, "model": {"dropout": 0.1}},
    "ulysses": {"mesh": {"cp": 2}, "ulysses": 2, "model": {"positions": "learned", "kv_heads": 1}},
}
"""A layout for each kind of context parallelism."""


def context_layout(kind: str) -> Plan:
    """Return the plan of a kind of context parallelism, shrunk, in float64."""
    chosen = dict(CONTEXTS[kind])
    context = {"kind": kind, "ulysses_degree": chosen.pop("ulysses", 1)}
    return shrink(layout(context=context, accumulation=1, **chosen), precision="fp64")
