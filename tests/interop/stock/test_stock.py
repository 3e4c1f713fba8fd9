"""Stock configurations import: a run.toml comes out of each, and what was lost is shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.config.load import load_job
from echelon.core.errors import ConfigError
from echelon.interop.importer import import_file
from echelon.interop.lenient import ALL
from tests.interop.stock.tables import FILES, STOCK, table_of


def test_there_are_forty_and_more_of_eight_tools() -> None:
    assert len(FILES) >= 40
    tools = {path.parent.name for path in FILES}
    assert len(tools) == 8
    for tool in tools:
        assert len(list((STOCK / tool).glob("*.txt"))) >= 5


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_stock_file_imports_and_shows_what_it_lost(path: Path, tmp_path: Path) -> None:
    found = import_file(path)
    assert found.kind == path.parent.name
    assert table_of(found) == path.with_suffix(".txt").read_text(encoding="utf-8")
    written = tmp_path / f"{path.name}.toml"  # The model has the name of the run.
    written.write_text(found.to_toml(tmp_path), encoding="utf-8")
    text = written.read_text(encoding="utf-8")
    for problem in (*found.refused, *found.invalid):
        assert f"[{problem.rule}]" in text
    if found.invalid:
        with pytest.raises(ConfigError) as caught:
            load_job(written)
        assert set(caught.value.rules) == {problem.rule for problem in found.invalid}
    else:
        loaded = load_job(written).plan
        plan = found.outcome.plan if not isinstance(found.outcome, ConfigError) else None
        assert plan is not None
        assert loaded.same_mathematics(plan)
        assert (loaded.layout, loaded.cluster) == (plan.layout, plan.cluster)


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_what_is_refused_can_be_dropped_and_the_run_is_the_same(path: Path) -> None:
    found, dropped = import_file(path), import_file(path, allow=(ALL,))
    assert dropped.refused == ()
    assert {key: entry.value for key, entry in dropped.settings.items()} == {
        key: entry.value for key, entry in found.settings.items()
    }
    keys = {row.key for row in found.rows if row.fate == "refused"}
    assert {row.key for row in dropped.rows if row.fate == "dropped"} == keys
