"""Keys that are not known, tables that are none, and a choice that is made twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config.problems import SMALL, problems_of, write


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("mesh.tpp", "mesh.tp"),
        ("msh.tp", "mesh.tp"),
        ("tp", "mesh.tp"),
        ("batch.sequence_lenght", "batch.sequence_length"),
        ("optimizer.lr_schedule", "optimizer.schedule"),
        ("parallel.sequence_parallel", "mesh.sequence_parallel"),
        ("model.rope_scaling.factr", "model.rope_scaling.factor"),
        ("train.seeed", "train.seed"),
    ],
)
def test_a_misspelt_key_is_told_what_was_meant(key: str, meant: str) -> None:
    found = problems_of("nano", [f"{key}=2"])
    assert list(found) == ["unknown-key"]
    assert found["unknown-key"].suggestions[0] == meant
    assert f"did you mean {meant}?" in found["unknown-key"].message


BATCH = "[batch]\nglobal_sequences = 1\nsequence_length = 8"


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("extends = 3", "wrong-type"),
        ('extends = ""', "out-of-range"),
        (f"model = 3\n{BATCH}", "wrong-type"),
        (f"{BATCH}\n[model]\npreset = 'gpt2'\nrope_scaling = 8", "wrong-type"),
    ],
)
def test_what_hangs_on_a_wrong_value_is_not_said_to_be_missing(
    tmp_path: Path, text: str, rule: str
) -> None:
    found = problems_of(write(tmp_path, text))
    assert list(found) == [rule]


def test_an_unknown_table_is_reported_once_and_a_value_is_no_table(tmp_path: Path) -> None:
    run = write(tmp_path, SMALL + "\n[wandb]\nproject = 'x'\nentity = 'y'\nmode = 'z'\n")
    found = problems_of(run)
    assert list(found) == ["unknown-key"]
    assert found["unknown-key"].set_by == f"{run}:16"
    assert "is not a table" in problems_of("nano", ["mesh=3"])["wrong-type"].message


def test_one_choice_is_not_made_twice(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    run = write(
        tmp_path,
        """
        extends = "nano"
        [model]
        preset = "gpt2"
        hf_config = "config.json"
        """,
    )
    found = problems_of(run)
    assert list(found) == ["conflicting-settings"]
    assert found["conflicting-settings"].set_by == f"{run}:3, {run}:4"
    found = problems_of("nano", ["cluster.preset=8xh100", "cluster.file=c.toml"])
    assert list(found) == ["conflicting-settings"]
    assert "conflicting-settings" in problems_of("nano", ["mesh.tp=1", "mesh.tp=2"])
    assert problems_of("nano", ["mesh.tp=2", "mesh.tp=2"]) == {}
    found = problems_of("nano", ["data.validation_fraction=0", "train.validate_every=50"])
    assert list(found) == ["conflicting-settings"]
