"""How an Accelerate YAML cuts sequences -> context ranks. Accelerate 1.15, torch 2.13.

`cp_size` ranks gather keys and values, or pass them on with an all-to-all by one place at a time,
which is a ring; `sp_size` ranks exchange heads, as DeepSpeed does. Only one of the two may be
above 1.
"""

from __future__ import annotations

from echelon.config.foreign.ledger import COUNT, Ledger

TABLE = "parallelism_config"
CP, SP, STRATEGY = (f"{TABLE}.{TABLE}_{key}" for key in ("cp_size", "sp_size", "cp_comm_strategy"))
STRATEGIES = {"allgather": "gathered", "alltoall": "ring"}
ENGINES = {"cp_backend": "torch", "sp_backend": "deepspeed"}


def read_context(ledger: Ledger) -> int | None:
    """Map how sequences are cut; return the context ranks, or None where nothing says them."""
    cp, sp = (ledger.whole(key, COUNT, setting="mesh.cp") for key in (CP, SP))
    word = ledger.word(STRATEGY, STRATEGIES, setting="context.kind")
    if cp is not None and sp is not None and cp > 1 < sp:
        ledger.conflict(
            f"{CP} = {cp} and {SP} = {sp}: Accelerate takes one of them",
            "mesh.cp",
            ledger.where(CP, SP),
            works=(f"{CP} = 1", f"{SP} = 1"),
        )
    elif sp is not None and sp > 1:
        ledger.set(SP, "mesh.cp", sp, "pieces of a sequence")
        ledger.set(SP, "context.kind", "ulysses", "heads are exchanged for the sequence")
        ledger.skip(CP, f"{SP} cuts the sequence")
        ledger.skip(STRATEGY, f"it is about {CP}")
        cp = sp
    else:
        ledger.skip(SP, "1 cuts nothing")
        if cp is not None:
            ledger.set(CP, "mesh.cp", cp, "ranks that hold one model together")
        if cp is None or cp == 1:
            ledger.skip(STRATEGY, "a sequence is not cut")
        elif word is not None or not ledger.has(STRATEGY):
            source = "" if word else ledger.default
            kind, why = STRATEGIES[word or "allgather"], "how pieces of a sequence meet"
            ledger.set(STRATEGY, "context.kind", kind, why, source=source)
    _read_engines(ledger)
    return cp


def _read_engines(ledger: Ledger) -> None:
    for name, engine in ENGINES.items():
        why = "context.kind says how pieces of a sequence meet"
        ledger.only(f"{TABLE}.{TABLE}_{name}", (engine,), why, setting="context.kind")
    for name in ("sp_seq_length", "sp_seq_length_is_variable"):
        ledger.skip(f"{TABLE}.{TABLE}_{name}", "batch.sequence_length says it, of every sequence")
    ledger.skip(f"{TABLE}.{TABLE}_sp_attn_implementation", "attention is fused where it can be")
