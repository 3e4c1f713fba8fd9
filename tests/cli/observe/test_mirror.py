"""`echelon observe RUN --mirror TOOL`: an old run, what is refused, a server of MLflow."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from echelon.cli.main import main
from tests.cli.observe.mlflow_server import mlflow_server
from tests.telemetry.trackers.metrics import FIRST, SECOND, add_lines, expected_values, make_run
from tests.telemetry.trackers.readers import read_mlflow


def test_an_old_run_is_mirrored_and_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path).path
    add_lines(run, FIRST)
    assert main(["observe", str(run), "--mirror", "tensorboard", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["tracker"], found["lines"], found["total_lines"]) == ("tensorboard", 8, 8)
    assert main(["observe", str(run)]) == 0
    assert "mirror      tensorboard: all 8 lines\n" in capsys.readouterr().out


def test_what_is_wrong_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path).path
    for arguments, code, said in (
        (["--mirror", "tensorbord"], 2, "--mirror tensorboard"),
        (["--mirror", "mlflow", "--follow"], 2, "--mirror gives a run to a tracker"),
        (["--mirror", "mlflow"], 2, "error[run-has-metrics]"),
    ):
        assert main(["observe", str(run), *arguments]) == code
        assert said in capsys.readouterr().err


@pytest.mark.slow
def test_a_server_of_mlflow_that_is_away_is_told_and_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path).path
    add_lines(run, FIRST)
    with mlflow_server() as server:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", server.url)
        server.is_away = True
        assert main(["observe", str(run), "--mirror", "mlflow"]) == 3
        error = capsys.readouterr().err
        assert "error[mirror-works]" in error
        assert "mlflow did not take the run" in error
        server.is_away = False
        assert main(["observe", str(run), "--mirror", "mlflow"]) == 0
        add_lines(run, SECOND)
        assert main(["observe", str(run), "--mirror", "mlflow"]) == 0
        assert main(["observe", str(run)]) == 0
        assert "mirror      mlflow: all 13 lines\n" in capsys.readouterr().out
        run_id = json.loads((run / "trackers" / "mlflow.json").read_text())["id"]
        values, texts = read_mlflow(server.url, run_id)
    del values["run/entry"]
    assert values == expected_values((*FIRST, *SECOND))
    assert ("events/note", 4, "rank 1 was lost") in texts
