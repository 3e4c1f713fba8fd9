"""A file of another tool is recognised by its content."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from echelon.core.errors import ConfigError
from echelon.interop.importer import detect_tool, import_file, mapping_rows
from tests.interop.imports import Imports, zero


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ('\n {"train_batch_size": 8}', "deepspeed"),
        ("# a comment\ndistributed_type: FSDP", "accelerate"),
        ("debug: false\nfsdp_config: {}", "accelerate"),
        ("torchrun x.py --tensor-model-parallel-size 2", "megatron"),
        ("python x.py --micro-batch-size 2", "megatron"),
    ],
)
def test_the_content_tells_the_kind(text: str, kind: str) -> None:
    assert detect_tool(Path("file"), text) == kind


def test_what_tells_nothing_asks_for_the_kind(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("stage: 3\n")
    with pytest.raises(ConfigError) as caught:
        import_file(path)
    assert caught.value.rules == ("import-kind",)
    assert "--from deepspeed" in caught.value.problems[0].suggestions


def test_a_missing_file_and_one_that_is_no_text(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        import_file(tmp_path / "absent.json")
    assert caught.value.rules == ("no-such-file",)
    path = tmp_path / "binary.json"
    path.write_bytes(b"\xff\xfe\x00{")
    with pytest.raises(ConfigError) as caught:
        import_file(path)
    assert caught.value.rules == ("import-syntax",)


def test_a_file_without_a_dtype_is_of_fp32_on_any_device(tmp_path: Path) -> None:
    path = tmp_path / "start.sh"
    path.write_text("horovodrun -np 8 -H localhost:8 --fusion-threshold-mb 64 python train.py\n")
    found = import_file(path, sets=["cluster.preset=8xh100"])
    assert found.job.plan.mathematics.precision.parameters == "fp32"
    assert found.settings["precision.parameters"].value == "fp32"
    assert "parameters in fp32: the file names no dtype" in found.assumptions


def test_each_setting_names_its_key_and_each_key_stands_once(tmp_path: Path) -> None:
    imported = Imports(tmp_path, "deepspeed")
    found = imported({**zero(2), "train_batch_size": 16, "steps_per_print": 5}, ranks=4)
    text = found.to_toml(tmp_path)
    assert "(DeepSpeed)" in text.splitlines()[0]
    run = tomllib.loads(text)
    assert run["extends"] == "nano"
    assert run["zero"]["stage"] == 2
    assert "# zero_optimization.stage" in text
    rows = list(mapping_rows(found))
    named = [key for key, *_ in rows if key]
    assert len(named) == len(set(named))
    assert ("steps_per_print", "5", "observe.log_every = 5", "steps between step lines") in rows
