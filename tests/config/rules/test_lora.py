"""Which runs can train adapters."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.config.load import load_job
from echelon.config.plan_view import plan_settings
from echelon.config.rules.finders import plan_problems
from echelon.core.choices.lora import Lora
from tests.config.problems import SMALL, problems_of, write


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write(tmp_path, SMALL)


def test_adapters_stand_beside_the_layers_that_are_named(small: Path) -> None:
    sets = ["lora.rank=4", "lora.alpha=8", 'lora.targets=["v", "q"]', "lora.rslora=true"]
    lora = load_job(small, sets).plan.model.lora
    assert lora == Lora(rank=4, alpha=8.0, targets=("q", "v"), rslora=True)
    assert lora is not None
    assert lora.scale == 4.0
    assert load_job(small, sets[:2]).plan.model.lora == Lora(
        rank=4, alpha=8.0, targets=("q", "k", "v", "o", "gate", "up", "down")
    )
    ungated = load_job(small, ["lora.rank=4", "model.gated=false", "model.activation=gelu"])
    assert ungated.plan.model.lora is not None
    assert "gate" not in ungated.plan.model.lora.targets


@pytest.mark.parametrize(
    ("rule", "sets", "key", "way"),
    [
        (
            "lora-targets",
            ("model.gated=false", "model.activation=gelu", 'lora.targets=["gate", "up"]'),
            "lora.targets",
            'lora.targets = ["up"]',
        ),
        (
            "lora-model",
            (
                "model.experts.num_experts=4",
                "model.experts.top_k=2",
                "model.experts.ffn=32",
            ),
            "lora.targets",
            'lora.targets = ["q", "k", "v", "o"]',
        ),
        ("lora-targets", ('lora.targets=["q_up", "o"]',), "lora.targets", 'lora.targets = ["o"]'),
        ("lora-dropout", ("lora.dropout=0.1",), "lora.dropout", "lora.dropout = 0.0"),
        (
            "lora-overlap",
            ("mesh.tp=2", "mesh.sequence_parallel=true", "mesh.tp_overlap=ring"),
            "mesh.tp_overlap",
            'mesh.tp_overlap = "none"',
        ),
        ("lora-replicas", ("servers.count=1",), "servers.count", "servers.count = 0"),
    ],
)
def test_what_has_no_place_for_adapters_is_refused(
    small: Path, rule: str, sets: tuple[str, ...], key: str, way: str
) -> None:
    found = problems_of(small, ["lora.rank=4", *sets])
    assert rule in found
    assert found[rule].key == key
    assert way in found[rule].suggestions


def test_eight_bits_have_no_adapters() -> None:
    sets = ["lora.rank=4", "precision.matmul=fp8"]
    found = problems_of("llama3-8b-zero3", sets)
    assert found["lora-full-precision"].suggestions[0] == 'precision.matmul = "parameters"'


def test_settings_of_adapters_without_any_are_told(small: Path) -> None:
    found = problems_of(small, ["lora.alpha=8"])
    assert found["no-effect"].message.startswith("lora.alpha = 8")


def test_a_plan_is_seen_with_its_adapters(small: Path) -> None:
    plan = load_job(small, ["lora.rank=4", 'lora.targets=["q"]']).plan
    assert plan_settings(plan)["lora.targets"] == ["q"]
    assert not plan_problems(plan)


LATENT = (
    "model.kv_heads=4",
    "model.latent.kv_rank=8",
    "model.latent.nope_dim=12",
    "model.latent.rope_dim=4",
    "model.latent.value_dim=12",
)


def test_latent_attention_has_layers_of_its_own(small: Path) -> None:
    lite = ("lora.rank=4", *LATENT, "model.heads=4", "model.latent.query_rank=none")
    whole = (*lite[:-1], "model.latent.query_rank=16")
    for sets, down in ((lite, ()), (whole, ("q_down",))):
        lora = load_job(small, [*sets]).plan.model.lora
        assert lora is not None
        assert lora.targets == (*down, "kv_down", "q_up", "kv_up", "o", "gate", "up", "down")
    found = problems_of(small, [*lite, 'lora.targets=["q", "q_down", "o"]'])
    assert (
        "q, q_down" in found["lora-targets"].message or "q_down, q" in found["lora-targets"].message
    )
    assert 'lora.targets = ["o"]' in found["lora-targets"].suggestions


def test_experts_are_frozen_below_adapters_of_attention(small: Path) -> None:
    experts = ["model.experts.num_experts=4", "model.experts.top_k=2", "model.experts.ffn=32"]
    plan = load_job(small, ["lora.rank=4", *experts, 'lora.targets=["q", "v"]']).plan
    assert plan.model.lora == Lora(rank=4, alpha=16.0, targets=("q", "v"))
