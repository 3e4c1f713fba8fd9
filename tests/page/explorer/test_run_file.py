"""The run file says what was chosen, and nothing that is as it is by itself."""

from __future__ import annotations

import tomllib
from dataclasses import replace

from echelon.page.explorer.controls import run_text
from echelon.page.explorer.document import start_controls
from tests.page.explorer.random_controls import Settings, tables


def start() -> Settings:
    model = next(one for one in tables()["models"] if one["name"] == "llama3-8b")
    cluster = tables()["clusters"][1]
    return start_controls(tables(), model, cluster), model, cluster


def test_what_is_as_it_is_by_itself_is_not_said() -> None:
    controls, model, cluster = start()
    said = tomllib.loads(run_text(controls, model, cluster))
    assert set(said) == {
        *("model", "cluster", "mesh", "zero", "pipeline", "batch", "precision", "recompute"),
    }
    assert said["precision"] == {"parameters": "bf16"}
    assert said["zero"] == {"stage": 3, "reshard_after_forward": "always"}
    assert said["recompute"] == {"policy": "none"}


def test_words_that_stand_for_several_settings_are_these_settings() -> None:
    controls, model, cluster = start()
    single = tomllib.loads(run_text(replace(controls, precision="fp32"), model, cluster))
    # Left out, the dtype would be the device's.
    assert single["precision"] == {"parameters": "fp32"}
    controls = replace(controls, precision="fp8 tensor", recompute="full", every=2)
    controls = replace(controls, operators="norm mlp", context="ulysses-ring", cp=4, ulysses=1)
    said = tomllib.loads(run_text(controls, model, cluster))
    assert said["precision"] == {"parameters": "bf16", "matmul": "fp8", "fp8_scales": "tensor"}
    assert said["recompute"] == {"policy": "full", "every": 2, "operators": ["norm", "mlp"]}
    # Left out, a degree would be chosen.
    assert said["context"] == {"kind": "ulysses-ring", "ulysses_degree": 1}
