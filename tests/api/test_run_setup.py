"""All of a run that can be prepared, or refused, before any of its ranks starts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from echelon.api.run_setup import prepare_run
from echelon.config.job import Job
from echelon.config.load import load_job
from echelon.core.errors import DataError
from echelon.core.plan import Plan
from echelon.core.units import decimal_bytes
from echelon.cost.bytes.held import stored_bytes
from echelon.training.data.prepare import prepare
from echelon.training.data.tokenizer import ByteTokenizer
from echelon.training.data.writer import DatasetWriter

TOKENS = 401


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("x" * (TOKENS - 1), encoding="utf-8")
    return tmp_path


def _job(**settings: object) -> Job:
    """Return a small job on the text; names of settings have `__` for their dot."""
    every = {
        "data__source": "text.txt",
        "data__validation_fraction": 0,
        "batch__sequence_length": 8,
        "batch__global_sequences": 4,
        "optimizer__warmup_steps": 1,
        "train__steps": 2,
        "train__validate_every": "never",
        **settings,
    }
    return load_job("nano", [f"{key.replace('__', '.')}={value}" for key, value in every.items()])


@pytest.mark.usefixtures("place")
def test_a_run_has_its_plan_and_its_run_file_before_any_rank() -> None:
    said: list[str] = []
    job = _job(train__run_name="mine")
    run, task = prepare_run(job, None, said.append)
    assert run.path == Path("runs/mine")
    assert run.plan() == job.plan == Plan.read(run.path / "plan.json")
    assert load_job(run.run_file).plan == job.plan
    assert (task.run_dir, task.resume) == ("runs/mine", None)
    assert Path(task.data).is_dir()
    assert said == [
        f"reading {Path('text.txt').absolute()} ...",
        "training mine in runs/mine",
        "events: 50.00 MB at most; beyond, every k-th step (observe.events_budget_bytes)",
    ]


@pytest.mark.usefixtures("place")
def test_a_run_of_adapters_says_what_it_writes() -> None:
    said: list[str] = []
    job = _job(lora__rank=4)
    prepare_run(job, None, said.append)
    sizes = stored_bytes(job.plan.mathematics)
    assert 0 < sizes.checkpoint < sizes.base
    assert any(decimal_bytes(sizes.checkpoint) in one and "once" in one for one in said)


@pytest.mark.usefixtures("place")
def test_a_run_that_reads_its_data_more_than_once_says_so() -> None:
    said: list[str] = []
    prepare_run(_job(train__steps=50), None, said.append)
    # 401 tokens, each sample of 8 with the one after it: 50 samples, of 200 that are read.
    assert "50 steps of 4 sequences read the 50 training samples 4.0 times" in said


@pytest.mark.usefixtures("place")
def test_a_global_batch_without_enough_samples_is_refused_with_what_fits() -> None:
    with pytest.raises(DataError) as caught:
        prepare_run(_job(batch__global_sequences=64), None, lambda _: None)
    assert caught.value.rules == ("data-fills-batch",)
    problem = caught.value.problems[0]
    assert "(50 < 64)" in problem.message
    assert problem.suggestions[1] == f"batch.sequence_length = {(TOKENS - 2) // 63} or less"
    assert not Path("runs/mine").exists()


def _chats(folder: Path, records: int, size: int) -> Path:
    """Write chats of bytes, an answer in the first half of them alone."""
    with DatasetWriter(folder, ByteTokenizer(), shard_tokens=2**20, template="a") as writer:
        for number in range(records):
            answers = np.zeros(size, dtype=np.bool_)
            answers[-3:] = number < records // 2
            writer.add_chat(np.full(size, number, dtype=np.uint32), answers)
        writer.commit()
    return folder


@pytest.mark.usefixtures("place")
def test_a_run_of_chats_says_what_counts_and_what_is_cut(tmp_path: Path) -> None:
    folder = _chats(tmp_path / "chats", 20, 12)
    said: list[str] = []
    prepare_run(_job(data__source=folder, data__train_on="answers"), None, said.append)
    assert "30 of 240 tokens count: those of answers" in said
    assert "20 of 20 chats are longer than 8 tokens: sequences cut them" in said
    said.clear()
    prepare_run(_job(data__source=folder), None, said.append)
    assert '30 of 240 tokens are of answers; data.train_on = "all" counts them all' in said


@pytest.mark.usefixtures("place")
def test_a_part_without_answers_is_refused_where_it_is_read(tmp_path: Path) -> None:
    folder = _chats(tmp_path / "chats", 20, 12)
    held_out = {"data__validation_fraction": 0.2, "data__train_on": "answers"}
    prepare_run(_job(data__source=folder, **held_out), None, lambda _: None)
    validated = _job(data__source=folder, train__validate_every=1, **held_out)
    with pytest.raises(DataError) as caught:
        prepare_run(validated, None, lambda _: None)
    assert caught.value.rules == ("data-answers-counted",)
    assert "validation part" in str(caught.value)


@pytest.mark.usefixtures("place")
def test_text_has_no_answers() -> None:
    prepare([Path("text.txt")], Path("prepared"))
    job = _job(data__source="prepared", data__train_on="answers")
    with pytest.raises(DataError) as caught:
        prepare_run(job, None, lambda _: None)
    assert caught.value.rules == ("data-answers-told",)
    with pytest.raises(DataError) as caught:
        prepare_run(_job(data__train_on="answers"), None, lambda _: None)
    assert caught.value.rules == ("data-chat-template",)
