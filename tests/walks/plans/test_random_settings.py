"""Random settings meet the whole space, and mostly are plans."""

from __future__ import annotations

from random import Random

from echelon.config.load import load_job
from echelon.core.choices.context_kinds import CONTEXT_KINDS
from echelon.core.choices.optimizers import OPTIMIZERS
from echelon.core.errors import ConfigError
from echelon.schedule.build import SCHEDULES
from tests.walks.plans.random_settings import PRESET, Settings, draw_settings, flags_of

DRAWS = 1500


def draws(count: int) -> list[Settings]:
    """Return many draws."""
    return [draw_settings(Random(number), "/nowhere") for number in range(count)]


def test_a_draw_is_a_function_of_its_seed() -> None:
    assert draws(20) == draws(20)
    assert draw_settings(Random(1), "/nowhere") != draw_settings(Random(2), "/nowhere")


def test_every_choice_occurs() -> None:
    met = {(key, value) for drawn in draws(DRAWS) for key, value in drawn.items()}
    wanted: dict[str, set[object]] = {
        "pipeline.schedule": set(SCHEDULES),
        "context.kind": set(CONTEXT_KINDS),
        "optimizer.kind": set(OPTIMIZERS),
        "optimizer.schedule": {"constant", "linear", "cosine", "wsd"},
        "precision.parameters": {"bf16", "fp16"},
        "precision.loss_scaling": {"dynamic", "fixed"},
        "zero.stage": {1, 2, 3},
        "zero.optimizer_offload": {"host", "nvme"},
        "zero.parameter_offload": {"host", "nvme"},
        "experts.balance": {"aux", "bias", "both"},
        "experts.drop": {"position", "score"},
        "batch.documents": {"separate"},
        "recompute.policy": {"full"},
        "model.positions": {"learned"},
        "model.norm": {"layernorm"},
        "model.tied": {True, False},
    }
    for key, values in wanted.items():
        assert {value for name, value in met if name == key} >= values, key
    for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep"):
        assert (f"mesh.{axis}", 2) in met
    keys = {key for key, _ in met}
    assert keys >= {"model.window", "model.dropout", "model.latent.kv_rank", "model.soft_cap"}


def test_most_draws_are_plans() -> None:
    refused: list[str] = []
    for drawn in draws(30):
        try:
            load_job(PRESET, flags_of(drawn))
        except ConfigError as error:
            refused += error.rules[:1]
    assert len(refused) <= 8, refused
