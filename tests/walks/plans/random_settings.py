"""Settings of random plans, over all that a run file can choose of mathematics and layout.

A plan is drawn as settings on a preset, as a user would write it: `echelon prove PRESET --set ...`.
What follows from another choice is drawn after it (how tokens travel, where there are experts), so
that most draws are plans; what does not go together is left for the rules to refuse.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm, prod
from random import Random

from echelon.core.choices.context_kinds import CONTEXT_KINDS
from echelon.core.choices.optimizers import OPTIMIZERS
from echelon.schedule.build import SCHEDULES
from tests.walks.matrix.cases import MAX_WORLD

PRESET = "nano"
"""The run that all settings change."""

Settings = dict[str, object]

WORLD_SIZES = (1, 2, 2, 2, 2, 2, 3, 4, 4, 4, 4, 4, 6, 8)
"""Ranks of a plan, drawn as often as they are named: a plan of eight takes long."""

_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
_LARGE_MODELS = ("llama3-8b", "mistral-7b", "qwen3-4b", "mixtral-8x7b", "deepseek-v3", "gpt2")
_LARGE_SHARE = 0.1  # of all plans
_EXPERT_SHARE = 0.4  # of all plans
_OPERATORS = ('["norm"]', '["attention"]', '["norm", "activation"]', '["norm", "mlp", "attention"]')


def settings_of(seed: int, number: int, offload_dir: str) -> Settings:
    """Return the settings of plan `number` of a walk; they depend on nothing else."""
    return draw_settings(Random(f"{seed}/{number}"), offload_dir)


def flags_of(settings: Settings) -> list[str]:
    """Return settings as a command line takes them."""
    return [f"{key}={_text(value)}" for key, value in settings.items()]


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def draw_settings(
    random: Random, offload_dir: str, world_sizes: Sequence[int] = WORLD_SIZES
) -> Settings:
    """Return the settings of one plan; files of offload go to `offload_dir`.

    More ranks than a plan is proven with here are GPUs of a cluster.
    """
    chosen: Settings = {"train.seed": random.randrange(100)}
    mesh = _mesh(random, world_sizes)
    large = random.random() < _LARGE_SHARE
    experts = not large and random.random() < _EXPERT_SHARE
    model = _large_model(random) if large else _model(random, mesh, experts=experts)
    chosen |= {f"mesh.{axis}": degree for axis, degree in mesh.items() if degree > 1}
    chosen |= model
    if prod(mesh.values()) > MAX_WORLD:
        chosen["cluster.preset"] = f"{prod(mesh.values())}xh100"
    if mesh["tp"] > 1 and random.random() < 0.5:
        chosen["mesh.sequence_parallel"] = True
    chosen |= _pipeline(random, mesh) | _batch(random, mesh, chosen) | _zero(random, mesh)
    if chosen.get("zero.offload_dir"):
        chosen["zero.offload_dir"] = offload_dir
    chosen |= _context(random, mesh) | _recompute(random) | _precision(random) | _optimizer(random)
    chosen |= _experts(random, mesh) if experts else {}
    if "mesh.sequence_parallel" in chosen:
        chosen |= _some(random, {"mesh.tp_overlap": ("ring",)}, 0.5)
    if "model.layers" in chosen:
        # Drawn last, so that all else of a seed is what it was without them.
        scores: dict[str, Sequence[object]] = {
            "model.final_soft_cap": (3.0, 30.0),
            "model.attention_scale": (0.1, 0.5),
        }
        chosen |= _some(random, scores, 0.2)
    return chosen


def _mesh(random: Random, world_sizes: Sequence[int]) -> dict[str, int]:
    mesh: dict[str, int] = dict.fromkeys(_AXES, 1)
    left = random.choice(world_sizes)
    for factor in (*[2] * max(world_sizes).bit_length(), 3):
        if left % factor == 0:
            left //= factor
            mesh[random.choice(_AXES)] *= factor
    return mesh


def _some(random: Random, choices: dict[str, Sequence[object]], share: float) -> Settings:
    """Return a value for a share of the settings, the others as they are."""
    return {
        key: random.choice(values) for key, values in choices.items() if random.random() < share
    }


def _large_model(random: Random) -> Settings:
    return {
        "model.preset": random.choice(_LARGE_MODELS),
        "cluster.preset": "8xh200",
        "batch.sequence_length": 1024,
    }


def _model(random: Random, mesh: dict[str, int], *, experts: bool) -> Settings:
    tp = mesh["tp"]
    heads, kv_heads = random.choice(((4, 2), (4, 4), (8, 4), (8, 8), (8, 2), (12, 6)))
    times = lcm(kv_heads, tp) // kv_heads
    layers = max(random.choice((2, 3, 4, 6, 8, 12)), mesh["pp"] * random.choice((1, 2, 3)))
    # Widths on both sides of each other, in every order.
    found: Settings = {
        "model.layers": layers,
        "model.heads": heads * times,
        "model.kv_heads": kv_heads * times,
        "model.head_dim": random.choice((8, 16, 32)),
        "model.hidden": random.choice((96, 192, 384)),
        "model.ffn": random.choice((48, 96, 192, 480)),
        "model.vocab": random.choice((257, 258, 999)),
    }
    rope = random.random() < 0.7
    if not rope:
        found["model.positions"] = "learned"
    if not experts and random.random() < 0.25:
        found |= {"model.gated": False, "model.activation": random.choice(("silu", "gelu"))}
    biases = {"model.qkv_bias": (True,), "model.output_bias": (True,), "model.qk_norm": (True,)}
    if rope and random.random() < 0.1:
        biases = {}
        ranks = {"query_rank": 24, "kv_rank": 16}
        dims = {"nope_dim": 16, "rope_dim": 8, "value_dim": random.choice((12, 16, 24))}
        found |= {f"model.latent.{key}": value for key, value in (ranks | dims).items()}
        found["model.kv_heads"] = found["model.heads"]
        del found["model.head_dim"]
    return found | _some(
        random,
        {
            "model.tied": (True, False),
            "model.norm": ("layernorm",),
            **biases,
            **({} if experts else {"model.mlp_bias": (True,)}),
            "model.dropout": (0.1, 0.3),
            "model.window": (9, 33, 70),
            "model.soft_cap": (5.0, 30.0),
        },
        0.2,
    )


def _pipeline(random: Random, mesh: dict[str, int]) -> Settings:
    if mesh["pp"] == 1:
        return {}
    schedule = random.choice(tuple(SCHEDULES))
    found: Settings = {"pipeline.schedule": schedule}
    if SCHEDULES[schedule].default_virtual_stages > 1:
        found["pipeline.virtual_stages"] = random.choice((2, 2, 2, 3))
    return found | _some(random, {"pipeline.stages": ("even",)}, 0.2)


def _batch(random: Random, mesh: dict[str, int], chosen: Settings) -> Settings:
    size, count = random.choice((1, 1, 2, 3)), random.choice((1, 2, 3, 4, 5, 6, 8))
    if mesh["pp"] > 1:
        count = mesh["pp"] * random.choice((1, 2, 3)) + random.choice((0, 0, 0, 1))
    replicas = mesh["dp_replicate"] * mesh["dp_shard"]
    found: Settings = {
        "batch.microbatch_sequences": size,
        "batch.global_sequences": size * count * replicas,
    }
    if "batch.sequence_length" not in chosen:
        unit = 2 * prod(mesh[axis] for axis in ("cp", "tp"))
        found["batch.sequence_length"] = unit * max(1, random.choice((48, 96, 128)) // unit)
    return found | _some(random, {"batch.documents": ("separate",)}, 0.3)


def _zero(random: Random, mesh: dict[str, int]) -> Settings:
    if mesh["dp_shard"] * mesh["cp"] == 1:
        return {}
    stage = random.choice((1, 2, 3, 3) if mesh["dp_shard"] > 1 else (0, 0, 1, 2, 3))
    if not stage:
        return {}
    found: Settings = {"zero.stage": stage}
    found |= _some(random, {"zero.keep_whole_below": (200, 2000)}, 0.2)
    if stage < 3:
        found |= _some(random, {"zero.accumulate": ("whole", "slices")}, 0.3)
        found |= _some(random, {"zero.bucket_bytes": (2**14, 2**18)}, 0.3)
    else:
        found |= _some(
            random,
            {
                "zero.reshard_after_forward": ("always", "never"),
                "zero.prefetch": (0, 2, 5),
                "zero.unit_blocks": (2, 3),
                "zero.parameter_offload": ("host", "nvme"),
            },
            0.3,
        )
    found |= _some(random, {"zero.optimizer_offload": ("host", "nvme")}, 0.3)
    if "nvme" in found.values():
        found["zero.offload_dir"] = "."
        found |= _some(random, {"zero.offload_buffers": (3,)}, 0.3)
    return found


def _context(random: Random, mesh: dict[str, int]) -> Settings:
    if mesh["cp"] == 1:
        return {}
    kind = random.choice(tuple(CONTEXT_KINDS))
    found: Settings = {"context.kind": kind}
    if kind == "ulysses-ring" and mesh["cp"] > 2:
        found["context.ulysses_degree"] = 2
    return found


def _recompute(random: Random) -> Settings:
    policy = random.choice(("none", "none", "full", "selective"))
    if policy == "none":
        return {}
    found: Settings = {"recompute.policy": policy}
    if policy == "selective":
        found |= _some(random, {"recompute.operators": _OPERATORS}, 0.7)
    else:
        found |= _some(random, {"recompute.every": (2, 3), "recompute.offload": ("host",)}, 0.3)
    return found


def _precision(random: Random) -> Settings:
    parameters = random.choice(("fp32", "fp32", "bf16", "bf16", "fp16"))
    if parameters == "fp32":
        return {}
    found: Settings = {"precision.parameters": parameters}
    sums = (parameters,)
    found |= _some(random, {"precision.gradients": sums, "precision.reduction": sums}, 0.3)
    if parameters == "fp16":
        scaling = random.choice(("dynamic", "dynamic", "fixed"))
        found |= {"precision.loss_scaling": scaling, "precision.loss_scale": 2.0**12}
        if scaling == "dynamic":
            found["precision.loss_scale_hysteresis"] = random.choice((1, 2, 3))
            found["precision.loss_scale_window"] = random.choice((2, 50))
    return found


def _optimizer(random: Random) -> Settings:
    schedule = random.choice(("constant", "linear", "cosine", "wsd"))
    found: Settings = {
        "optimizer.kind": random.choice(tuple(OPTIMIZERS)),
        "optimizer.schedule": schedule,
        "optimizer.warmup_steps": random.choice((0, 20)),
    }
    if schedule == "wsd":
        found["optimizer.decay_steps"] = 60
    decays = (
        ("optimizer.weight_decay", 0.0),
        ("optimizer.decay", "blocks"),
        ("optimizer.decay", "all"),
    )
    found |= dict(random.sample(decays, random.choice((0, 0, 1))))
    if schedule != "constant":
        found |= _some(random, {"optimizer.final_ratio": (0.0, 0.5)}, 0.3)
    return found | _some(
        random,
        {
            "optimizer.clip_norm": ("none", 0.5),
        },
        0.25,
    )


def _experts(random: Random, mesh: dict[str, int]) -> Settings:
    tp = mesh["tp"]
    fold = mesh["dp_shard"] * mesh["cp"]
    pieces = tp if tp > 1 and random.random() < 0.5 else 1
    ep = random.choice([one for one in (1, 2, 4) if fold * (tp // pieces) % one == 0])
    top_k = random.choice((1, 2, 2, 3))
    found: Settings = {
        "model.experts.num_experts": random.choice((4, 8)) if tp % 3 else random.choice((6, 12)),
        "model.experts.top_k": top_k,
        "model.experts.ffn": random.choice((48, 96, 192)),
        "model.experts.renormalise": top_k > 1 and random.random() < 0.7,
    }
    if ep > 1:
        found["mesh.ep"] = ep
        found |= _some(random, {"experts.chunks": (2, 3), "experts.zero_stage": (1, 2)}, 0.25)
    if pieces > 1:
        found["experts.expert_tp"] = pieces
    if random.random() < 0.2:
        found |= {"model.experts.groups": 2, "model.experts.top_groups": 1}
    balance = random.choice(("none", "aux", "bias", "both"))
    if balance != "none":
        found["experts.balance"] = balance
    if balance in ("bias", "both"):
        found |= {"model.experts.router_bias": True, "experts.bias_rate": 0.01}
    if balance in ("aux", "both"):
        found["experts.aux_over"] = random.choice(("global", "sequence", "microbatch"))
    if random.random() < 0.4:
        found["experts.capacity_factor"] = random.choice((0.7, 1.0, 1.5))
        found["experts.drop"] = random.choice(("position", "score"))
        if ep > 1 and random.random() < 0.4:
            found["experts.padded"] = True
    return found | _some(
        random,
        {
            "model.experts.router": ("sigmoid",),
            "model.experts.shared_experts": (1, 2),
            "model.experts.first_dense_layers": (1,),
            "model.experts.gate_scale": (2.5,),
            "experts.z_coefficient": (0.001,),
            "experts.route": ("even", "not-last"),
        },
        0.2,
    )
