"""Settings of latent attention: what is derived, what is refused, and values that mend it."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.config.load import load_job
from tests.config.problems import SMALL, problems_of, write
from tests.config.suggestions import taken

LATENT = """
[model.latent]
query_rank = 24
kv_rank = 16
nope_dim = 8
rope_dim = 4
value_dim = 8
"""


@pytest.fixture
def latent(tmp_path: Path) -> Path:
    return write(tmp_path, SMALL.replace("kv_heads = 6\n", "") + LATENT)


def test_the_width_of_a_head_follows_from_its_parts(latent: Path) -> None:
    job = load_job(latent)
    assert job.plan.model.head_dim == 12
    assert job.source_of("model.head_dim") == "derived: latent.nope_dim + rope_dim"
    assert job.plan.model.kv_heads == job.plan.model.heads
    assert problems_of(latent, ["model.hidden=50"]) == {}


@pytest.mark.parametrize(
    ("sets", "rule", "works"),
    [
        (["model.kv_heads=6"], "latent-heads-have-keys", ("model.kv_heads = 12",)),
        (
            ["model.head_dim=16"],
            "latent-head-has-two-parts",
            ("model.head_dim = 12", "model.latent.nope_dim = 12"),
        ),
        (
            ["model.latent.value_dim=14"],
            "latent-value-fits-key",
            ("model.latent.value_dim = 12",),
        ),
        (
            ["model.positions=learned"],
            "latent-positions-are-rotary",
            ('model.positions = "rope"',),
        ),
        (["model.qkv_bias=true"], "latent-attention-is-plain", ("model.qkv_bias = false",)),
        (["model.output_bias=true"], "latent-attention-is-plain", ("model.output_bias = false",)),
        (["model.qk_norm=true"], "latent-attention-is-plain", ("model.qk_norm = false",)),
    ],
)
def test_a_fault_of_latent_attention_names_values_that_work(
    latent: Path, sets: list[str], rule: str, works: tuple[str, ...]
) -> None:
    found = problems_of(latent, sets)
    assert list(found) == [rule]
    assert found[rule].suggestions == works
    for advice in works:
        assert problems_of(latent, taken(advice, sets)) == {}


def test_tensor_ranks_divide_latent_heads_as_any(latent: Path) -> None:
    assert problems_of(latent, ["mesh.tp=4"]) == {}
    assert "tp-divides-heads" in problems_of(latent, ["mesh.tp=5"])


def test_rotary_dims_of_a_latent_head_come_in_pairs(latent: Path) -> None:
    assert list(problems_of(latent, ["model.latent.rope_dim=5"])) == ["rope-needs-even-head"]
