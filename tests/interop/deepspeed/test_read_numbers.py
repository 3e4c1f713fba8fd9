"""Optimizer, schedule and clipping of a DeepSpeed JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from echelon.interop.deepspeed.abilities import TABLES
from echelon.interop.deepspeed.read_numbers import REFUSED_SCHEDULES
from echelon.interop.formats import nest_keys
from tests.interop.imports import Imports, rows_of


@pytest.fixture
def deepspeed(tmp_path: Path) -> Imports:
    return Imports(tmp_path, "deepspeed")


def optimizer(name: str, **params: object) -> dict[str, Any]:
    return {"optimizer": {"type": name, "params": params}}


def scheduler(name: str, **params: object) -> dict[str, Any]:
    return {"scheduler": {"type": name, "params": {"warmup_type": "linear", **params}}}


@pytest.mark.parametrize("name", ["Adam", "AdamW", "adamw"])
def test_adam_is_adamw_in_deepspeed_too(deepspeed: Imports, name: str) -> None:
    params = {"lr": 1e-4, "betas": [0.8, 0.98], "eps": 1e-6, "weight_decay": 0.05}
    found = deepspeed(optimizer(name, **params)).job.plan.mathematics.optimizer
    assert (found.kind, found.learning_rate, found.eps) == ("adamw", 1e-4, 1e-6)
    assert (found.beta1, found.beta2, found.weight_decay) == (0.8, 0.98, 0.05)


def test_a_key_without_need_is_said_so_with_the_reason(deepspeed: Imports) -> None:
    rules = {key: rule for key, rule in TABLES.keys["optimizer"].items() if rule.takes}
    found = deepspeed(
        nest_keys({"optimizer.type": "AdamW"} | {f"optimizer.{k}": True for k in rules})
    )
    for key, rule in rules.items():
        (row,) = rows_of(found, f"optimizer.{key}")
        assert (row.setting, row.why) == ("", rule.why)


def test_what_an_optimizer_does_not_say_is_the_default_of_deepspeed(deepspeed: Imports) -> None:
    found = deepspeed(optimizer("AdamW")).job.plan.mathematics.optimizer
    assert (found.beta1, found.beta2, found.weight_decay) == (0.9, 0.999, 0.0)
    assert found.clip_norm is None
    found = deepspeed(optimizer("SGD", lr=0.1)).job.plan.mathematics.optimizer
    assert (found.kind, found.momentum) == ("sgd", 0.0)
    found = deepspeed(optimizer("SGD", lr=0.1, momentum=0.9)).job.plan.mathematics.optimizer
    assert found.momentum == 0.9


def test_without_an_optimizer_that_of_the_run_holds(deepspeed: Imports) -> None:
    base = deepspeed({}, extends="nano").job.plan.mathematics.optimizer
    assert (base.learning_rate, base.warmup_steps) == (3e-3, 20)
    auto = optimizer("AdamW", lr="auto", betas="auto", eps="auto", weight_decay="auto")
    found = deepspeed(auto).job.plan.mathematics.optimizer
    assert found == base


@pytest.mark.parametrize(
    ("limit", "clip_norm"), [(0.5, 0.5), (0, None), (0.0, None), ("auto", 1.0)]
)
def test_clipping(deepspeed: Imports, limit: object, clip_norm: float | None) -> None:
    found = deepspeed({"gradient_clipping": limit}).job.plan.mathematics.optimizer
    assert found.clip_norm == clip_norm


@pytest.mark.parametrize("name", [*TABLES.keys["optimizer_types"], "Ranger"])
def test_other_optimizers_are_refused_by_name(deepspeed: Imports, name: str) -> None:
    (problem,) = deepspeed.problems(optimizer(name, lr=1e-3))
    assert problem.rule == "import-not-honoured"
    assert problem.suggestions[:2] == ('"AdamW"', '"SGD"')


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("adam_w_mode", False),
        ("amsgrad", True),
        ("bias_correction", False),
        ("dampening", 0.1),
        ("fp32_optimizer_states", False),
        ("max_grad_norm", 1.0),
        ("maximize", True),
        ("nesterov", True),
    ],
)
def test_other_arithmetic_is_refused_by_name(deepspeed: Imports, name: str, value: object) -> None:
    key = f"optimizer.params.{name}"
    assert deepspeed.refused(optimizer("AdamW", **{name: value})) == [("import-not-honoured", key)]


@pytest.mark.parametrize("table", ["optimizer", "scheduler"])
def test_a_table_without_a_type_does_nothing_in_deepspeed(deepspeed: Imports, table: str) -> None:
    (problem,) = deepspeed.problems({table: {"params": {"lr": 1e-4}}})
    assert problem.rule == "import-not-honoured"
    assert problem.suggestions == (f"no {table}",)
    assert deepspeed.refused({table: {"type": 3, "params": {"lr": 1e-4}}}) == [
        ("wrong-type", f"{table}.type")
    ]
    assert deepspeed.problems({table: {}}) == []
    assert deepspeed.refused({table: 3}) == [("wrong-type", table)]


def test_betas_are_two_fractions(deepspeed: Imports) -> None:
    for betas in ([0.9], [0.9, 1.0], 0.9, ["a", "b"], [0.9, 0.95, 0.99]):
        refused = deepspeed.refused(optimizer("AdamW", betas=betas))
        assert refused == [("wrong-type", "optimizer.params.betas")]


@pytest.mark.parametrize(
    ("name", "params", "schedule", "final_ratio"),
    [
        ("WarmupLR", {}, "constant", 0.1),
        ("WarmupDecayLR", {"total_num_steps": 200, "warmup_max_lr": 1e-3}, "linear", 0.0),
        ("WarmupCosineLR", {"total_num_steps": 200}, "cosine", 1e-4),
        ("WarmupCosineLR", {"total_num_steps": 200, "cos_min_ratio": 0.2}, "cosine", 0.2),
    ],
)
def test_schedules(
    deepspeed: Imports, name: str, params: dict[str, float], schedule: str, final_ratio: float
) -> None:
    found = deepspeed(scheduler(name, warmup_num_steps=50, **params))
    plan = found.job.plan.mathematics.optimizer
    assert (plan.schedule, plan.warmup_steps, plan.final_ratio) == (schedule, 50, final_ratio)
    assert found.job.train.steps == params.get("total_num_steps", 300)


def test_auto_in_a_schedule_is_what_the_run_has(deepspeed: Imports) -> None:
    names = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")
    params: dict[str, object] = dict.fromkeys(names, "auto")
    found = deepspeed({"scheduler": {"type": "WarmupDecayLR", "params": params}})
    plan = found.job.plan.mathematics.optimizer
    assert (plan.warmup_steps, plan.learning_rate, plan.total_steps) == (20, 3e-3, 300)
    for name in names:
        (row,) = rows_of(found, f"scheduler.params.{name}")
        assert row.setting == ""


def test_a_logarithmic_warmup_is_refused_said_or_not(deepspeed: Imports) -> None:
    key = "scheduler.params.warmup_type"
    told = scheduler("WarmupLR", warmup_num_steps=50)
    told["scheduler"]["params"]["warmup_type"] = "log"
    assert deepspeed.refused(told) == [("import-not-honoured", key)]
    del told["scheduler"]["params"]["warmup_type"]
    (problem,) = deepspeed.problems(told)
    assert (problem.rule, problem.suggestions) == ("import-not-honoured", (f'{key} = "linear"',))
    told["scheduler"]["params"]["warmup_num_steps"] = 0
    assert deepspeed.problems(told) == []


def test_what_a_schedule_refuses(deepspeed: Imports) -> None:
    for name in (*REFUSED_SCHEDULES, "Exponential"):
        config = scheduler(name, cycle_min_lr=1, lr_range_test_min_lr=2)
        assert deepspeed.refused(config) == [("import-not-honoured", "scheduler.type")]
    config = scheduler("WarmupLR", warmup_num_steps=5, warmup_min_lr=1e-5)
    key = "scheduler.params.warmup_min_lr"
    assert deepspeed.refused(config) == [("import-not-honoured", key)]


def test_two_peaks_of_the_learning_rate_are_a_conflict(deepspeed: Imports) -> None:
    config = optimizer("AdamW", lr=1e-4) | scheduler(
        "WarmupLR", warmup_num_steps=5, warmup_max_lr=3e-4
    )
    (problem,) = deepspeed.problems(config)
    assert problem.rule == "import-conflict"
    assert "optimizer.params.lr" in problem.set_by
    assert "scheduler.params.warmup_max_lr" in problem.set_by
    silent = optimizer("AdamW", lr=1e-4) | scheduler("WarmupDecayLR", total_num_steps=2000)
    (problem,) = deepspeed.problems(silent)
    assert "default of DeepSpeed" in problem.set_by
