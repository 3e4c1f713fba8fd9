"""What the page says of its controls is what every finder of a run finds."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from echelon.config.load import load_job
from echelon.config.model.settings import derive_model, expand_model
from echelon.config.rules.finders import FINDERS
from echelon.config.rules.violations import find_violations
from echelon.config.setting_layers import gather_layers
from echelon.config.view import View
from echelon.core.errors import ConfigError
from echelon.page.explorer.rules.finders import broken_rules
from echelon.page.explorer.run_file import run_text
from tests.page.explorer.random_controls import legal_settings, random_settings, tables


def found_by_finders(path: Path) -> list[str]:
    """Return the rules that a run file breaks, without what would mend them, which takes long."""
    merged = gather_layers(path, (), None).merged()
    merged, problems = expand_model(merged)
    assert not problems
    merged.update(derive_model(View(entries=merged, wrong=frozenset()), "run"))
    found = find_violations(View(entries=merged, wrong=frozenset()), FINDERS)
    return sorted(one.broken_rule[0] for one in found)


def agree_on_rules(tmp_path: Path, seed: int, count: int) -> Counter[str]:
    """Compare the rules that random settings break; return how often each was broken."""
    random, seen = Random(seed), Counter[str]()
    for _ in range(count):
        controls, model, cluster = random_settings(random)
        path = tmp_path / "run.toml"
        text = run_text(controls, model, cluster)
        path.write_text(text, encoding="utf-8")
        broken = sorted(one.rule for one in broken_rules(tables(), controls, model, cluster))
        assert broken == found_by_finders(path), text
        seen.update(broken or ["none"])
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
