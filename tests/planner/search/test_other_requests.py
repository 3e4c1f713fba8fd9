"""A request with other settings is the one of the command line that has them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from echelon.core.errors import ConfigError
from echelon.planner.search.other_requests import request_with_settings
from echelon.planner.search.request import make_request
from tests.planner.requests import LLAMA_CONFIG


def test_other_settings_of_a_run_are_those_of_the_command_line() -> None:
    request = make_request("llama3-8b", cluster="8xh100")
    low = {"precision.parameters": "bf16", "precision.gradients": "bf16"}
    sets = [f"{key}={value}" for key, value in low.items()]
    typed = make_request("llama3-8b", cluster="8xh100", settings=sets)
    changed = request_with_settings(request, low)
    assert (changed.mathematics, changed.software) == (typed.mathematics, typed.software)
    with pytest.raises(ConfigError, match="gradients-hold-parameters"):
        request_with_settings(request, {**low, "precision.parameters": "fp32"})


def test_a_batch_that_nobody_asked_for_follows_the_length_of_sequences(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_CONFIG))
    request = make_request(tmp_path, cluster="8xh100")
    shorter = request_with_settings(request, {"batch.sequence_length": 512})
    sets = ["batch.sequence_length=512"]
    typed = make_request(tmp_path, cluster="8xh100", settings=sets)
    assert shorter.mathematics == typed.mathematics
    assert shorter.mathematics.global_sequences == 4 * request.mathematics.global_sequences
    asked = make_request(tmp_path, cluster="8xh100", settings=["batch.global_sequences=7"])
    shorter = request_with_settings(asked, {"batch.sequence_length": 512})
    assert shorter.mathematics.global_sequences == 7
