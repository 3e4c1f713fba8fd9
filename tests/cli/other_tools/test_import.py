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
    assert "contiguous_gradients = true -> without effect: always so" in text
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


def test_a_refused_key_is_named_and_the_run_comes_out(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = {**CONFIG, "gradient_cliping": 1.0, "wandb": {"enabled": True}, "sparse_gradients": True}
    config.write_text(json.dumps(bad))
    assert main(["import", str(config), "--ranks", "4", "--out", "run.toml"]) == 1
    found = capsys.readouterr()
    text = " ".join(found.out.split())
    assert "-> refused[import-unknown-key]: gradient_cliping is no key of DeepSpeed" in text
    assert "did you mean gradient_clipping?" in text
    assert "wandb.enabled = true -> without effect" in text
    assert "refused 2 sparse_gradients, gradient_cliping" in text
    assert "2 refused" in found.err
    assert load_job("run.toml").plan.layout.zero.stage == 2
    head = Path("run.toml").read_text().partition("extends")[0]
    assert "NOT TAKEN" in head
    assert "[import-not-honoured] sparse_gradients = true" in head


def test_allow_drops_what_it_names_and_nothing_else(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config.write_text(json.dumps({**CONFIG, "sparse_gradients": True, "prescale_gradients": True}))
    arguments = ["import", str(config), "--ranks", "4"]
    assert main([*arguments, "--allow", "sparse_gradients"]) == 1
    assert "dropped 1 sparse_gradients" in " ".join(capsys.readouterr().out.split())
    assert main([*arguments, "--allow", "all", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["summary"]["dropped"] == ["prescale_gradients", "sparse_gradients"]
    assert result["refused"] == []
    assert "Dropped by --allow: prescale_gradients, sparse_gradients" in result["toml"]
    assert main([*arguments, "--allow", "sparse_gradient"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error[import-allow]")
    assert "works here: --allow sparse_gradients" in error


def test_a_run_that_does_not_load_comes_out_with_its_problems(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config.write_text(json.dumps({**CONFIG, "train_batch_size": 10}))
    assert main(["import", str(config), "--ranks", "4", "--set", "mesh.tp=3", "--json"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert result["invalid"]
    assert "does not load until these are mended" in " ".join(result["toml"].split())


def test_the_line_of_a_launcher_says_the_ranks_and_they_the_cluster(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = "deepspeed --num_nodes 2 --num_gpus 8 train.py --deepspeed_config ds.json"
    assert main(["import", str(config), "--launcher", line, "--out", "run.toml"]) == 0
    assert "assumed: cluster.preset = '16xh100', for 16 ranks" in capsys.readouterr().err
    plan = load_job("run.toml").plan
    assert (plan.mesh.dp_shard, plan.cluster.num_devices) == (16, 16)
    assert main(["import", str(config), "--launcher", "python train.py"]) == 2
    assert capsys.readouterr().err.startswith("error[import-ranks]")


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
    config.write_text("plain: words")
    assert main(["import", str(config), "--json"]) == 2
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
