"""A launch line in the place of a file of another tool."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from echelon.api.converting import import_run
from echelon.cli.main import main
from echelon.config.load import load_job
from echelon.core.errors import ConfigError
from tests.interop.launcher.launch_lines import ACCELERATE, DEEPSPEED, HOROVOD, MEGATRON


def value(line: str | Path, key: str, ranks: int | None = None) -> object:
    """Return a setting of an imported run that has no problem."""
    found = import_run(line, ranks=ranks)
    assert found.is_whole, found.invalid
    return found.settings[key].value


def test_a_line_of_horovod_is_read_as_its_guide_says() -> None:
    assert value(HOROVOD, "mesh.dp_replicate") == 4
    assert value(HOROVOD, "batch.global_sequences") == 256


def test_a_line_of_torchrun_has_the_flags_of_its_script() -> None:
    line = MEGATRON.format(ranks=2)
    assert value(line, "model.hidden") == 512
    assert value(line, "mesh.dp_replicate") == 2
    assert import_run(line).kind == "megatron"


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("ds.json", json.dumps(DEEPSPEED), "deepspeed --num_gpus 4 train.py --deepspeed_config "),
        ("fsdp.yaml", ACCELERATE.format(ranks=4), "accelerate launch --config_file="),
    ],
)
def test_the_file_that_a_line_names_is_read_for_its_ranks(
    name: str, text: str, line: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    command = f"{line}{tmp_path / name} train.py"
    assert value(command, "mesh.dp_shard") == 4
    assert import_run(command).path == tmp_path / name


def test_a_line_that_says_nothing_and_a_file_that_is_not_there_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        import_run("torchrun --nproc_per_node 2 train.py")
    assert caught.value.rules == ("import-kind",)
    with pytest.raises(ConfigError) as caught:
        import_run("no such file.json")
    assert caught.value.rules == ("no-such-file",)


def test_a_line_is_written_as_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run.toml"
    assert main(["import", MEGATRON.format(ranks=2), "--out", str(out)]) == 0
    assert "hidden = 512" in out.read_text()
    assert load_job(out).plan.mesh.world_size == 2
    capsys.readouterr()
