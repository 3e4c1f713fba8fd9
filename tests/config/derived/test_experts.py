"""Settings of experts: what is refused, and values that mend it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config.problems import SPARSE, problems_of, write
from tests.config.suggestions import taken

MESH_4 = ["mesh.dp_shard=4", "mesh.ep=4"]


@pytest.fixture
def sparse(tmp_path: Path) -> Path:
    return write(tmp_path, SPARSE)


@pytest.mark.parametrize(
    ("sets", "rule", "says", "works"),
    [
        (
            ["mesh.dp_shard=6", "mesh.ep=6"],
            "ep-divides-experts",
            "(8 % 6 = 2)",
            ("mesh.ep = 2", "model.experts.num_experts = 6"),
        ),
        (
            ["mesh.dp_replicate=4", "mesh.ep=4"],
            "ep-divides-ranks",
            "mesh.dp_shard x mesh.cp x mesh.tp = 1 x 1 x 1 = 1, the ranks that share out experts "
            "(1 % 4 = 1); mesh.dp_replicate = 4 holds copies and is no part of it",
            ("mesh.dp_shard = 4 with mesh.dp_replicate = 1", "mesh.ep = 1"),
        ),
        (
            ["mesh.tp=2", "mesh.ep=4"],
            "ep-divides-ranks",
            "1 x 1 x 2 = 2",
            ("mesh.dp_shard = 2", "mesh.ep = 2", "mesh.ep = 1"),
        ),
        (
            ["mesh.tp=2", "mesh.ep=2", "experts.expert_tp=2"],
            "ep-divides-ranks",
            "experts.expert_tp = 2 cuts each expert over mesh.tp, no part of it",
            ("mesh.dp_shard = 2", "experts.expert_tp = 1", "mesh.ep = 1"),
        ),
        (
            ["mesh.tp=6", "experts.expert_tp=3"],
            "expert-tp-is-one-or-tp",
            "experts.expert_tp = 3, but mesh.tp = 6",
            ("experts.expert_tp = 1", "experts.expert_tp = 6", "mesh.tp = 3"),
        ),
        (
            ["mesh.tp=2", "experts.expert_tp=2", "model.experts.ffn=25"],
            "expert-tp-divides-ffn",
            "(25 % 2 = 1)",
            ("experts.expert_tp = 1", "model.experts.ffn = 24", "model.experts.ffn = 26"),
        ),
        (
            ["mesh.tp=2", "batch.sequence_length=25"],
            "tp-divides-tokens",
            "1 x 25 / 1 = 25 tokens (25 % 2 = 1)",
            ("batch.microbatch_sequences = 2", "batch.sequence_length = 24", "mesh.tp = 1"),
        ),
        (
            ["mesh.tp=2", "model.experts.ffn=25", "model.experts.shared_experts=3"],
            "tp-divides-ffn",
            "shared_experts x experts.ffn = 75 (75 % 2 = 1)",
            ("1", "3"),
        ),
        (
            ["experts.padded=true"],
            "padded-needs-capacity",
            'experts.capacity_factor = "dropless"',
            ("experts.capacity_factor = 1.25", "experts.padded = false"),
        ),
        (
            [*MESH_4, "experts.dispatch=two-hop"],
            "two-hop-needs-nodes",
            "the 4 ranks from 0 to 3 that share out experts are on one node of 8 devices",
            ('experts.dispatch = "flat"',),
        ),
        (
            ["experts.dispatch=two-hop"],
            "two-hop-needs-nodes",
            "mesh.ep = 1 sends nothing",
            ('experts.dispatch = "flat"',),
        ),
        (
            [*MESH_4, "experts.chunks=5"],
            "chunks-divide-tokens",
            "a rank sends the 24 tokens of a microbatch to experts (24 % 5 = 4)",
            ("experts.chunks = 4", "experts.chunks = 6"),
        ),
        (
            ["mesh.dp_shard=2", "mesh.tp=2", "mesh.ep=4", "experts.chunks=8"],
            "chunks-divide-tokens",
            "24 tokens of a microbatch / tp = 24 / 2 = 12 to experts (12 % 8 = 4)",
            ("experts.chunks = 6",),
        ),
        (
            ["experts.capacity_factor=0.1"],
            "capacity-holds-tokens",
            "0.1 x 24 x 2 / 8 = 0.6 tokens",
            (
                "experts.capacity_factor = 0.17",
                "experts.capacity_factor = 1.0",
                'experts.capacity_factor = "dropless"',
            ),
        ),
        (
            ["experts.balance=both", "model.experts.router_bias=false"],
            "bias-balance-has-bias",
            'experts.balance = "both" moves a bias',
            ("model.experts.router_bias = true", 'experts.balance = "aux"'),
        ),
        (
            ["model.experts.groups=3"],
            "groups-divide-experts",
            "(8 % 3 = 2)",
            ("model.experts.groups = 2", "model.experts.groups = 4"),
        ),
        (
            ["model.experts.groups=8"],
            "groups-divide-experts",
            "(8 / 8 = 1 in each, and a group needs two)",
            ("model.experts.groups = 4",),
        ),
        (
            ["model.experts.groups=2", "model.experts.top_groups=3"],
            "top-groups-hold-top-k",
            "top_groups = 3 is more than groups = 2",
            ("model.experts.top_groups = 2", "model.experts.groups = 4"),
        ),
        (
            ["model.experts.groups=4", "model.experts.top_k=3"],
            "top-groups-hold-top-k",
            "1 of 4 groups hold 1 x 8 / 4 = 2 experts",
            ("model.experts.top_groups = 2", "model.experts.groups = 2"),
        ),
        (
            ["model.experts.top_k=1"],
            "renormalised-gates-differ",
            "the weight of the only expert of a token is 1 whatever its score",
            ("model.experts.renormalise = false", "model.experts.top_k = 2"),
        ),
        (
            ["model.gated=false"],
            "experts-are-gated",
            "those have a gate",
            ('model.gated = true with model.activation = "silu"',),
        ),
        (
            ["model.mlp_bias=true"],
            "experts-have-no-bias",
            "whose biases are model.experts.bias",
            ("model.mlp_bias = false",),
        ),
    ],
)
def test_a_fault_of_experts_names_values_that_work(
    sparse: Path, sets: list[str], rule: str, says: str, works: tuple[str, ...]
) -> None:
    found = problems_of(sparse, sets)
    assert list(found) == [rule]
    assert says in found[rule].message
    assert set(works) <= set(found[rule].suggestions)
    assert found[rule].set_by.startswith("--set ") or found[rule].set_by.startswith("run.toml")
    for advice in found[rule].suggestions:
        full = advice if "." in advice.partition(" ")[0] else f"mesh.tp = {advice}"
        assert problems_of(sparse, taken(full, sets)) == {}, advice


@pytest.mark.parametrize(
    "sets",
    [
        ["mesh.dp_shard=4", "mesh.ep=4"],
        ["mesh.dp_shard=4", "mesh.ep=2"],
        ["mesh.tp=2", "mesh.ep=2"],
        ["mesh.cp=2", "mesh.ep=2"],
        ["mesh.pp=2", "mesh.dp_shard=2", "mesh.ep=2", "pipeline.schedule=dualpipe-v"],
        ["mesh.tp=2", "experts.expert_tp=2", "mesh.dp_shard=2", "mesh.ep=2"],
        ["mesh.tp=2", "experts.zero_stage=3"],
        ["mesh.tp=2", "model.experts.ffn=25", "model.ffn=97"],
        ["mesh.tp=2", "experts.chunks=4", "mesh.ep=2"],
        ["experts.capacity_factor=1", "experts.drop=score", "experts.padded=true"],
        ["experts.capacity_factor=4", "experts.padded=true"],
        ["experts.capacity_factor=3.8", "experts.drop=score"],
        ["experts.balance=aux", "experts.aux_over=sequence", "experts.capacity_factor=1.5"],
        ["mesh.dp_shard=2", "mesh.ep=2", "zero.stage=3", "experts.zero_stage=0"],
    ],
)
def test_what_suits_experts_is_accepted(sparse: Path, sets: list[str]) -> None:
    assert problems_of(sparse, sets) == {}
