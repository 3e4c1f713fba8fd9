"""`echelon import` shows what became of each key, and writes a run.toml that loads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from echelon.cli.main import main
from echelon.config.load import load_job

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.5,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 1e6, "contiguous_gradients": True},
}


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = Path("ds.json")
    path.write_text(json.dumps(CONFIG))
    return path


def test_the_table_names_key_setting_and_reason(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["import", str(config), "--ranks", "4"]) == 0
    output = capsys.readouterr()
    text = " ".join(output.out.split())
    assert "-> zero.bucket_bytes = 2000000: 1000000 elements x 2 bytes of bf16" in text
    assert "zero_optimization.reduce_bucket_size = " in text
    assert "contiguous_gradients = true always so" in text
    assert max(map(len, output.out.splitlines())) <= 80
    assert "nothing is written; --out run.toml writes it" in output.err
    assert "--extends names yours" in output.err
    assert [path.name for path in Path().iterdir()] == ["ds.json"]


def test_the_written_file_loads_and_says_where_each_value_comes_from(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["import", str(config), "--ranks", "4", "--out", "run.toml"]) == 0
    assert "next: echelon config show run.toml" in capsys.readouterr().err
    job = load_job("run.toml")
    assert job.plan.layout.zero.stage == 2
    assert (job.plan.mathematics.global_sequences, job.plan.mesh.dp_shard) == (16, 4)
    assert job.plan.mathematics.optimizer.clip_norm == 0.5
    text = Path("run.toml").read_text()
    assert 'extends = "nano"' in text
    assert "# gradient_clipping" in text
    assert main(["config", "show", "run.toml"]) == 0
    assert "run.toml:" in capsys.readouterr().out


def test_a_file_that_exists_is_left_as_it_is(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("run.toml").write_text("mine")
    assert main(["import", str(config), "--out", "run.toml"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error[never-overwrite]")
    assert "works here: run-2.toml" in error
    assert Path("run.toml").read_text() == "mine"


def test_a_refused_key_writes_nothing(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = {**CONFIG, "gradient_cliping": 1.0, "wandb": {"enabled": True}}
    config.write_text(json.dumps(bad))
    assert main(["import", str(config), "--out", "run.toml"]) == 2
    error = capsys.readouterr().err
    assert "error[import-unknown-key]: gradient_cliping is no key of DeepSpeed" in error
    assert "did you mean gradient_clipping?" in error
    assert "set by: ds.json: wandb.enabled" in error
    assert not Path("run.toml").exists()


def test_json_has_the_rows_and_the_run(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import", str(config), "--ranks", "2", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["command"], result["kind"], result["file"]) == ("import", "deepspeed", None)
    rows = {(row["key"], row["setting"]): row for row in result["rows"]}
    row = rows["gradient_clipping", "optimizer.clip_norm"]
    assert (row["given"], row["value"]) == ("0.5", 0.5)
    Path("run.toml").write_text(result["toml"])
    assert load_job("run.toml").plan.mesh.dp_shard == 2


def test_an_error_in_json_has_every_problem(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["import", str(config), "--from", "accelerate", "--json"]) == 2
    result = json.loads(capsys.readouterr().out)
    assert result["command"] == "import"
    assert [problem["rule"] for problem in result["problems"]] == ["import-kind"]


def test_what_the_run_builds_on_may_be_a_file_elsewhere(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("base").mkdir()
    Path("base/mine.toml").write_text('extends = "nano"\n[data]\nsource = "corpus"\n')
    Path("out").mkdir()
    arguments = [
        "--extends",
        "base/mine.toml",
        "--set",
        "train.steps=70",
        "--out",
        "out/run.toml",
    ]
    assert main(["import", str(config), *arguments]) == 0
    assert 'extends = "../base/mine.toml"' in Path("out/run.toml").read_text()
    job = load_job(Path("out/run.toml"))
    assert (job.train.steps, Path(job.data.source).resolve()) == (70, Path("base/corpus").resolve())
    assert "--extends names yours" not in capsys.readouterr().err


def test_a_path_after_set_is_that_of_where_you_are(config: Path) -> None:
    Path("out").mkdir()
    arguments = ["--set", "data.source=corpus", "--out", "out/run.toml"]
    assert main(["import", str(config), *arguments]) == 0
    assert Path(load_job(Path("out/run.toml")).data.source) == Path("corpus").absolute()


def test_a_base_that_does_not_exist_is_named(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["import", str(config), "--extends", "nanno"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error[unknown-preset]")
    assert 'did you mean "nano"' in error
