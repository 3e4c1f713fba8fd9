"""Samples are read as they were written; damage is found before it is trained on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from echelon.core.errors import DataError
from echelon.models.batch import IGNORED_LABEL as MODELS_IGNORED_LABEL
from echelon.training.data.dataset import IGNORED_LABEL, TokenDataset, document_starts
from echelon.training.data.index import read_index
from echelon.training.data.prepare import prepare
from echelon.training.data.tokenizer import train_tokenizer
from tests.walks import examples

MakeDataset = Callable[..., TokenDataset]


def test_the_ignored_label_is_the_models() -> None:
    assert IGNORED_LABEL == MODELS_IGNORED_LABEL


@pytest.mark.slow
@given(
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=8),
    shard_tokens=st.integers(1, 80),
    sequence_length=st.integers(1, 20),
)
@settings(
    max_examples=examples(60),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_every_token_but_the_first_is_a_label_once(
    make_dataset: MakeDataset, sizes: list[int], shard_tokens: int, sequence_length: int
) -> None:
    """Whatever the shards: the samples in order are the tokens in order, and nothing is dropped."""
    dataset = make_dataset(sizes, shard_tokens=shard_tokens)
    tokens = dataset.tokens(0, dataset.num_tokens)
    assert len(tokens) == sum(sizes) == dataset.num_tokens
    assert (tokens == 256).sum() == len(sizes)
    if len(tokens) <= sequence_length:
        return
    ids = np.arange(dataset.num_samples(sequence_length))
    inputs_BT, labels_BT = dataset.read(ids, sequence_length)
    assert inputs_BT.dtype == labels_BT.dtype == np.int64
    counted = labels_BT != IGNORED_LABEL
    assert labels_BT[counted].tolist() == tokens[1:].tolist()
    assert inputs_BT[counted].tolist() == tokens[:-1].tolist()
    assert dataset.count_valid(ids, sequence_length) == len(tokens) - 1
    for i in ids:
        assert dataset.count_valid(ids[i : i + 1], sequence_length) == counted[i].sum()


@given(
    sizes=st.lists(st.integers(1, 12), min_size=2, max_size=12),
    sequence_length=st.integers(1, 20),
)
@settings(
    max_examples=examples(60),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_documents_start_after_the_end_of_others(
    make_dataset: MakeDataset, sizes: list[int], sequence_length: int
) -> None:
    dataset = make_dataset(sizes)
    if dataset.num_tokens <= sequence_length:
        return
    # Where each token stands in the whole, and which document it is of.
    document = np.repeat(np.arange(len(sizes)), sizes)
    ids = np.arange(dataset.num_samples(sequence_length))
    inputs_BT, _ = dataset.read(ids, sequence_length)
    for sample, starts in zip(
        ids, document_starts(inputs_BT, dataset.index.tokenizer.end_of_document), strict=True
    ):
        assert starts[0] == 0
        own = document[sample * sequence_length : (sample + 1) * sequence_length]
        changes = [t for t in range(1, len(own)) if own[t] != own[t - 1]]
        # An empty document is its end alone, and belongs to the one before it.
        empty = [t for t in changes if inputs_BT[sample, t] == 256]
        assert list(starts) == [0, *(t for t in changes if t not in empty)]


def test_samples_past_the_end_hold_nothing_that_counts(make_dataset: MakeDataset) -> None:
    dataset = make_dataset([10])
    inputs_BT, labels_BT = dataset.read(np.array([2, 3, 50]), 4)
    assert inputs_BT[0].tolist() == [8, 256, 256, 256]
    assert labels_BT[0].tolist() == [256, -100, -100, -100]
    assert (inputs_BT[1:] == 256).all()
    assert (labels_BT[1:] == -100).all()
    assert dataset.count_valid(np.array([2, 3, 50]), 4) == 1


@given(
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=12),
    fraction=st.floats(0.01, 0.99),
)
@settings(
    max_examples=examples(60),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_the_parts_are_disjoint_and_everything(
    make_dataset: MakeDataset, sizes: list[int], fraction: float
) -> None:
    dataset = make_dataset(sizes, shard_tokens=25)
    wanted = round(sum(sizes) * fraction)
    assume(wanted < sum(sizes))
    if not wanted:
        with pytest.raises(DataError) as raised:
            dataset.split(fraction)
        assert raised.value.rules == ("data-split-fraction",)
        return
    training, validation = dataset.split(fraction)
    assert (training.start, training.stop) == (0, validation.start)
    assert validation.stop == sum(sizes)
    assert wanted <= 2 * validation.num_tokens <= 4 * wanted
    parts = [part.tokens(0, part.num_tokens).tolist() for part in (training, validation)]
    assert parts[0] + parts[1] == dataset.tokens(0, sum(sizes)).tolist()


def test_the_cut_lies_between_documents(make_dataset: MakeDataset) -> None:
    training, validation = make_dataset([30, 30, 30, 10]).split(0.12)
    assert (training.num_tokens, validation.num_tokens) == (90, 10)
    # One document of everything: the cut lies inside it.
    training, validation = make_dataset([100]).split(0.12)
    assert (training.num_tokens, validation.num_tokens) == (88, 12)


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, 2.0])
def test_a_fraction_out_of_range_is_refused(make_dataset: MakeDataset, fraction: float) -> None:
    with pytest.raises(DataError) as raised:
        make_dataset([100]).split(fraction)
    assert raised.value.rules == ("data-split-fraction",)
    assert raised.value.problems[0].key == "data.validation_fraction"


def test_a_sequence_longer_than_the_data_is_refused(make_dataset: MakeDataset) -> None:
    dataset = make_dataset([100])
    assert dataset.num_samples(99) == 1
    with pytest.raises(DataError) as raised:
        dataset.num_samples(100)
    assert raised.value.rules == ("data-too-short",)
    assert raised.value.problems[0].suggestions == ("at most 99",)


def test_a_vocabulary_that_is_too_small_is_refused(make_dataset: MakeDataset) -> None:
    dataset = make_dataset([100])
    dataset.check_vocabulary(257)
    with pytest.raises(DataError) as raised:
        dataset.check_vocabulary(256)
    assert raised.value.rules == ("data-token-range",)
    assert raised.value.problems[0].suggestions == ("257",)


def _overwrite(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as stream:
        stream.seek(offset)
        stream.write(data)


def test_an_edited_shard_is_found_by_its_hash(make_dataset: MakeDataset) -> None:
    path = make_dataset([100], shard_tokens=40).path
    TokenDataset.open(path, verify=True)
    _overwrite(path / "shard-00001.bin", 6, b"\x07\x00")
    TokenDataset.open(path)
    with pytest.raises(DataError) as raised:
        TokenDataset.open(path, verify=True)
    assert raised.value.rules == ("data-shard-hash",)
    assert "shard-00001.bin" in str(raised.value)


def test_an_impossible_token_is_found_when_it_is_read(make_dataset: MakeDataset) -> None:
    dataset = make_dataset([100])
    _overwrite(dataset.path / "shard-00000.bin", 20, b"\xff\xff")
    dataset.read(np.array([1]), 16)
    with pytest.raises(DataError) as raised:
        dataset.read(np.array([0]), 16)
    assert raised.value.rules == ("data-token-range",)
    assert "token id 65535" in str(raised.value)


def test_every_damaged_size_is_reported_at_once(make_dataset: MakeDataset) -> None:
    path = make_dataset([100], shard_tokens=40).path
    (path / "shard-00000.bin").unlink()
    _overwrite(path / "shard-00001.bin", 80, b"\x00")
    with (path / "shard-00002.bin").open("r+b") as stream:
        stream.truncate(10)
    with pytest.raises(DataError) as raised:
        TokenDataset.open(path)
    assert raised.value.rules == ("data-shard-size",) * 3
    text = str(raised.value)
    assert "shard-00000.bin is missing" in text
    assert "shard-00001.bin is too long: 81 bytes, the index states 80" in text
    assert "shard-00002.bin is truncated: 10 bytes, the index states 40" in text


@pytest.mark.parametrize("place", ["nothing", "folder", "file"])
def test_what_was_not_prepared_is_refused(tmp_path: Path, place: str) -> None:
    path = tmp_path / "data"
    if place == "folder":
        path.mkdir()
        (path / "shard-00000.bin").write_bytes(b"\0\0")
    elif place == "file":
        path.write_text("text")
    with pytest.raises(DataError) as raised:
        TokenDataset.open(path)
    assert raised.value.rules == ("data-prepared",)
    if place == "folder":
        assert "there is: shard-00000.bin" in str(raised.value)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda text: text[: len(text) // 2], "data-index"),
        (lambda text: "[]", "data-index"),
        (lambda text: text.replace('"num_tokens": 100', '"num_tokens": 99'), "data-index"),
        (lambda text: text.replace('"num_tokens"', '"tokens"'), "data-index"),
        (lambda text: text.replace('"uint16"', '"uint8"'), "data-index"),
        (lambda _: "[" * 200_000, "data-index"),
        (lambda _: '{"schema": 1}', "data-index"),
        (lambda text: text.replace('"schema": 1', '"schema": 3'), "data-schema"),
        (lambda text: text.replace('"schema": 1', '"scheme": 1'), "data-schema"),
    ],
)
def test_a_damaged_index_is_refused(
    make_dataset: MakeDataset, change: Callable[[str], str], rule: str
) -> None:
    path = make_dataset([100]).path
    index = path / "index.json"
    changed = change(index.read_text())
    assert changed != index.read_text()
    index.write_text(changed)
    with pytest.raises(DataError) as raised:
        TokenDataset.open(path)
    assert raised.value.rules == (rule,)


@pytest.mark.parametrize("name", ["../shard-00000.bin", "/etc/passwd", ".."])
def test_a_file_outside_of_the_folder_is_not_read(make_dataset: MakeDataset, name: str) -> None:
    path = make_dataset([100]).path
    shutil.copy(path / "shard-00000.bin", path.parent)
    index = read_index(path)
    shards = (replace(index.shards[0], file=name),)
    (path / "index.json").write_text(replace(index, shards=shards).with_hash().to_text())
    with pytest.raises(DataError) as raised:
        TokenDataset.open(path)
    assert raised.value.rules == ("data-index",)
    assert "outside of its folder" in str(raised.value)


def test_the_tokenizer_lies_beside_the_data(tmp_path: Path, text_file: Path) -> None:
    prepare([text_file], tmp_path / "tokens", tokenizer="bpe-280")
    dataset = TokenDataset.open(tmp_path / "tokens", verify=True)
    tokens = dataset.tokens(0, dataset.num_tokens)
    assert dataset.tokenizer().decode(tokens.tolist()) == text_file.read_text()
    assert read_index(tmp_path / "tokens").tokenizer.name == "bpe-280"

    other = train_tokenizer("bpe-270", iter(["another text"])).to_json()
    assert other is not None
    (tmp_path / "tokens" / "tokenizer.json").write_text(other, encoding="utf-8")
    with pytest.raises(DataError) as raised:
        dataset.tokenizer()
    assert raised.value.rules == ("data-tokenizer-same",)

    (tmp_path / "tokens" / "tokenizer.json").unlink()
    with pytest.raises(DataError) as raised:
        TokenDataset.open(tmp_path / "tokens")
    assert raised.value.rules == ("data-shard-size",)


def test_the_index_is_readable_without_us(make_dataset: MakeDataset) -> None:
    path = make_dataset([60, 40], shard_tokens=70).path
    index = json.loads((path / "index.json").read_text())
    tokens = np.concatenate(
        [np.fromfile(path / shard["file"], dtype=index["dtype"]) for shard in index["shards"]]
    )
    ends = np.fromfile(path / index["documents"]["file"], dtype="<u8")
    assert len(tokens) == index["num_tokens"] == 100
    assert ends.tolist() == [60, 100]
    assert tokens[59] == tokens[99] == index["tokenizer"]["end_of_document"]
