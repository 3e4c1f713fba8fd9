"""An imported run as a run.toml and as a table."""

from __future__ import annotations

import tomllib
from pathlib import Path

from echelon.interop.import_report import imported_toml, mapping_rows
from tests.interop.imports import Imports, zero


def test_each_setting_names_its_key_and_each_key_stands_once(tmp_path: Path) -> None:
    imported = Imports(tmp_path, "deepspeed")
    found = imported({**zero(2), "train_batch_size": 16, "steps_per_print": 5}, ranks=4)
    text = imported_toml(found, tmp_path)
    assert "(DeepSpeed)" in text.splitlines()[0]
    run = tomllib.loads(text)
    assert run["extends"] == "nano"
    assert run["zero"]["stage"] == 2
    assert "# zero_optimization.stage" in text
    rows = list(mapping_rows(found))
    named = [key for key, *_ in rows if key]
    assert len(named) == len(set(named))
    assert ("steps_per_print", "5", "observe.log_every = 5", "steps between step lines") in rows
