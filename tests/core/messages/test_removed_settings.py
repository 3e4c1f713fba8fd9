"""Settings of earlier versions: refused where a run uses them, with what to write instead."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from echelon.cli.main import main
from echelon.config.load import load_job
from echelon.config.schema import SETTINGS
from echelon.core.errors import ConfigError
from echelon.core.messages.removed_settings import REMOVED_SETTINGS, RemovedSetting
from echelon.core.plan import Plan
from echelon.core.settings.value_types import toml_text
from tests.config.problems import SMALL, write

ALL = tuple(REMOVED_SETTINGS.values())


def assigned(setting: RemovedSetting, value: object) -> str:
    return f"{setting.key}={toml_text(value)}"


@pytest.mark.parametrize("setting", ALL, ids=lambda one: one.key)
def test_a_run_that_uses_it_is_told_once_what_to_write_instead(
    tmp_path: Path, setting: RemovedSetting
) -> None:
    table, _, name = setting.key.rpartition(".")
    file = write(tmp_path, f"{SMALL}\n[{table}]\n{name} = 7\n")
    for run, sets in ((file, []), (write(tmp_path, SMALL, "small.toml"), [assigned(setting, 7)])):
        with pytest.raises(ConfigError) as refused:
            load_job(run, sets)
        (problem,) = refused.value.problems
        assert (problem.rule, problem.key) == ("removed-setting", setting.key)
        assert problem.message == f"{setting.key} = 7 was removed: {setting.message}"
        assert problem.suggestions == setting.instead
        assert problem.set_by


@pytest.mark.parametrize("setting", ALL, ids=lambda one: one.key)
def test_a_file_of_an_earlier_version_that_does_not_use_it_is_read(
    tmp_path: Path, setting: RemovedSetting
) -> None:
    assert setting.key not in SETTINGS
    file = write(tmp_path, SMALL)
    job = load_job(file, [assigned(setting, setting.unused)])
    assert job.content_hash() == load_job(file).content_hash()


@pytest.mark.parametrize("setting", ALL, ids=lambda one: one.key)
def test_a_plan_of_an_earlier_version_is_read_unless_it_uses_it(
    tmp_path: Path, setting: RemovedSetting
) -> None:
    plan = load_job(write(tmp_path, SMALL)).plan
    assert Plan.from_json(written(plan, setting, setting.unused)) == plan
    with pytest.raises(ValueError, match=f"{setting.key}, which it uses, was removed"):
        Plan.from_json(written(plan, setting, 7))


def written(plan: Plan, setting: RemovedSetting, value: object) -> str:
    """Return the plan.json of a version that had a setting."""
    entries: dict[str, Any] = json.loads(plan.to_json())
    *tables, name = setting.entry.split(".")
    inner = entries
    for table in tables:
        inner = inner.setdefault(table, {})
    inner[name] = value
    return json.dumps(entries)


def test_explain_says_what_to_write_instead(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("servers.min_workers", "min_workers", "threads.replicas"):
        assert main(["explain", name]) == 2
        assert "was removed" in capsys.readouterr().err
