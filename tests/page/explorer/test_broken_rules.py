"""The page finds of its controls what every finder of a run finds, in the same words."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from echelon.config.load import load_job
from echelon.config.model.settings import derive_model, expand_model
from echelon.config.rules.finders import FINDERS
from echelon.config.rules.violations import find_violations
from echelon.config.setting_layers import gather_layers
from echelon.config.view import View
from echelon.core.errors import ConfigError
from echelon.core.messages.plurals import in_singular
from echelon.page.explorer.broken_rules import broken_rules
from echelon.page.explorer.controls import run_text
from echelon.page.explorer.document import start_controls
from tests.page.explorer.random_controls import legal_settings, random_settings, tables

PLAIN_RUN = {"dp_shard": 1, "dp_replicate": 8, "tp": 1, "zero": 0, "sequence_parallel": False}
EXPERTS, DENSE = "mixtral-8x7b", "llama3-8b"
BROKEN: list[tuple[str, dict[str, Any], str, str]] = [
    (DENSE, {"tp": 16, "dp_shard": 4}, "tp-divides-kv-heads", "8 % 16 = 8"),
    (DENSE, {"sequences": 12}, "batch-divides", "12 % 8 = 4"),
    (DENSE, {"length": 16384}, "sequence-fits-positions", "16384"),
    (DENSE, {"dp_shard": 16, "sequences": 16}, "fits-cluster", "= 128 ranks"),
    (DENSE, {"tp_overlap": "ring", "sequence_parallel": False}, "no-effect", "rows are gathered"),
    (DENSE, {**PLAIN_RUN, "servers": 1, "optimizer": "muon"}, "servers-update-elements", "muon"),
    (DENSE, {"servers": 1, "dp_shard": 4, "tp": 4}, "servers-split-samples", "mesh.tp = 4"),
    (EXPERTS, {**PLAIN_RUN, "servers": 1}, "servers-hold-dense-models", "routers"),
    (DENSE, {"virtual": 2}, "schedule-stages-per-rank", "1f1b"),
    (DENSE, {"pp": 40, "dp_shard": 1, "tp": 1}, "layers-fill-stages", "40 stages"),
    (
        DENSE,
        {"pp": 3, "dp_shard": 2, "schedule": "dualpipe", "sequences": 16},
        "schedule-even-ranks",
        "3",
    ),
    (
        DENSE,
        {"pp": 2, "dp_shard": 4, "schedule": "dualpipe", "sequences": 4},
        "schedule-needs-microbatches",
        "4",
    ),
    (DENSE, {"context": "striped"}, "no-effect", "mesh.cp = 1"),
    (
        DENSE,
        {"cp": 4, "dp_shard": 2, "context": "ulysses-ring", "ulysses": 3},
        "ulysses-divides-cp",
        "4 % 3 = 1",
    ),
    (
        DENSE,
        {"cp": 8, "dp_shard": 1, "context": "ulysses"},
        "ulysses-divides-heads",
        "4 % 8 = 4",
    ),
    (DENSE, {"recompute": "full", "operators": "norm"}, "no-effect", "redone whole"),
    (EXPERTS, {"recompute": "selective", "operators": "mlp"}, "no-effect", "meets alone"),
    (DENSE, {"precision": "fp8"}, "fp8-device", "A100 SXM 80 GB has no peak of fp8"),
    (DENSE, {"precision": "fp8", "tp_overlap": "ring"}, "fp8-gathers-at-once", "ring"),
    (DENSE, {"gather": "fp8"}, "fp8-gather-needs-codes", "multiplies no weight in 8 bits"),
    (DENSE, {"precision": "fp8 tensor", "gather": "fp8"}, "fp8-gather-of-squares", "squares"),
    (DENSE, {"gather": "int8", "zero": 2}, "int8-gather-of-all", "2 < 3"),
    (DENSE, {"precision": "fp8", "gather": "int8"}, "int8-gather-rounds-once", "8 bits"),
    (
        "gpt2",
        {"gather": "int8", "tp": 4, "dp_shard": 16, "sequences": 16},
        "int8-block-divides",
        "768 / 4",
    ),
    (EXPERTS, {"ep": 16}, "ep-divides-experts", "8 % 16 = 8"),
    (EXPERTS, {"ep": 8, "expert_tp": 2}, "expert-tp-is-one-or-tp", "mesh.tp = 8"),
    (EXPERTS, {"ep": 4, "expert_tp": 8, "dp_shard": 2}, "ep-divides-ranks", "2 % 4 = 2"),
    (EXPERTS, {"ep": 8, "dispatch": "two-hop"}, "two-hop-needs-nodes", "the 8 ranks"),
    (EXPERTS, {"ep": 8, "chunks": 3}, "chunks-divide-tokens", "1024 % 3 = 1"),
    (DENSE, {"expert_tp": 8}, "no-effect", "has no experts"),
]
"""A model, changes of controls, the rule that they break, and a part of its words."""


def broken(model: str, **changes: Any) -> dict[str, str]:
    """Return the rules that changes of a legal start break, each with its message."""
    preset = next(one for one in tables()["models"] if one["name"] == model)
    place = next(one for one in tables()["clusters"] if one["name"] == "64xa100-80gb")
    controls = replace(start_controls(tables(), preset, place), **changes)
    return {one.rule: one.message for one in broken_rules(controls, preset, place)}


@pytest.mark.parametrize(
    ("model", "changes", "rule", "says"), BROKEN, ids=[one[2] for one in BROKEN]
)
def test_a_rule_is_told_with_its_arithmetic(
    model: str, changes: dict[str, Any], rule: str, says: str
) -> None:
    assert broken(model) == {}
    assert says in broken(model, **changes)[rule]


def test_rows_hop_twice_over_several_ranks_of_several_nodes() -> None:
    hops: dict[str, Any] = {"ep": 8, "expert_tp": 2, "tp": 2, "dp_shard": 32, "sequences": 32}
    assert broken(EXPERTS, **hops, dispatch="two-hop") == {}


def found_by_finders(path: Path) -> list[tuple[str, str]]:
    """Return the rules that a run file breaks and their arithmetic, by all finders of a run."""
    merged = gather_layers(path, (), None).merged()
    merged, problems = expand_model(merged)
    assert not problems
    merged.update(derive_model(View(entries=merged, wrong=frozenset()), "run"))
    found = find_violations(View(entries=merged, wrong=frozenset()), FINDERS)
    return sorted((one.broken_rule[0], in_singular(one.message)) for one in found)


def agree_on_rules(tmp_path: Path, seed: int, count: int) -> Counter[str]:
    """Compare the rules that random settings break; return how often each was broken."""
    random, seen = Random(seed), Counter[str]()
    for _ in range(count):
        controls, model, cluster = random_settings(random)
        path = tmp_path / "run.toml"
        text = run_text(controls, model, cluster)
        path.write_text(text, encoding="utf-8")
        broken = sorted((one.rule, one.message) for one in broken_rules(controls, model, cluster))
        assert broken == found_by_finders(path), text
        seen.update([rule for rule, _ in broken] or ["none"])
    return seen


def test_rules_are_those_of_the_finders(tmp_path: Path) -> None:
    seen = agree_on_rules(tmp_path, seed=1, count=150)
    assert seen["none"] >= 5
    assert len(seen) >= 12


@pytest.mark.slow
def test_rules_are_those_of_the_finders_of_many(tmp_path: Path) -> None:
    seen = agree_on_rules(tmp_path, seed=2, count=2000)
    assert len(seen) >= 18


def test_a_run_that_breaks_a_rule_is_no_plan(tmp_path: Path) -> None:
    legal = legal_settings(5, 30)
    controls, model, cluster = next(one for one in legal if one[1]["name"] == "llama3-8b")
    path = tmp_path / "run.toml"
    path.write_text(
        run_text(replace(controls, length=1024 * 1024), model, cluster), encoding="utf-8"
    )
    with pytest.raises(ConfigError) as caught:
        load_job(path)
    assert "sequence-fits-positions" in [one.rule for one in caught.value.problems]
