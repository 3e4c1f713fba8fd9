"""Lines of an answer that have a number: devices, active parameters, and why state is on hosts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from echelon.cli.main import main
from echelon.core.units import binary_bytes
from echelon.planner.answer.recommend_text import answer_facts, reasons
from echelon.planner.recommend.recommend import Recommendation, WithoutHost, recommend
from tests.planner.requests import small

MIXTURE = {
    "model_type": "mixtral",
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 512,
    "vocab_size": 1000,
    "max_position_embeddings": 2048,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}


@pytest.fixture(scope="module")
def found() -> Recommendation:
    answer = recommend(small())
    assert isinstance(answer, Recommendation)
    return answer


def test_the_fewest_devices_are_a_number() -> None:
    fewest = recommend(small(objective="devices"))
    assert isinstance(fewest, Recommendation)
    count = fewest.first.ranked.candidate.devices
    assert 1 <= count <= 8
    assert dict(answer_facts(fewest))["devices"] == f"{count} of 8, the fewest with a plan"


def test_state_on_hosts_says_how_much_slower_a_step_is_without(found: Recommendation) -> None:
    slower = replace(found, without_host=WithoutHost(time_ratio=1.25))
    assert "without it a step takes 1.25 times as long" in " ".join(reasons(slower))


def test_state_on_hosts_says_what_does_not_fit_without(found: Recommendation) -> None:
    first = found.first.ranked
    held = first.estimate.bytes_held
    none = " ".join(reasons(replace(found, without_host=WithoutHost())))
    assert "without it no plan is legal" in none
    # On devices of less memory than the leanest plan holds, nothing fits.
    leanest = WithoutHost(leanest=first)
    request = found.answer.request.with_memory(held / 2)
    short = replace(found, without_host=leanest, answer=replace(found.answer, request=request))
    said = " ".join(reasons(short))
    assert "without it nothing fits" in said
    assert binary_bytes(held) in said
    assert binary_bytes(held / 2) in said
    # On devices of just its bytes it may fit, and the probability is printed.
    request = found.answer.request.with_memory(held + 1)
    unsure = replace(found, without_host=leanest, answer=replace(found.answer, request=request))
    assert " % only" in " ".join(reasons(unsure))


def test_the_page_of_a_config_json_has_active_parameters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(MIXTURE))
    command = ["plan", str(config), "--cluster", "2xh100", "--pin", "pp=1", "--json"]
    command += ["--set", "batch.global_sequences=8", "--set", "batch.sequence_length=512"]
    assert main(command) == 0
    told = json.loads(capsys.readouterr().out)["search"]
    active, every = told["num_active_parameters"], told["num_parameters"]
    assert active < every
    assert main(command[:-5]) == 0
    assert f"{active / 1e6:.2f}M active" in capsys.readouterr().out
