"""A DeepSpeed JSON: every key is a setting, or without need, or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from echelon.interop.abilities import KeyRule
from echelon.interop.deepspeed.abilities import TABLES
from echelon.interop.formats import nest_keys
from echelon.interop.key_reader import KINDS
from tests.interop.imports import Imports, rows_of, set_by, zero

REST = TABLES.keys["rest"]
OFF_TABLES = {table: rule for table, rule in TABLES.keys["tables"].items() if rule.switch}
PLAIN_TABLES = [
    table for table, rule in TABLES.keys["tables"].items() if rule == KeyRule(why=rule.why)
]
REFUSED_TABLES = {table: rule for table, rule in TABLES.keys["tables"].items() if rule.refused}

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


@pytest.mark.system("S28")
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


@pytest.mark.system("S28")
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


def test_a_key_without_need_is_said_so_with_the_reason(deepspeed: Imports) -> None:
    kinds = {key: KINDS[rule.takes] for key, rule in REST.items() if rule.takes}
    values = {
        key: next(v for v in (True, 8, "text") if kind.check(v) is None)
        for key, kind in kinds.items()
    }
    found = deepspeed(nest_keys(values), ranks=2)
    for key in kinds:
        (row,) = rows_of(found, key)
        assert (row.setting, row.why) == ("", REST[key].why)
    wrong = {
        key: next(v for v in ([], "flase", 1.5) if kind.check(v) is not None)
        for key, kind in kinds.items()
    }
    assert [key for _, key in deepspeed.refused(nest_keys(wrong), ranks=2)] == [*kinds]


def test_a_key_is_honoured_with_these_values_and_refused_with_others(deepspeed: Imports) -> None:
    allowed = {key: rule.only for key, rule in REST.items() if rule.only is not None}
    for place in range(max(map(len, allowed.values()))):
        values = {key: only[place] for key, only in allowed.items() if place < len(only)}
        found = deepspeed(nest_keys(values), ranks=2)
        for key in values:
            (row,) = rows_of(found, key)
            assert (row.setting, row.why) == ("", REST[key].why)
    problems = deepspeed.problems(nest_keys(dict.fromkeys(allowed, "other")), ranks=2)
    assert [one.set_by.rpartition(": ")[2] for one in problems] == [*allowed]
    for key, problem in zip(allowed, problems, strict=True):
        assert problem.rule == "import-not-honoured"
        assert REST[key].why in problem.message
        assert f"no {key}" in problem.suggestions


def test_a_feature_that_is_not_here_is_accepted_only_when_off(deepspeed: Imports) -> None:
    def all_tables(on: bool) -> dict[str, Any]:
        switches = {f"{table}.{rule.switch}": on for table, rule in OFF_TABLES.items()}
        return nest_keys(switches | {f"{table}.other": 3 for table in OFF_TABLES})

    found = deepspeed(all_tables(False), ranks=2)
    keys = {
        f"{table}.{name}" for table, rule in OFF_TABLES.items() for name in (rule.switch, "other")
    }
    assert {row.key for row in found.rows} >= keys
    problems = deepspeed.problems(all_tables(True), ranks=2)
    assert {one.rule for one in problems} == {"import-not-honoured"}
    for rule, problem in zip(OFF_TABLES.values(), problems, strict=True):
        assert rule.why in problem.message


def test_a_feature_that_is_not_here_is_refused_when_its_table_says_anything(
    deepspeed: Imports,
) -> None:
    assert deepspeed.problems(nest_keys({key: {} for key in REFUSED_TABLES}), ranks=2) == []
    keys = {f"{table}.key.inner": 1 for table in REFUSED_TABLES}
    problems = deepspeed.problems(nest_keys(keys), ranks=2)
    assert {one.rule for one in problems} == {"import-not-honoured"}
    for rule, problem in zip(REFUSED_TABLES.values(), problems, strict=True):
        assert rule.why in problem.message


def test_a_table_without_need_is_said_so_key_by_key(deepspeed: Imports) -> None:
    names = ("enabled", "inner.key")
    keys = {f"{table}.{name}": 1 for table in PLAIN_TABLES for name in names}
    found = deepspeed(nest_keys(keys), ranks=2)
    for table in PLAIN_TABLES:
        for name in names:
            (row,) = rows_of(found, f"{table}.{name}")
            assert row.why == TABLES.keys["tables"][table].why


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
    }
    nearest = {p.set_by.rpartition(": ")[2]: p.suggestions[:1] for p in problems}
    assert nearest["gradient_cliping"] == ("gradient_clipping",)
    assert nearest["zero_optimization.stage3_prefetch_buket_size"] == (
        "zero_optimization.stage3_prefetch_bucket_size",
    )


@pytest.mark.parametrize(
    ("partition", "word"),
    [
        ("uniform", "an even split"),
        ("parameters", "balanced by modelled times"),
        ("profile", "balanced by modelled times"),
        ("type:block", "balanced by modelled times"),
        ("best", "balanced by modelled times"),
    ],
)
def test_a_partition_says_how_stages_are_cut(deepspeed: Imports, partition: str, word: str) -> None:
    config = {"pipeline": {"stages": 2, "partition": partition}}
    found = deepspeed(config, ranks=2)
    assert word in found.job.source_of("pipeline.stages")
    (row,) = rows_of(found, "pipeline.partition")
    assert row.setting == "pipeline.stages"


@pytest.mark.parametrize(("partition", "rule"), [("even", "unknown-choice"), (3, "wrong-type")])
def test_another_partition_is_refused(deepspeed: Imports, partition: object, rule: str) -> None:
    problems = deepspeed.problems({"pipeline": {"partition": partition}}, ranks=2)
    assert [problem.rule for problem in problems] == [rule]
    assert "pipeline.partition" in problems[0].set_by
