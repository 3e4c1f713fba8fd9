"""A DeepSpeed JSON: every key is a setting, or without need, or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from echelon.config.foreign.deepspeed_keys import (
    NOT_NEEDED,
    NOT_NEEDED_TABLES,
    OFF_TABLES,
    ONLY,
    REFUSED_TABLES,
)
from tests.config.foreign.imports import Imports, rows_of, set_by, zero

# Two that a reader finds in a tutorial on parallel training, as they stand there.
SHORT = {
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "cpu"},
        "overlap_comm": True,
        "contiguous_gradients": True,
    }
}
LONG = {
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
    },
    "fp16": {"enabled": True, "loss_scale_window": 100},
}


@pytest.fixture
def deepspeed(tmp_path: Path) -> Imports:
    return Imports(tmp_path, "deepspeed")


def nested(key: str, value: object) -> dict[str, Any]:
    """Return the object in which a dotted key has a value."""
    for name in reversed(key.split(".")):
        value = {name: value}
    assert isinstance(value, dict)
    return value


def test_the_short_configuration_of_the_tutorial(deepspeed: Imports) -> None:
    found = deepspeed(SHORT, ranks=4)
    layout = found.job.plan.layout
    assert layout.zero.stage == 3
    assert (layout.zero.optimizer_offload, layout.zero.parameter_offload) == ("host", "host")
    assert layout.mesh.dp_shard == 4
    for name in ("overlap_comm", "contiguous_gradients"):
        (row,) = rows_of(found, f"zero_optimization.{name}")
        assert row.setting == ""
    (row,) = rows_of(found, "zero_optimization.contiguous_gradients")
    assert "always so" in row.why


def test_the_long_configuration_of_the_tutorial(deepspeed: Imports) -> None:
    found = deepspeed(LONG, extends="llama3-8b", ranks=8)
    plan = found.job.plan
    hidden, precision = plan.model.hidden, plan.mathematics.precision
    assert plan.layout.zero.keep_whole_below == 10 * hidden + 1
    assert plan.layout.zero.prefetch == 1
    assert (precision.parameters, precision.reduction, precision.master) == ("fp16", "fp16", "fp32")
    assert (precision.loss_scaling, precision.loss_scale) == ("dynamic", 2.0**16)
    assert (precision.loss_scale_window, precision.loss_scale_hysteresis) == (100, 2)
    assert set_by(found, "zero_optimization.reduce_bucket_size") == {}
    given = {*_keys(LONG)}
    assert given == {row.key for row in found.rows if row.given != "(not set)"}


def _keys(config: dict[str, Any], prefix: str = "") -> set[str]:
    found: set[str] = set()
    for name, value in config.items():
        key = f"{prefix}{name}"
        found |= _keys(value, f"{key}.") if isinstance(value, dict) else {key}
    return found


def test_auto_is_resolved_as_the_integration_of_hugging_face_does(deepspeed: Imports) -> None:
    hidden = 4096
    found = deepspeed(zero(2, reduce_bucket_size="auto"), extends="llama3-8b", ranks=8)
    assert found.job.plan.layout.zero.bucket_bytes == hidden**2 * 4
    key = "zero_optimization.stage3_prefetch_bucket_size"
    found = deepspeed(LONG, extends="llama3-8b", ranks=8)
    assert str(int(0.9 * hidden**2)) in rows_of(found, key)[0].why


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (zero(2) | {"zero_optimization": {"stage": "auto"}}, "zero_optimization.stage"),
        (
            zero(3, stage3_max_live_parameters="auto"),
            "zero_optimization.stage3_max_live_parameters",
        ),
        (
            zero(2, offload_optimizer={"device": "auto"}),
            "zero_optimization.offload_optimizer.device",
        ),
        ({"fp16": {"enabled": True, "initial_scale_power": "auto"}}, "fp16.initial_scale_power"),
        ({"communication_data_type": "auto"}, "communication_data_type"),
        ({"steps_per_print": "auto"}, "steps_per_print"),
    ],
)
def test_auto_is_refused_where_nothing_resolves_it(
    deepspeed: Imports, config: dict[str, Any], key: str
) -> None:
    assert deepspeed.refused(config, ranks=2) == [("import-auto", key)]


@pytest.mark.parametrize("key", NOT_NEEDED)
def test_a_key_without_need_is_said_so_with_the_reason(deepspeed: Imports, key: str) -> None:
    kind, why = NOT_NEEDED[key]
    values = [v for v in (True, 8, "text") if kind.misfit(v) is None]
    found = deepspeed(nested(key, values[0]), ranks=2)
    (row,) = rows_of(found, key)
    assert (row.setting, row.why) == ("", why)
    wrong = next(v for v in ([], "flase", 1.5) if kind.misfit(v) is not None)
    assert [place for _, place in deepspeed.refused(nested(key, wrong), ranks=2)] == [key]


@pytest.mark.parametrize("key", ONLY)
def test_a_key_is_honoured_with_these_values_and_refused_with_others(
    deepspeed: Imports, key: str
) -> None:
    allowed, why = ONLY[key]
    for value in allowed:
        (row,) = rows_of(deepspeed(nested(key, value), ranks=2), key)
        assert (row.setting, row.why) == ("", why)
    (problem,) = deepspeed.problems(nested(key, "other"), ranks=2)
    assert (problem.rule, problem.set_by.endswith(f": {key}")) == ("import-not-honoured", True)
    assert why in problem.message
    assert f"no {key}" in problem.works


@pytest.mark.parametrize("table", OFF_TABLES)
def test_a_feature_that_is_not_here_is_accepted_only_when_off(
    deepspeed: Imports, table: str
) -> None:
    switch, why = OFF_TABLES[table]
    found = deepspeed(nested(table, {switch: False, "other": 3}), ranks=2)
    assert {row.key for row in found.rows} >= {f"{table}.{switch}", f"{table}.other"}
    (problem,) = deepspeed.problems(nested(table, {switch: True, "other": 3}), ranks=2)
    assert problem.rule == "import-not-honoured"
    assert why in problem.message


@pytest.mark.parametrize("table", REFUSED_TABLES)
def test_a_feature_that_is_not_here_is_refused_when_its_table_says_anything(
    deepspeed: Imports, table: str
) -> None:
    assert deepspeed.problems(nested(table, {}), ranks=2) == []
    (problem,) = deepspeed.problems(nested(table, {"key": {"inner": 1}}), ranks=2)
    assert problem.rule == "import-not-honoured"
    assert REFUSED_TABLES[table] in problem.message


@pytest.mark.parametrize("table", NOT_NEEDED_TABLES)
def test_a_table_without_need_is_said_so_key_by_key(deepspeed: Imports, table: str) -> None:
    found = deepspeed(nested(table, {"enabled": True, "inner": {"key": 1}}), ranks=2)
    for key in ("enabled", "inner.key"):
        assert rows_of(found, f"{table}.{key}")[0].why == NOT_NEEDED_TABLES[table]


def test_all_problems_come_at_once(deepspeed: Imports) -> None:
    config = {
        "train_batch_size": -1,
        "gradient_cliping": 1.0,
        "fp16": {"enabled": "yes"},
        "zero_optimization": {
            "stage": 7,
            "stage3_prefetch_buket_size": 5e8,
            "zero_quantized_weights": True,
        },
        "optimizer": {"type": "Lamb", "params": {"lr": "high"}},
        "tensorboard": {"enabled": True},
    }
    problems = deepspeed.problems(config, ranks=2, extends="nano")
    assert {(p.rule, p.set_by.rpartition(": ")[2]) for p in problems} == {
        ("out-of-range", "train_batch_size"),
        ("import-unknown-key", "gradient_cliping"),
        ("wrong-type", "fp16.enabled"),
        ("out-of-range", "zero_optimization.stage"),
        ("import-unknown-key", "zero_optimization.stage3_prefetch_buket_size"),
        ("import-not-honoured", "zero_optimization.zero_quantized_weights"),
        ("import-not-honoured", "optimizer.type"),
        ("wrong-type", "optimizer.params.lr"),
        ("import-not-honoured", "tensorboard.enabled"),
    }
    nearest = {p.set_by.rpartition(": ")[2]: p.works[:1] for p in problems}
    assert nearest["gradient_cliping"] == ("gradient_clipping",)
    assert nearest["zero_optimization.stage3_prefetch_buket_size"] == (
        "zero_optimization.stage3_prefetch_bucket_size",
    )
