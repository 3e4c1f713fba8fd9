"""What is said of prepared data and of a sample is what is in it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from echelon.core.errors import ConfigError
from echelon.core.settings.list_types import MixturePart, phases_of
from echelon.training.data.batches import BatchLayout, training_batch
from echelon.training.data.dataset import TokenDataset
from echelon.training.data.look import DOCUMENT_BORDER, look_at_sample, look_at_sources
from echelon.training.data.mixed_dataset import mix, open_data
from echelon.training.data.prepare import prepare
from echelon.training.data.tokenizer import ByteTokenizer
from echelon.training.data.writer import DatasetWriter
from tests.training.data.conftest import MakeDataset

LAYOUT = BatchLayout(dp=2, num_microbatches=1, microbatch_sequences=2, sequence_length=8)


def test_tokens_documents_and_ids_are_counted(make_dataset: MakeDataset) -> None:
    (found,) = look_at_sources(make_dataset([1, 2, 3, 4, 5, 100]))
    assert (found.num_tokens, found.num_documents, found.longest) == (115, 6, 100)
    assert found.lengths == ((1, 1), (2, 1), (4, 2), (8, 1), (128, 1))
    assert sum(count for _, count in found.lengths) == found.num_documents
    # 0 to 113 but for the places of ends of documents, and the end itself.
    ends = {0, 2, 5, 9, 14, 114}
    assert found.distinct == len(set(range(115)) - ends) + 1
    assert (found.vocabulary, found.share) == (257, None)


def test_a_part_has_its_own_documents(make_dataset: MakeDataset) -> None:
    dataset = make_dataset([50, 50, 50, 50])
    training, validation = dataset.split(0.25)
    assert training.document_lengths().tolist() == [50, 50, 50]
    assert validation.document_lengths().tolist() == [50]
    assert dataset.document_lengths().tolist() == [50, 50, 50, 50]


def test_a_sample_is_the_text_that_the_step_reads(tmp_path: Path) -> None:
    folders: list[Path] = []
    for name in ("a", "b"):
        text = tmp_path / f"{name}.jsonl"
        text.write_text("".join(f'{{"text": "{name}{n:03d}"}}\n' for n in range(60)))
        prepare([text], tmp_path / name)
        folders.append(tmp_path / name)
    parts = [TokenDataset.open(folder) for folder in folders]
    phases = phases_of([MixturePart(path="a", weight=3), MixturePart(path="b", weight=1)])
    mixed = mix(tmp_path, ["a", "b"], parts, phases)
    for sample in range(4):
        found = look_at_sample(mixed, LAYOUT, seed=0, step=2, sample=sample, epoch_end="continue")
        batch = training_batch(mixed, LAYOUT, seed=0, step=1)
        inputs_BT, _ = mixed.read(batch.sample_ids, 8)
        expected = "".join(
            f"{DOCUMENT_BORDER}\n" if token == 256 else chr(token) for token in inputs_BT[sample]
        )
        assert found.text == expected
        assert found.source in found.text or found.source == "b"
        assert set("ab") & set(found.text) <= {found.source}
        assert found.sources_of_step == (3, 1)
        assert found.data_rank == sample // 2
    looks = look_at_sources(mixed, steps=10, layout=LAYOUT)
    assert [one.share for one in looks] == [0.75, 0.25]
    assert looks[0].times == 30 / parts[0].num_samples(8)


@pytest.mark.parametrize(("step", "sample"), [(0, 0), (1, 4), (1, -1)])
def test_a_sample_that_is_not_there_is_refused(
    make_dataset: MakeDataset, step: int, sample: int
) -> None:
    with pytest.raises(ConfigError) as error:
        look_at_sample(
            make_dataset([100]), LAYOUT, seed=0, step=step, sample=sample, epoch_end="continue"
        )
    assert error.value.rules == ("sample-of-step",)


def test_a_sample_of_chats_is_shown_whole_and_says_what_counts(tmp_path: Path) -> None:
    with DatasetWriter(tmp_path / "a", ByteTokenizer(), shard_tokens=99, template="a") as writer:
        for text in (b"ask: yes!", b"why: because", b"well: so be it, then"):
            answers = np.arange(len(text)) >= text.index(b":") + 2
            writer.add_chat(np.frombuffer(text, dtype=np.uint8).astype(np.uint32), answers)
        writer.commit()
    dataset = open_data(tmp_path / "a", train_on="answers")
    layout = replace(LAYOUT, sequence_length=16, dp=1, microbatch_sequences=3)
    shown = [
        look_at_sample(dataset, layout, seed=0, step=1, sample=one, epoch_end="continue")
        for one in range(3)
    ]
    by_text = {one.text: one for one in shown}
    first = by_text[f"ask: yes!{DOCUMENT_BORDER}\nwhy: be"]
    assert (first.num_documents, first.counted) == (2, len("yes!") + len("bec"))
