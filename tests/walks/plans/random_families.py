"""Settings of random plans of one family: adapters, 8-bit products, islands, servers and others.

`random_settings.py` draws any run. A family changes such a draw: it adds its own settings, and
leaves out settings that never go with it. Rules refuse other combinations that are not legal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random

from tests.walks.plans.random_settings import Settings, draw_settings

Family = Callable[[Random, Settings], Settings]

_FOLDER_KEY = "zero.offload_dir"
CAPACITY_KEY = "experts.capacity_factor"
_MOST_DRAWS = 200
"""Draws until one has the property that a family asks for; one of six or more has it."""


def draw_any(random: Random, offload_dir: str) -> Settings:
    """Return the settings of a run of a random family, or of none."""
    family = random.choice((*FAMILIES, "", "", "", ""))
    return draw_family(random, offload_dir, family)


def draw_family(random: Random, offload_dir: str, family: str) -> Settings:
    """Return the settings of a run of `family`, a name of `FAMILIES`; "" changes nothing."""
    chosen = draw_settings(random, offload_dir)
    if family:
        chosen = FAMILIES[family](random, chosen)
    return chosen | ({_FOLDER_KEY: offload_dir} if _FOLDER_KEY in chosen else {})


def _without(drawn: Settings, *prefixes: str) -> Settings:
    return {key: value for key, value in drawn.items() if not key.startswith(prefixes)}


def _until(random: Random, drawn: Settings, holds: Callable[[Settings], bool]) -> Settings:
    """Return the draw, or the first after it that `holds`."""
    for _ in range(_MOST_DRAWS):
        if holds(drawn):
            break
        drawn = draw_settings(random, ".")
    return drawn


def _is_small(drawn: Settings) -> bool:
    """True if the draw has a small model, not a preset."""
    return "model.layers" in drawn


def _is_plain(drawn: Settings) -> bool:
    """True if the draw has a small dense model with usual attention."""
    other = ("model.experts.num_experts", "model.latent.kv_rank")
    return _is_small(drawn) and not any(key in drawn for key in other)


def capacity(random: Random, drawn: Settings) -> Settings:
    """Return a mixture whose experts have room for some tokens only."""
    drawn = _until(random, drawn, lambda draw: CAPACITY_KEY in draw)
    return drawn | {CAPACITY_KEY: random.choice((0.7, 1.0, 1.25, 1.5))}


def sinks(random: Random, drawn: Settings) -> Settings:
    """Return attention with learned sinks, with windows in some blocks."""
    drawn = _until(random, drawn, _is_plain)
    return _without(drawn, "model.soft_cap") | {"model.sinks": True} | kinds(random, drawn)


def kinds(random: Random, drawn: Settings) -> Settings:
    """Return a model whose blocks have windows in turn."""
    drawn = _until(random, drawn, _is_small)
    layers = drawn["model.layers"]
    assert isinstance(layers, int)
    period = random.choice((2, 3))
    words = ["global" if place % period == period - 1 else "local" for place in range(layers)]
    chosen = drawn | {"model.window": random.choice((9, 33)), "model.layer_kinds": _list(words)}
    if "model.positions" not in drawn and random.random() < 0.5:
        chosen["model.local_rope_theta"] = 2000.0
    return chosen


def parts(random: Random, drawn: Settings) -> Settings:
    """Return other turns, factors, and places of norms."""
    drawn = _without(_until(random, drawn, _is_plain), "model.dropout", "model.positions")
    choices: tuple[Settings, ...] = (
        {"model.rotary.fraction": 0.5},
        {"model.rotary.interleaved": True},
        {"model.rotary.none_every": 2},
        {"model.norm_place": "after"},
        {"model.norm_place": "both"},
        {"model.residual": "parallel"},
        {"model.residual": "parallel-one-norm"},
        {"model.multipliers.residual": 0.5, "model.multipliers.embedding": 2.0},
        {"model.multipliers.logits": 0.5},
        {"model.norm_offset": 1.0},
        {"model.qk_norm": True, "model.qk_norm_over": "width"},
        {"model.rope_scaling.kind": "linear", "model.rope_scaling.factor": 2.0},
        {
            "model.rope_scaling.kind": "yarn",
            "model.rope_scaling.factor": 4.0,
            "model.rope_scaling.original_positions": 64,
        },
    )
    return drawn | random.choice(choices)


def adapters(random: Random, drawn: Settings) -> Settings:
    """Return a run that trains adapters of low rank."""
    drawn = _without(drawn, "mesh.tp_overlap", "zero.gather", "precision.")
    chosen = drawn | {"lora.rank": random.choice((2, 4, 8))}
    targets = ('["q", "v"]', '["q", "k", "v", "o"]')
    if random.random() < 0.5 and "model.latent.kv_rank" not in drawn:
        chosen["lora.targets"] = random.choice(targets)
    elif "model.experts.num_experts" in drawn and "model.latent.kv_rank" not in drawn:
        chosen["lora.targets"] = targets[1]
    if random.random() < 0.3:
        chosen["lora.rslora"] = True
    return chosen


def fp8(random: Random, drawn: Settings) -> Settings:
    """Return linear layers that multiply 8-bit numbers."""
    drawn = _until(random, drawn, _is_small)
    drawn = _without(drawn, "mesh.tp_overlap", "precision.")
    chosen = drawn | {"precision.matmul": "fp8", "precision.fp8_block": 8}
    chosen["precision.parameters"] = random.choice(("bf16", "fp32"))
    if "model.head_dim" in chosen:
        chosen["model.head_dim"] = random.choice((16, 32))
    if random.random() < 0.5:
        chosen |= {"precision.fp8_scales": "tensor", "precision.fp8_history": random.choice((2, 4))}
    elif chosen.get("zero.stage") == 3 and "zero.parameter_offload" not in chosen:
        chosen["zero.gather"] = "fp8"
    if random.random() < 0.3:
        chosen["precision.fp8_gradients"] = "e5m2"
    return chosen


def int8(random: Random, drawn: Settings) -> Settings:
    """Return matrices that are gathered rounded to int8."""
    drawn = _until(random, drawn, lambda draw: draw.get("zero.stage") == 3 and _is_small(draw))
    drawn = _without(drawn, "zero.keep_whole_below", "zero.parameter_offload")
    return drawn | {"zero.gather": "int8", "zero.int8_block": 8}


def islands(random: Random, drawn: Settings) -> Settings:
    """Return replicas that train alone and synchronize once in a round."""
    drawn = _until(random, drawn, lambda draw: "mesh.dp_replicate" in draw)
    drawn = _without(drawn, "zero.optimizer_offload", "zero.parameter_offload", "zero.offload")
    drawn = _without(drawn, "precision.")
    every = random.choice((2, 3, 5))
    chosen = drawn | {"local_sgd.every": every, "train.steps": 60 * every}
    if random.random() < 0.4:
        chosen["local_sgd.outer"] = "sgd"
    if random.random() < 0.3:
        chosen["local_sgd.gradients"] = random.choice(("int8", "fp8"))
    elif random.random() < 0.5:
        delay = random.randrange(1, every)
        chosen |= {"local_sgd.delay": delay, "train.steps": 60 * every + delay}
    if random.random() < 0.3:
        chosen["local_sgd.fragments"] = 2
    return chosen


def elastic(random: Random, drawn: Settings) -> Settings:
    """Return islands that go on where others are lost; they hold dense models."""
    drawn = _until(random, drawn, lambda draw: "mesh.dp_replicate" in draw and _is_plain(draw))
    chosen = _without(islands(random, drawn), "local_sgd.delay", "local_sgd.gradients")
    every = chosen["local_sgd.every"]
    assert isinstance(every, int)
    return chosen | {
        "local_sgd.min_islands": 1,
        "train.steps": 60 * every,
        "train.validate_every": "never",
        "checkpoint.every": 2 * every,
    }


def servers(random: Random, drawn: Settings) -> Settings:
    """Return workers that push gradients to parameter servers."""
    drawn = _until(random, drawn, _is_plain)
    drawn = _without(drawn, "mesh.", "zero.", "pipeline.", "context.", "precision.")
    workers = random.choice((1, 2, 3))
    size = drawn.get("batch.microbatch_sequences", 1)
    assert isinstance(size, int)
    chosen = drawn | {
        "mesh.dp_replicate": workers,
        "servers.count": random.choice((1, 2)),
        "batch.global_sequences": size * workers * random.choice((1, 2)),
        "optimizer.kind": random.choice(("adamw", "sgd")),
    }
    if random.random() < 0.4:
        chosen |= {"servers.updates": "asynchronous", "servers.max_staleness": 1}
    return chosen


def sums(random: Random, drawn: Settings) -> Settings:
    """Return gradients that ranks sum by an algorithm made of messages."""
    drawn = _until(random, drawn, lambda draw: "mesh.dp_replicate" in draw and _is_small(draw))
    return drawn | {"collectives.algorithm": random.choice(("ring", "tree", "halving-doubling"))}


def gates(random: Random, drawn: Settings) -> Settings:
    """Return experts with biases, and gates that are clamped."""
    drawn = _until(random, drawn, lambda draw: "model.experts.num_experts" in draw)
    choices: tuple[Settings, ...] = (
        {"model.experts.bias": True},
        {"model.experts.limit": 7.0},
        {"model.experts.logit_bias": True},
        {"model.experts.bias": True, "model.experts.limit": 7.0, "model.experts.logit_bias": True},
    )
    return drawn | random.choice(choices)


def _list(words: list[str]) -> str:
    return "[" + ", ".join(f'"{word}"' for word in words) + "]"


FAMILIES: Mapping[str, Family] = {
    "capacity": capacity,
    "sinks": sinks,
    "kinds": kinds,
    "parts": parts,
    "adapters": adapters,
    "fp8": fp8,
    "int8": int8,
    "islands": islands,
    "elastic": elastic,
    "servers": servers,
    "sums": sums,
    "gates": gates,
}
"""The families by their names."""
