"""What the explorer starts at breaks no rule, and what it can't name is refused."""

from __future__ import annotations

import pytest

from echelon.core.errors import ConfigError
from echelon.page.explorer.broken_rules import broken_rules
from echelon.page.explorer.document import explorer_page, start_controls
from tests.page.explorer.random_controls import tables
from web.formulas.inputs import machine_place


def test_every_model_starts_with_a_plan_on_every_cluster() -> None:
    for cluster in tables()["clusters"]:
        for model in tables()["models"]:
            found = start_controls(tables(), model, cluster)
            assert broken_rules(found, model, cluster) == []
            assert found.ranks == cluster["devices"]
            assert machine_place(tables(), found, model, cluster) >= 0


@pytest.mark.parametrize(
    ("model", "cluster", "rule", "key"),
    [
        ("llama3-9b", "64xh100", "unknown-preset", "--model"),
        ("llama3-8b", "64xh101", "unknown-preset", "cluster.preset"),
    ],
)
def test_what_is_not_known_is_refused(model: str, cluster: str, rule: str, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        explorer_page(model, cluster)
    assert [(one.rule, one.key) for one in caught.value.problems] == [(rule, key)]
