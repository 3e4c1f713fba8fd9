"""`echelon explain choose` and `lints`: guides walked with the reader's numbers, plans linted."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from echelon.cli.explain.choose import ask_choose, choose_json, choose_text
from echelon.cli.main import main
from echelon.handbook.guides.trees import TREES
from echelon.planner.lint.checks import LINTS


def page(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return what the command prints."""
    assert main(["explain", *words]) == 0
    output = capsys.readouterr()
    assert output.err == ""
    return output.out


def test_json_holds_every_step(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(page(capsys, "choose", "gpt2", "--set", "cluster.preset=8xh100", "--json"))[
        "choose"
    ]
    trees = [one for one in found["guides"] if one["steps"]]
    assert [one["id"] for one in trees] == [tree.id for tree in TREES]
    assert trees[0]["steps"][0]["yes"] is True
    assert trees[0]["fits"] is True
    assert all(one["step_s"] > 0 for one in trees)
    assert found["planner"]["step_s"] <= min(one["step_s"] for one in trees) * 1.01
    assert found["num_devices"] == 8
    assert {"one": "llm-training", "other": "cheapest", "where": ["ZeRO 3 against 0"]} in found[
        "conflicts"
    ]


def test_the_planners_answer_is_compared_where_there_is_one() -> None:
    question = ask_choose("gpt2", ("cluster.preset=8xh100",))
    assert [name for name, _ in question.compared] == ["the planner"]
    assert question.best is not None
    assert question.best.mesh.world_size == 8
    text = " ".join(choose_text(question).split())
    assert "parameters in bf16, the rest in fp32" in text
    assert re.search(r"Beside the planner \(dp 8, ZeRO \d, \d+ ms a step\)", choose_text(question))
    own = ask_choose("gpt2", ("cluster.preset=8xh100", "mesh.dp_replicate=8"))
    with_own = replace(own, best=own.plan)
    rows = [row for row in choose_json(with_own)["compared"] if row["with"] == "the planner"]
    differs = {row["guide"]: row["differs"] for row in rows}
    assert differs["cheapest"] == []
    assert differs["llm-training"] == ["ZeRO 0, not 3"]


def test_a_page_without_a_run_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "choose"]) == 2
    assert "name a run" in capsys.readouterr().err
    assert main(["explain", "lints", "--cluster", "8xh100"]) == 2
    assert "--cluster has an effect on `echelon explain choose` only" in capsys.readouterr().err


def test_a_model_is_named_as_a_search_takes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "vocab_size": 1000,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    text = page(capsys, "choose", str(tmp_path / "config.json"), "--cluster", "8xh100")
    assert "on 8 x H100 SXM 80 GB" in text.replace("\n", " ")
    split = ("--set", "mesh.tp=2", "--set", "mesh.dp_replicate=4")
    text = page(capsys, "choose", str(tmp_path), "--cluster", "8xh100", *split)
    assert "Beside this run (dp 4 x tp 2, ZeRO 0)" in text
    text = page(capsys, "choose", "gpt2-large", "--cluster", "8xh100")
    assert "Taken where nothing is said" in text.replace("\n", " ")


def test_lints_are_listed_and_found_in_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    text = page(capsys, "lints")
    assert all(f"{each.id} ({each.severity}): " in text for each in LINTS)
    run = ("llama2-7b", "--set", "cluster.preset=8xh100", "--set", "mesh.dp_shard=8")
    text = page(capsys, "lints", *run, "--set", "zero.stage=3")
    assert "  zero-3-many-microbatches: 128 microbatches a step at stage 3" in text
    assert max(map(len, text.splitlines())) <= 120
    found = json.loads(page(capsys, "lints", *run, "--set", "zero.stage=3", "--json"))["lints"]
    assert "zero-3-many-microbatches" in [finding["id"] for finding in found["findings"]]
    assert main(["explain", "lints", "--set", "mesh.tp=2"]) == 2
    assert "where a run is named" in capsys.readouterr().err


def test_a_lint_has_a_page_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    text = page(capsys, "tp-across-nodes")
    assert text.startswith("tp-across-nodes\n\nTensor ranks send activations")
    assert "Narayanan et al., 2021" in text
    found = json.loads(page(capsys, "tp-across-nodes", "--json"))
    assert found["lint"]["severity"] == "time"
    assert main(["explain", "tp-acros-nodes"]) == 2
    assert "tp-across-nodes" in capsys.readouterr().err
