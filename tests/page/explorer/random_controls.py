"""Random settings of the explorer, most of them such that they make a plan."""

from __future__ import annotations

from functools import cache
from random import Random
from typing import Any

from echelon.page.explorer.broken_rules import broken_rules
from echelon.page.explorer.controls import OPERATORS, PLAIN, PRECISIONS, Controls
from echelon.page.explorer.tables import CONTEXT_DEGREES, LENGTHS, explorer_tables
from echelon.schedule.build import SCHEDULES

MODELS = (
    *("llama3.1-405b", "llama3-8b", "mixtral-8x7b", "deepseek-v3", "mistral-7b", "gpt2"),
    *("qwen3-30b-a3b", "qwen3-0.6b", "gpt3-175b", "nano"),
)
CLUSTERS = ("16384xh100", "64xa100-80gb", "8xl40s", "72xgb200", "laptop", "1xh200")

TIDY = 0.75
"""Share of settings that are mended where they break a rule for no interesting reason."""

Settings = tuple[Controls, dict[str, Any], dict[str, Any]]
"""Controls, the record of a model, and that of a cluster."""


@cache
def tables() -> dict[str, Any]:
    """Return the tables of some models and clusters."""
    return explorer_tables(MODELS, CLUSTERS)


def random_settings(random: Random) -> Settings:
    """Return controls of a model on a cluster, legal or not."""
    pick = random.choice
    model, cluster = pick(tables()["models"]), pick(tables()["clusters"])
    heads, devices = model["shape"]["kv_heads"], cluster["devices"]
    tp, cp, pp = pick((1, 2, 3, 4, 8)), pick((1, 1, 1, *CONTEXT_DEGREES)), pick((1, 1, 2, 3, 4, 8))
    replicas, shards, microbatch = pick((1, 1, 2, 3)), pick((1, 2, 8, 64)), pick((1, 1, 2, 4))
    zero, schedule, virtual = (
        pick((0, 1, 2, 3)),
        pick((*tables()["schedules"],)),
        pick((1, 1, 2, 3)),
    )
    split = tp > 1 and pick((True, False))
    rounds = pick((1, 2, 8, 32, 33))
    if random.random() < TIDY:
        # What breaks a rule most often is mended.
        tp = pick([n for n in (1, 2, 4, 8) if heads % n == 0])
        split = split and tp > 1
        builder = SCHEDULES[schedule]
        virtual = next(n for n in range(1, 9) if builder.fits_virtual_stages(n))
        pp = pp if builder.fits_ranks(pp) else 2 * pp
        while pp * virtual > model["shape"]["layers"]:
            pp //= 2
        pp, cp = (pp, cp) if pp * tp * cp <= devices else (max(1, devices // tp), 1)
        while pp * tp * cp * replicas * shards > devices and replicas * shards > 1:
            shards, replicas = (shards // 2, replicas) if shards > 1 else (1, 1)
        zero = zero if shards * cp > 1 else 0
        shards, replicas = (1, shards * replicas) if zero == 0 else (shards, replicas)
        rounds = 2 * pp * pick((1, 2, 4))
    legal: dict[str, Any] = {**PLAIN, **_more(random, model, zero=zero, cp=cp, tp=tp)}
    ep = pick((1, 2, 4, 8, 3)) if model["shape"]["experts"] or random.random() < 0.05 else 1
    servers = pick((1, 2)) if random.random() < 0.05 else 0
    if servers and random.random() < TIDY:
        pp, cp, tp, ep, zero, replicas, shards = 1, 1, 1, 1, 0, min(devices - 1, 2) or 1, 1
        virtual, schedule, split, legal = 1, "1f1b", False, dict(PLAIN)
    legal |= {
        "recompute": legal.get("recompute", "none"),
        "ep": ep,
        "servers": servers,
        "virtual": virtual,
        "sequence_parallel": split or random.random() < 0.02,
    }
    controls = Controls(
        **legal,
        pp=max(1, pp),
        dp_replicate=replicas,
        dp_shard=shards,
        cp=cp,
        tp=tp,
        zero=zero,
        schedule=schedule,
        microbatch=microbatch,
        sequences=replicas * shards * microbatch * rounds + (random.random() < 0.05),
        length=pick((1024, 1024, 2048, *LENGTHS[:7])),
        precision=pick((*PRECISIONS, "bf16", "bf16")),
    )
    return controls, model, cluster


def _more(random: Random, model: dict[str, Any], *, zero: int, cp: int, tp: int) -> dict[str, Any]:
    """Return settings that few runs have, most of them where they have an effect."""
    pick, found = random.choice, dict[str, Any]()

    def chance(usual: bool) -> bool:
        """Return whether a setting is drawn: often where it is `usual`, else seldom."""
        return random.random() < (0.4 if usual else 0.015)

    found["recompute"] = policy = pick(tuple(tables()["recomputes"]))
    found["every"] = pick((2, 3, 8)) if chance(policy == "full") else 1
    if chance(policy == "selective" or found["every"] > 1):
        found["operators"] = pick((*OPERATORS,))
    if chance(cp > 1) or chance(cp > 1):
        found["context"] = pick((*tables()["context_kinds"],))
    if chance(found.get("context") == "ulysses-ring"):
        found["ulysses"] = pick((1, 2, 4, 3, cp))
    for name, least, values in (
        ("reshard", 3, ("never",)),
        ("secondary", 3, (True,)),
        ("gather", 3, ("int8", "fp8")),
        ("reduce", 1, ("int8", "int4")),
        ("optimizer_offload", 1, ("host",)),
        ("parameter_offload", 3, ("host",)),
    ):
        if chance(zero >= least) and random.random() < 0.6:
            found[name] = pick(values)
    if chance(tp > 1):
        found["tp_overlap"] = pick(("ring", "symmetric-memory"))
    if random.random() < 0.3:
        found["optimizer"] = pick(tuple(tables()["optimizers"]))
    experts = model["shape"]["experts"] is not None
    if chance(experts):
        found["expert_tp"] = pick((tp, tp, tp, 2))
    if chance(experts):
        found["dispatch"] = "two-hop"
    if chance(experts):
        found["chunks"] = pick((2, 4, 3))
    return found


def legal_settings(seed: int, count: int) -> list[Settings]:
    """Return so many settings that make a plan."""
    random, found = Random(seed), list[Settings]()
    while len(found) < count:
        one = random_settings(random)
        if not broken_rules(*one):
            found.append(one)
    return found
