"""A checkpoint from before a setting was there goes on while the setting has its default."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from echelon.config.job import DataSettings
from echelon.core.errors import CheckpointError
from echelon.core.experts import Balance
from echelon.core.plan import Mathematics
from echelon.training.checkpoint.identity import data_problems
from echelon.training.checkpoint.index import INDEX_FILE, read_index
from tests.training.checkpoint.ranks import IDENTITY, SHAPE, load, make_tensors, save

TENSORS = make_tensors()
LATER = (
    "documents",
    "balance",
    "model.causal",
    "model.window",
    "model.soft_cap",
    "model.latent",
    "optimizer.decay",
)


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """Return a checkpoint whose index has no entry of LATER."""
    save(tmp_path, step=2, tensors=TENSORS)
    path = tmp_path / "step-000002"
    index = read_index(path)
    mathematics: dict[str, Any] = json.loads(json.dumps(index.mathematics))
    for entry in LATER:
        table, _, name = entry.rpartition(".")
        del (mathematics[table] if table else mathematics)[name]
    text = replace(index, mathematics=mathematics).to_text()
    (path / INDEX_FILE).write_text(text, encoding="utf-8")
    return path


def test_what_was_not_written_then_had_its_default(old: Path) -> None:
    _, loaded = load(old, like=TENSORS)
    assert loaded.step == 2


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: replace(m, model=replace(SHAPE, window=8)), "model.window was None, is 8"),
        (lambda m: replace(m, model=replace(SHAPE, causal=False)), "causal was True, is False"),
        (lambda m: replace(m, documents="separate"), "documents was 'joined', is 'separate'"),
        (lambda m: replace(m, balance=Balance(kind="aux")), "balance.kind was 'none', is 'aux'"),
        (
            lambda m: replace(m, optimizer=replace(m.optimizer, decay="all")),
            "optimizer.decay was 'matrices', is 'all'",
        ),
    ],
)
def test_another_value_is_other_mathematics(
    old: Path, change: Callable[[Mathematics], Mathematics], said: str
) -> None:
    identity = replace(IDENTITY, mathematics=change(IDENTITY.mathematics))
    with pytest.raises(CheckpointError) as caught:
        load(old, like=TENSORS, identity=identity)
    assert caught.value.rules == ("checkpoint-same-mathematics",)
    assert said in str(caught.value)
    assert str(caught.value).count(", is ") == 1


def test_a_run_goes_on_with_the_tokens_that_counted() -> None:
    """Checkpoints that say nothing of it counted all tokens."""
    state = {"data_hash": "a", "epoch_end": "continue"}
    assert list(data_problems(state, "a", DataSettings(), where="here")) == []
    (problem,) = data_problems(state, "a", DataSettings(train_on="answers"), where="here")
    assert problem.rule == "resume-same-data"
    assert problem.suggestions == ("data.train_on = all",)
    answers = {**state, "train_on": "answers"}
    assert list(data_problems(answers, "a", DataSettings(train_on="answers"), where="here")) == []
    (problem,) = data_problems(answers, "a", DataSettings(epoch_end="continue"), where="here")
    assert "data.train_on = answers, this run has all" in problem.message
