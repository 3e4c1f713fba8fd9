"""Prepared chats: what is kept beside the tokens, which labels count, where chats start."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from echelon.config.job import DataSettings
from echelon.core.errors import DataError
from echelon.core.settings.list_types import MixturePart
from echelon.training.data.batches import BatchLayout, training_batch
from echelon.training.data.corpus import data_of_settings
from echelon.training.data.dataset import IGNORED_LABEL, TokenDataset
from echelon.training.data.index import read_index
from echelon.training.data.mixed_dataset import MixedDataset, open_data
from echelon.training.data.prepare import PrepareOptions, describe, prepare
from echelon.training.data.tokenizer import ByteTokenizer
from echelon.training.data.writer import DatasetWriter
from tests.training.data.chats.made_tokenizers import (
    CHATS,
    MARKED,
    PAIRS,
    tokenizer_folder,
    turn,
    write_records,
)

CHAT = PrepareOptions(format="chat")


def written(folder: Path, sizes: list[int], seed: int = 0) -> tuple[Path, np.ndarray, np.ndarray]:
    """Write chats of random tokens, a third of them of answers; return them and their bits."""
    random = np.random.default_rng(seed)
    tokens = random.integers(0, 250, sum(sizes)).astype(np.uint32)
    answers = random.random(len(tokens)) < 1 / 3
    starts = np.cumsum([0, *sizes])
    with DatasetWriter(folder, ByteTokenizer(), shard_tokens=17, template="a") as writer:
        for start, stop in itertools.pairwise(starts):
            writer.add_chat(tokens[start:stop], answers[start:stop])
        writer.commit()
    answers[starts[:-1]] = False
    return folder, tokens, answers


def test_labels_count_where_answers_are(tmp_path: Path) -> None:
    """Every sample of both parts, and the counts that no rank reads tokens for."""
    folder, tokens, answers = written(tmp_path / "data", [13, 1, 40, 29, 7, 21])
    dataset = open_data(folder, verify=True, train_on="answers")
    expected = np.where(answers, tokens.astype(np.int64), IGNORED_LABEL)
    for part in (dataset, *dataset.split(0.2)):
        assert isinstance(part, TokenDataset)
        ids = np.arange(part.num_samples(8) + 1)
        inputs_BT, labels_BT = part.read(ids, 8)
        wanted = np.full(labels_BT.size, IGNORED_LABEL)
        wanted[: part.num_tokens - 1] = expected[part.start + 1 : part.stop]
        assert labels_BT.reshape(-1).tolist() == wanted.tolist()
        whole = open_data(folder).read(ids, 8)[0] if part is dataset else inputs_BT
        assert np.array_equal(inputs_BT, whole)
        for one in ids:
            counted = int((labels_BT[one] != IGNORED_LABEL).sum())
            assert part.count_valid(ids[one : one + 1], 8) == counted
        assert part.num_answers() == int((wanted != IGNORED_LABEL).sum())
    plain = open_data(folder, train_on="all")
    assert plain.count_valid(np.arange(plain.num_samples(8)), 8) == len(tokens) - 1


def test_chats_start_where_they_were_written_not_where_a_token_stands(tmp_path: Path) -> None:
    """A template may write the end-of-document inside of a chat, or nowhere."""
    end = ByteTokenizer().description.end_of_document
    with DatasetWriter(tmp_path / "a", ByteTokenizer(), shard_tokens=99, template="a") as writer:
        for chat in ([1, end, 2, 3, 4], [5, 6, 7], [8, 9, end, 10, 11, 12, 13]):
            writer.add_chat(np.asarray(chat, dtype=np.uint32), np.ones(len(chat), dtype=np.bool_))
        writer.commit()
    dataset = open_data(tmp_path / "a", train_on="answers")
    layout = BatchLayout(
        dp=1,
        num_microbatches=1,
        microbatch_sequences=2,
        sequence_length=8,
        separate_documents=True,
    )
    batch = training_batch(dataset, layout, seed=0, step=0)
    read = batch.microbatch(dp_rank=0, microbatch=0)
    assert read.documents is not None
    by_sample = dict(zip(read.sample_ids_B.tolist(), read.documents, strict=True))
    assert by_sample == {0: (0, 5), 1: (0,)}
    assert batch.num_valid == int((read.labels_BT != IGNORED_LABEL).sum()) == 4 + 2 + 6


def test_a_mixture_counts_as_its_parts_do(tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path / "tokenizer", MARKED)
    sources = [
        write_records(tmp_path / "chats.jsonl", CHATS),
        write_records(tmp_path / "pairs.jsonl", PAIRS),
    ]
    settings = DataSettings(
        tokenizer=str(folder),
        mixture=tuple(MixturePart(path=str(source), weight=0.5) for source in sources),
        train_on="answers",
    )
    data = data_of_settings(settings, tmp_path / "runs")
    dataset = open_data(data, train_on="answers")
    assert isinstance(dataset, MixedDataset)
    ids = np.arange(dataset.num_samples(8))
    inputs_BT, labels_BT = dataset.read(ids, 8)
    counted = int((labels_BT != IGNORED_LABEL).sum())
    assert counted == dataset.count_valid(ids, 8) == dataset.num_answers() > 0
    assert len(dataset.document_lengths()) == 4
    starts = dataset.document_starts(ids, inputs_BT)
    assert sum(len(one) for one in starts) > len(ids)
    with pytest.raises(DataError) as refused:
        open_data(_text(tmp_path, folder), train_on="answers")
    assert refused.value.rules == ("data-answers-told",)


def _text(folder: Path, tokenizer: Path) -> Path:
    (folder / "book.txt").write_text("Call me Ishmael. " * 20)
    prepare([folder / "book.txt"], folder / "book", tokenizer=str(tokenizer))
    return folder / "book"


def test_chats_are_a_new_version_and_text_is_the_old_one(tmp_path: Path) -> None:
    """Text keeps its bytes, its hash and its version: versions without answers read it."""
    folder = tokenizer_folder(tmp_path / "tokenizer", MARKED)
    chats = write_records(tmp_path / "chats.jsonl", [*CHATS, *PAIRS])
    summary = prepare([chats], tmp_path / "chats", tokenizer=str(folder), options=CHAT)
    assert summary.dataset == describe(tmp_path / "chats")
    assert summary.dataset.num_documents == 4
    index = read_index(tmp_path / "chats")
    assert index.schema == 2
    assert index.answers is not None
    assert 0 < index.answers.num_answers == summary.dataset.num_answers < index.num_tokens  # pyright: ignore[reportOptionalOperand]
    assert (tmp_path / "chats" / "chat_template.jinja").read_text() == MARKED
    text = json.loads((_text(tmp_path, folder) / "index.json").read_text())
    assert text["schema"] == 1
    assert "answers" not in text
    packed = tmp_path / "chats" / "answers.bin"
    packed.write_bytes(bytes([packed.read_bytes()[0] ^ 1]) + packed.read_bytes()[1:])
    with pytest.raises(DataError) as refused:
        describe(tmp_path / "chats")
    assert refused.value.rules == ("data-shard-hash",)


def test_a_run_prepares_chats_once_and_anew_under_another_template(tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path / "tokenizer", MARKED)
    chats = write_records(tmp_path / "chats.jsonl", CHATS)
    settings = DataSettings(source=str(chats), tokenizer=str(folder), train_on="answers")
    first = data_of_settings(settings, tmp_path / "runs")
    assert data_of_settings(settings, tmp_path / "runs") == first
    (folder / "chat_template.jinja").write_text("{# #}" + MARKED)
    assert data_of_settings(settings, tmp_path / "runs") != first


@pytest.mark.parametrize(
    ("lines", "rule"),
    [
        ("", "data-empty"),
        ("\n\n", "data-empty"),
        ("no json\n", "data-record"),
        ('[{"messages": []}]\n', "data-record"),
        (json.dumps({"messages": [turn("user", "a")]}) + "\n", "data-answers-counted"),
    ],
)
def test_files_without_chats_are_refused(tmp_path: Path, lines: str, rule: str) -> None:
    folder = tokenizer_folder(tmp_path / "tokenizer", MARKED)
    (tmp_path / "chats.jsonl").write_text(lines)
    with pytest.raises(DataError) as refused:
        prepare([tmp_path / "chats.jsonl"], tmp_path / "out", tokenizer=str(folder), options=CHAT)
    assert refused.value.rules == (rule,)
    assert not (tmp_path / "out").exists()
