"""What controls say by themselves are defaults of settings, and their names are real ones."""

from __future__ import annotations

from typing import Any, get_args

from echelon.config.schema import SETTINGS
from echelon.core.plan import Precision, RecomputedOperator
from echelon.page.explorer.controls import (
    INT8_BLOCK,
    OPERATORS,
    PLAIN,
    PRECISION_SETTINGS,
    PRECISIONS,
    Controls,
)

KEYS = {
    **{name: f"mesh.{name}" for name in ("ep", "sequence_parallel", "tp_overlap")},
    **{name: f"zero.{name}" for name in ("secondary", "gather", "reduce")},
    **{name: f"zero.{name}" for name in ("optimizer_offload", "parameter_offload")},
    **{name: f"recompute.{name}" for name in ("every", "operators")},
    **{name: f"experts.{name}" for name in ("expert_tp", "dispatch", "chunks")},
    "servers": "servers.count",
    "virtual": "pipeline.virtual_stages",
    "optimizer": "optimizer.kind",
    "context": "context.kind",
}


def test_what_controls_say_by_themselves_are_defaults_of_settings() -> None:
    assert set(PLAIN) <= set(Controls.__slots__)
    # These two are "auto" by themselves, which the page has not.
    assert set(PLAIN) - set(KEYS) == {"reshard", "ulysses"}
    assert {name: SETTINGS[key].default for name, key in KEYS.items()} == {
        name: PLAIN[name] for name in KEYS
    }
    assert SETTINGS["zero.int8_block"].default == INT8_BLOCK


def test_settings_of_a_precision_make_it() -> None:
    for name, precision in PRECISIONS.items():
        said: dict[str, Any] = {**PRECISION_SETTINGS[name]}
        # The format of gradients in 8 bits is chosen by what shares a scale.
        wanted = {key: value for key, value in said.items() if key != "fp8_gradients"}
        made = Precision(**wanted, fp8_gradients=precision.fp8_gradients)
        assert made == precision


def test_operators_are_those_of_a_plan() -> None:
    known = set(get_args(RecomputedOperator))
    assert all(set(operators) <= known for operators in OPERATORS.values())
    assert known == {one for operators in OPERATORS.values() for one in operators}
