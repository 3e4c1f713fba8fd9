"""The latent attention of a Megatron-LM command: its ranks, and the dims of its heads.

Both compressed vectors are normed here, as in DeepSeek-V2 (2024, section 2.1); Megatron-LM norms
them with --qk-layernorm. Its rotary positions of such heads are YaRN's unless it is told otherwise.
"""

from __future__ import annotations

from echelon.config.foreign.ledger import COUNT, Ledger

LATENT, NORM, ROPE = "--multi-latent-attention", "--qk-layernorm", "--rope-type"
QUERY, CHANNELS = "--q-lora-rank", "--kv-channels"
SIZES: dict[str, tuple[str, int | None, str]] = {
    QUERY: ("query_rank", None, "rank of the query projection"),
    "--kv-lora-rank": ("kv_rank", 32, "rank of the key/value projection"),
    "--qk-head-dim": ("nope_dim", 128, "head dim without rotary positions"),
    "--qk-pos-emb-head-dim": ("rope_dim", 64, "head dim with rotary positions"),
    "--v-head-dim": ("value_dim", 128, "head dim of the values"),
}
YARN = ("--rotary-scaling-factor", "--mscale", "--mscale-all-dim", "--beta-fast", "--beta-slow")


def read_latent(ledger: Ledger) -> bool:
    """Map latent attention; return whether there is any."""
    sizes = {
        key: ledger.whole(key, COUNT, setting=f"model.latent.{SIZES[key][0]}") for key in SIZES
    }
    if not ledger.flag(LATENT, setting="model.latent"):
        for key in (*SIZES, *YARN, ROPE):
            ledger.skip(key, f"it is about {LATENT}")
        return False
    ledger.skip(LATENT, "its sizes say the rest")
    for key, (name, default, why) in SIZES.items():
        size = default if sizes[key] is None and not ledger.has(key) else sizes[key]
        source = "" if ledger.has(key) else ledger.default
        if size is not None:
            ledger.set(key, f"model.latent.{name}", size, why, source=source)
        elif not ledger.has(key):
            whole = "queries are compressed too; Megatron-LM leaves them as they are by default"
            ledger.refuse(key, whole, works=(f"{key} 1536",), setting=f"model.latent.{name}")
    if not ledger.flag(NORM, setting="model.latent"):
        ledger.refuse(NORM, "compressed vectors are normed", works=(NORM,), setting="model.latent")
    ledger.skip(NORM, "compressed vectors are always normed")
    ledger.skip(CHANNELS, f"--qk-head-dim and --qk-pos-emb-head-dim say it with {LATENT}")
    _read_rope(ledger)
    return True


def _read_rope(ledger: Ledger) -> None:
    """Accept plain rotary positions."""
    if ledger.word(ROPE, ("rope", "yarn")) != "rope":
        why = "rotary positions are plain, and YaRN's by default"
        ledger.refuse(ROPE, why, works=(f"{ROPE} rope",), setting="model.rope_scaling.factor")
        return
    ledger.skip(ROPE, "rotary positions are plain")
    for key in YARN:
        ledger.skip(key, "rotary positions are plain")
