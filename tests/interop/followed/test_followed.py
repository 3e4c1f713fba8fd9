"""Files that a file names are read with it: their keys have rows, refusals and allowances."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from echelon.core.errors import ConfigError
from echelon.interop.followed import adopt, follow_files, inner_reader
from echelon.interop.importer import import_file
from echelon.interop.key_reader import KeyReader
from tests.interop.llamafactory.test_read import PRETRAIN, WEIGHTS

NAMED = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}


def test_a_file_is_looked_for_beside_and_in_the_folders_above(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "examples/train").mkdir(parents=True)
    (tmp_path / "examples/ds.json").write_text(json.dumps(NAMED), encoding="utf-8")
    path, given = tmp_path / "examples/train/run.yaml", {"deepspeed": "examples/ds.json", "a": 1}
    keys = {"deepspeed.zero_optimization.stage": 2, "deepspeed.bf16.enabled": True}
    assert follow_files("llamafactory", path, given) == given | keys
    assert follow_files("axolotl", path, given) == given | keys
    assert follow_files("axolotl", tmp_path / "examples/a.yaml", {"deepspeed": "ds.json"}) == (
        {"deepspeed": "ds.json"} | keys
    )
    # It may also stand where the command is typed.
    (tmp_path / "here").mkdir()
    (tmp_path / "here/mine.json").write_text(json.dumps(NAMED), encoding="utf-8")
    monkeypatch.chdir(tmp_path / "here")
    assert len(follow_files("axolotl", path, {"deepspeed": "mine.json"})) == 3


def test_what_names_no_file_that_is_here_stays_as_it_is(tmp_path: Path) -> None:
    for given in ({"deepspeed": "gone.json"}, {"deepspeed": None}, {"a": 1}):
        assert follow_files("llamafactory", tmp_path / "run.yaml", given) == given
    assert follow_files("nemo", tmp_path / "run.yaml", {"deepspeed": "run.yaml"}) == {
        "deepspeed": "run.yaml"
    }
    (tmp_path / "bad.json").write_text("{", encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        follow_files("axolotl", tmp_path / "run.yaml", {"deepspeed": "bad.json"})
    assert caught.value.rules == ("import-syntax",)
    assert "bad.json" in caught.value.problems[0].message


def test_settings_of_the_file_win_and_the_row_beside_says_so() -> None:
    reader = KeyReader(tool="A", path="a.yaml", given={"ds": "b.json", "ds.x": 3, "y": 1})
    reader.set_or_default("y", "zero.stage", 1, "mine")
    inner = inner_reader(reader, "ds", "B")
    assert inner is not None
    inner.set("x", "zero.stage", 3, "theirs")
    inner.refuse("x", "and no")
    adopt(reader, "ds", inner)
    assert reader.entries["zero.stage"].value == 3
    assert reader.entries["zero.stage"].source == "b.json: x"
    assert reader.rows[0].fate == "without effect"
    assert "b.json says zero.stage" in reader.rows[0].why
    assert [row.key for row in reader.rows] == ["y", "ds", "ds.x"]
    assert reader.refusals[0].keys == ("ds.x",)
    reader.finish()
    assert len(reader.refusals) == 1
    assert inner_reader(reader, "other", "B") is None


def imported(folder: Path, file: dict[str, Any], text: str, *allow: str, **more: Any) -> Any:
    (folder / "ds.json").write_text(json.dumps(file), encoding="utf-8")
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return import_file(path, ranks=4, allow=allow, **more)


def test_a_key_of_the_file_that_is_refused_can_be_allowed(tmp_path: Path) -> None:
    file, text = NAMED | {"sparse_gradients": True}, f"{PRETRAIN}deepspeed: ds.json\n"
    found = imported(tmp_path, file, text, sets=WEIGHTS)
    assert [row.key for row in found.rows if row.fate == "refused"] == [
        "deepspeed.sparse_gradients"
    ]
    assert found.settings["zero.stage"].value == 2
    found = imported(tmp_path, file, text, "deepspeed.sparse_gradients", sets=WEIGHTS)
    assert found.is_whole
    assert found.job.plan.layout.zero.stage == 2


def test_accelerate_takes_all_but_the_processes_from_the_file(tmp_path: Path) -> None:
    text = (
        "distributed_type: DEEPSPEED\nnum_processes: 4\nmixed_precision: fp16\n"
        "deepspeed_config: {deepspeed_config_file: ds.json, zero3_init_flag: false}\n"
    )
    file = NAMED | {"train_batch_size": 16, "gradient_accumulation_steps": 2}
    plan = imported(tmp_path, file | {"gradient_clipping": 0.5}, text).job.plan
    assert (plan.layout.zero.stage, plan.mesh.dp_shard) == (2, 4)
    assert plan.mathematics.precision.parameters == "bf16"
    assert plan.mathematics.optimizer.clip_norm == 0.5
    assert (plan.mathematics.global_sequences, plan.num_microbatches) == (16, 2)
