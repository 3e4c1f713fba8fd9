"""`echelon plan` shows where experts are, how tokens travel, and what evens the load."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from echelon.cli.main import main
from echelon.config.load import load_job
from echelon.core.parameters import parameters, parameters_text
from echelon.core.plan import Plan
from echelon.planner.report.head import expert_facts, experts_json, fact_lines
from echelon.planner.report.report import plan_text
from echelon.planner.report.sent import groups

MODEL = ("model.experts.num_experts=8", "model.experts.top_k=2", "model.experts.ffn=96")


def expert_lines(plan: Plan) -> list[str]:
    return [*fact_lines(expert_facts(plan))]


def sparse(*settings: str) -> Plan:
    return load_job("nano", (*MODEL, *settings)).plan


def test_a_dense_plan_says_nothing_of_experts() -> None:
    plan = load_job("nano").plan
    assert list(expert_lines(plan)) == []
    assert experts_json(plan) is None
    assert "active" not in parameters_text(plan.model)


def test_the_head_says_where_experts_are() -> None:
    lines = list(
        expert_lines(sparse("mesh.dp_shard=4", "mesh.ep=2", "zero.stage=2", "experts.zero_stage=1"))
    )
    assert lines[0] == "experts  8 to a block, a token meets 2"
    assert lines[1].strip() == (
        "ep 2: 4 on a rank, whole, the same on 2 ranks; ZeRO stage 1, slices of 1/2"
    )
    alone = list(expert_lines(sparse("mesh.dp_shard=4", "mesh.ep=4", "zero.stage=1")))
    assert alone[1].strip() == (
        "ep 4: 2 on a rank, whole, and on no other; ZeRO stage 1 has nothing of them to share out"
    )
    assert lines[2].strip() == "tokens travel straight to the ranks of their experts"
    assert lines[3] == "balance  nothing evens the load; dropless"


def test_the_head_says_what_evens_the_load() -> None:
    balance = ("experts.balance=both", "experts.z_coefficient=0.001")
    room = ("experts.capacity_factor=1.25", "experts.drop=score", "experts.route=even")
    last = list(expert_lines(sparse(*balance, *room)))[-1]
    assert last == (
        "balance  auxiliary loss x 0.01 over the global batch; bias moves by 0.001 a step; z-loss "
        "x 0.001; room for 40 tokens of a sequence, lower scores are dropped; tokens go where "
        'route = "even" says, not where scores do'
    )


def test_the_head_tells_pieces_chunks_groups_and_shared_experts() -> None:
    text = "\n".join(
        expert_lines(
            sparse(
                "mesh.tp=2",
                "mesh.dp_shard=2",
                "mesh.ep=2",
                "experts.expert_tp=2",
                "experts.chunks=2",
                "experts.capacity_factor=1",
                "experts.padded=true",
                "model.experts.groups=4",
                "model.experts.top_groups=2",
                "model.experts.shared_experts=1",
            )
        )
    )
    assert "a token meets 2 out of the best 2 of 4 groups, and 1 shared" in text
    assert "ep 2: 4 on a rank, each in 2 pieces, and on no other" in text
    assert "in 2 chunks, padded" in text


def test_json_and_groups_tell_who_exchanges_tokens_and_who_holds_the_same(
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = (*MODEL, "mesh.dp_shard=4", "mesh.ep=2", "zero.stage=1")
    flags = [word for setting in settings for word in ("--set", setting)]
    assert main(["plan", "nano", "--json", *flags]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["groups"]["ep"] == [[0, 1], [2, 3]]
    assert result["groups"]["edp"] == [[0, 2], [1, 3]]
    assert result["groups"]["edp_shard"] == [[0, 2], [1, 3]]
    experts = result["experts"]
    assert experts["experts_per_rank"] == 4
    assert experts["zero_stage"] == 1
    assert experts["ranks_with_the_same_experts"] == 2
    assert experts["num_active_parameters"] < result["num_parameters"]
    assert experts["capacity"] is None


def test_two_hops_have_groups_within_and_across_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    settings = (
        "model.experts.num_experts=16",
        *MODEL[1:],
        "cluster.preset=16xh100",
        "batch.global_sequences=32",
        "mesh.dp_shard=16",
        "mesh.ep=16",
        "experts.dispatch=two-hop",
    )
    found = groups(load_job("nano", settings).plan)
    assert found["ep_within"] == (tuple(range(8)), tuple(range(8, 16)))
    assert found["ep_across"] == tuple((rank, rank + 8) for rank in range(8))
    assert main(["plan", "nano", *(word for s in settings for word in ("--set", s))]) == 0
    text = capsys.readouterr().out
    assert "Of experts: m rows that a rank dispatches" in text
    assert "ep_across  [0 8]" in text
    assert main(["plan", "nano", "--set", "mesh.tp=2"]) == 0
    assert "Of experts" not in capsys.readouterr().out


def test_two_hops_can_be_tried_on_two_nodes_of_one_machine() -> None:
    examples = Path(__file__).parents[3] / "examples"
    settings = (
        f"cluster.file={examples / 'two-nodes.toml'}",
        "mesh.dp_shard=4",
        "mesh.ep=4",
        "batch.microbatch_sequences=4",
        "experts.dispatch=two-hop",
    )
    plan = load_job(examples / "experts.toml", settings).plan
    assert (plan.cluster.nodes, plan.cluster.backend) == (2, "gloo")
    found = groups(plan)
    assert found["ep_within"] == ((0, 1), (2, 3))
    assert found["ep_across"] == ((0, 2), (1, 3))


def test_rows_of_another_route_than_that_of_scores_are_said_to_be_balanced() -> None:
    ranks = ("mesh.dp_shard=2", "mesh.ep=2")
    said = 'Rows of experts are for balanced routing; experts.route = "one" sends otherwise.'
    assert said in plan_text(sparse(*ranks, "experts.route=one")).splitlines()
    assert "experts.route" not in plan_text(sparse(*ranks))


@pytest.mark.slow
def test_the_parameters_of_a_large_model_are_listed_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With 256 experts in each of 58 blocks there are 45,337 of them."""
    parameters.cache_clear()
    pins = [word for pin in ("pp=16", "tp=1", "cp=1", "ep=16") for word in ("--pin", pin)]
    assert main(["plan", "deepseek-v3", "--cluster", "256xh100", *pins]) == 0
    assert "deepseek-v3, 671" in capsys.readouterr().out
    found = parameters.cache_info()
    assert (found.misses, found.currsize) == (1, 1)
    assert found.hits > 1


def test_groups_of_one_rank_are_not_shown() -> None:
    found = groups(sparse("mesh.dp_shard=4", "mesh.ep=4"))
    assert found["ep"] == ((0, 1, 2, 3),)
    assert "edp" not in found
    assert "ep" not in groups(sparse("mesh.dp_replicate=4"))
