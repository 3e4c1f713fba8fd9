"""The data of a run hold as its records say them; a reader that goes wrong is named by its row."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pytest

from echelon.config.job import DataSettings
from echelon.core.settings.list_types import MixturePart
from echelon.launch.local.supervisor import RankPool
from echelon.proof.verdict import ProofPass
from echelon.proof.whole_run.own_data import DELIVER, data_pass, excerpted, why_not_here
from echelon.training.data.prepare import PrepareOptions, prepare
from tests.proof.layouts import layout
from tests.training.data.chats.made_tokenizers import (
    CHATS,
    MARKED,
    PAIRS,
    PLAIN,
    TURNS,
    tokenizer_folder,
    write_records,
)

WRONG = "tests.proof.whole_run.wrong_readers"
LENGTH = 24


def texts(folder: Path) -> str:
    """Write 40 documents of unequal lengths."""
    folder.mkdir()
    for number in range(40):
        text = f"document {number} of many; " * (number % 7 + 1)
        (folder / f"{number:02d}.txt").write_text(text, encoding="utf-8")
    return str(folder)


def records(file: Path) -> str:
    """Write 150 records."""
    lines = (json.dumps({"text": f"record {n}, " * (n % 5 + 1)}) for n in range(150))
    file.write_text("\n".join(lines), encoding="utf-8")
    return str(file)


def mixture(folder: Path) -> DataSettings:
    first, second = texts(folder / "texts"), records(folder / "records.jsonl")
    parts = ((first, 1.0, 100), (second, 3.0, 100), (second, 1.0, None))
    return DataSettings(
        mixture=tuple(MixturePart(path=p, weight=w, until_step=u) for p, w, u in parts),
        validation_fraction=0.1,
    )


def chats(folder: Path, template: str = MARKED) -> DataSettings:
    tokenizer = tokenizer_folder(folder / "tokenizer", template)
    source = write_records(folder / "chats.jsonl", [*CHATS, *PAIRS, *TURNS] * 20)
    return DataSettings(
        source=str(source), tokenizer=str(tokenizer), train_on="answers", validation_fraction=0.1
    )


def padded(folder: Path) -> DataSettings:
    source = texts(folder / "texts")
    return DataSettings(source=source, epoch_end="pad", validation_fraction=0.1)


def short(folder: Path) -> DataSettings:
    """Write 27 samples, of which the last is not full, and comes twice in an epoch."""
    file = folder / "short.txt"
    file.write_text("0123456789" * 64, encoding="utf-8")
    return DataSettings(source=str(file), epoch_end="pad", validation_fraction=0.0)


def long(folder: Path) -> DataSettings:
    """Write a text of several pieces and files of tokens."""
    file = folder / "long.txt"
    file.write_text("".join(f"line {n} of it\n" for n in range(4000)), encoding="utf-8")
    return DataSettings(source=str(file), validation_fraction=0.1)


def table(folder: Path) -> DataSettings:
    """Write a file of Arrow in one batch."""
    rows = pyarrow.table({"text": [f"record {n}, " * (n % 5 + 1) for n in range(150)]})
    file = folder / "rows.arrow"
    with pyarrow.OSFile(str(file), "wb") as out, pyarrow.ipc.new_stream(out, rows.schema) as to:
        to.write_table(rows)
    return DataSettings(source=str(file), validation_fraction=0.1)


def proven(pool: RankPool, data: DataSettings, deliver: str = DELIVER) -> ProofPass:
    plan = layout(dp=2, documents="separate")
    mathematics = replace(plan.mathematics, sequence_length=LENGTH)
    plan = replace(plan, mathematics=mathematics)
    return data_pass(plan, data, run_ranks=pool.run, deliver=deliver)


def held(result: ProofPass) -> bool:
    assert result.diagnosis is None, result.diagnosis.sentence()
    assert all(claim.compared for claim in result.claims)
    return len(result.claims) == 4


def test_texts_records_and_phases_hold(rank_pool: RankPool, tmp_path: Path) -> None:
    data = mixture(tmp_path)
    assert held(proven(rank_pool, data))
    source = data.mixture[1].path
    assert held(proven(rank_pool, DataSettings(source=source, tokenizer="bpe-300")))
    for kind in (long, table):
        assert held(proven(rank_pool, replace(kind(tmp_path), tokenizer="bpe-300")))
    assert held(proven(rank_pool, DataSettings(source=source, epoch_end="pad")))
    result = proven(rank_pool, DataSettings(source=source, validation_fraction=0.0))
    assert held(result)
    assert result.note == f"{source}: sequences of 24 tokens, from the first 1,048,576 bytes"


@pytest.mark.parametrize("template", [MARKED, PLAIN], ids=["marked", "plain"])
def test_chats_hold(rank_pool: RankPool, tmp_path: Path, template: str) -> None:
    data = chats(tmp_path, template)
    assert held(proven(rank_pool, data))
    # The same chats, prepared before.
    folder = tmp_path / "prepared"
    options = PrepareOptions(format="chat", shard_tokens=100)
    prepare([data.source], folder, tokenizer=data.tokenizer, options=options)
    prepared = replace(data, source=str(folder), tokenizer=str(folder / "tokenizer.json"))
    assert held(proven(rank_pool, prepared))


def test_the_corpus_of_every_machine_holds(rank_pool: RankPool) -> None:
    result = proven(rank_pool, DataSettings())
    assert held(result)
    assert result.note.startswith("stdlib: ")


BUGS = (
    (
        chats,
        "mask_of_answers_is_shifted",
        "sample 68 of",
        "the labels that count are shifted by +1",
    ),
    (chats, "questions_are_answers", "sample", "counts, and does not count by its record"),
    (chats, "documents_of_chats_start_at_ends", "sample", "documents start at [0, "),
    (padded, "held_out_documents_are_trained_on", "training part of", " tokens instead of "),
    (padded, "held_out_part_is_the_head", "sample", "of the training part of"),
    (padded, "last_document_is_dropped", "training part of", " tokens instead of "),
    (padded, "samples_begin_a_token_late", "sample", "it begins +1 tokens from where it must"),
    (padded, "epochs_are_not_padded", "sample", "it is sample "),
    (short, "padded_tokens_are_counted_as_if_they_were_not", "tokens that", " tokens count inst"),
    (mixture, "phases_change_a_step_late", "sample", "of the training part of "),
    (mixture, "sources_begin_anew_in_each_phase", "sample", "of the training part of "),
    (
        long,
        "pieces_of_a_text_are_documents",
        "training part of",
        "document 0 has 5,006 tokens instead of",
    ),
    (long, "shards_are_read_on_from_where_the_last_began", "training part of", " are others"),
    (table, "rows_behind_the_first_are_skipped", "training part of", "document 6 has 0 tokens"),
    (chats, "documents_of_a_part_are_those_of_the_head", "sample", "documents start at [0"),
)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("data", "bug", "subject", "says"), BUGS, ids=[bug[1] for bug in BUGS])
def test_a_wrong_reader_is_named(
    rank_pool: RankPool, tmp_path: Path, data: Any, bug: str, subject: str, says: str
) -> None:
    diagnosis = proven(rank_pool, data(tmp_path), f"{WRONG}:{bug}").diagnosis
    assert diagnosis is not None
    assert diagnosis.rule == "prove-data"
    assert diagnosis.tensor.startswith(subject), diagnosis.sentence()
    assert says in diagnosis.says, diagnosis.sentence()


def test_a_phase_that_changes_late_is_seen_in_its_first_step(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    result = proven(rank_pool, mixture(tmp_path), f"{WRONG}:phases_change_a_step_late")
    assert result.diagnosis is not None
    assert result.diagnosis.step == 2


def test_data_that_are_not_here_are_said_to_be_unproven(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    absent = str(tmp_path / "nothing")
    result = proven(rank_pool, DataSettings(source=absent))
    assert result.holds
    assert result.claims == ()
    assert result.note == f"data not found here: not proven (there is no {absent})"
    assert why_not_here(DataSettings(source="hf://some/data")).endswith("over a network")
    assert why_not_here(DataSettings(tokenizer=absent)) == f"there is no tokenizer {absent}"
    assert why_not_here(DataSettings()) == ""


def test_an_excerpt_has_early_phases_and_enough_held_out(tmp_path: Path) -> None:
    data = replace(mixture(tmp_path), validation_fraction=1e-6)
    ends = [part.until_step for part in excerpted(data).mixture]
    assert ends == [2, 2, None]
    assert excerpted(data).validation_fraction == 0.01
    assert excerpted(replace(data, validation_fraction=0.0)).validation_fraction == 0.0
