"""`echelon explain WORD`: words of the field, choices and settings."""

from __future__ import annotations

import json

import pytest

from echelon.cli.main import main


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("TP", "tensor parallel (`tp`): ranks share out heads and columns of each matrix"),
        ("tensor-parallelism", "--set mesh.tp=..."),
        ("FSDP", "data parallel (`dp_replicate`, `dp_shard`)"),
        ("mfu", "MFU: model FLOPs utilization"),
        ("1F1B", "1f1b: 1F1B schedule"),
        ("lr", "--set optimizer.learning_rate=..."),
        ("mesh.tp", "tensor parallel (`tp`)"),
        ("heads", "rules: "),
        ("TPUStrategy", "on those take dp"),
        ("CentralStorageStrategy", "ec.threaded(module)"),
    ],
)
def test_a_word_is_explained(word: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", word]) == 0
    assert says in capsys.readouterr().out


def test_the_page_of_a_word_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "TP", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["settings"] == {"mesh.tp": "pieces of a matrix (tensor parallel)"}
    assert "tp-divides-heads" in found["rules"]


@pytest.mark.parametrize(
    ("typed", "near"), [("contex", "context"), ("FITS-Cluster", "fits-cluster")]
)
def test_a_slip_is_refused_with_what_is_near(
    typed: str, near: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", typed]) == 2
    assert near in capsys.readouterr().err.partition("works here: ")[2]
