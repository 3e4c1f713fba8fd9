"""Several prepared sources as one: samples, splits, batches, files, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from echelon.core.errors import DataError
from echelon.core.settings.list_types import MIXTURE_PLACES, MixturePart, phases_of, places_of
from echelon.training.data.batches import (
    BatchLayout,
    num_validation_batches,
    training_batch,
    validation_batch,
)
from echelon.training.data.dataset import TokenDataset
from echelon.training.data.mixed_dataset import MixedDataset, Mixture, mix, open_data, write_mixture
from tests.training.data.conftest import MakeDataset

T = 8

PARTS = (
    MixturePart(path="a", weight=3, until_step=10),
    MixturePart(path="b", weight=1, until_step=10),
    MixturePart(path="c", weight=0.5),
    MixturePart(path="a", weight=0.5),
)


def _mixed(make_dataset: MakeDataset) -> MixedDataset:
    """Return sources of 20, 13 and 6 samples; the last sample of the second is not full."""
    parts = [make_dataset([161]), make_dataset([60, 40]), make_dataset([49])]
    phases = phases_of(
        [
            MixturePart(path="0", weight=2, until_step=3),
            MixturePart(path="1", weight=2, until_step=3),
            MixturePart(path="1", weight=1),
            MixturePart(path="2", weight=1),
        ]
    )
    return mix(Path("here"), ["0", "1", "2"], parts, phases)


def _layout(dp: int = 1, microbatches: int = 1) -> BatchLayout:
    return BatchLayout(
        dp=dp,
        num_microbatches=microbatches,
        microbatch_sequences=4 // (dp * microbatches),
        sequence_length=T,
    )


def test_a_sample_is_that_of_its_source(make_dataset: MakeDataset) -> None:
    mixed = _mixed(make_dataset)
    counts = [part.num_samples(T) for part in mixed.parts]
    assert counts == [20, 13, 6]
    assert mixed.num_samples(T) == 39
    ids = np.array([0, 19, 20, 32, 33, 38], dtype=np.int64)
    assert mixed.sources(ids, T).tolist() == [0, 0, 1, 1, 2, 2]
    inputs_BT, labels_BT = mixed.read(ids, T)
    for row, (source, local) in enumerate([(0, 0), (0, 19), (1, 0), (1, 12), (2, 0), (2, 5)]):
        one, labels = mixed.parts[source].read(np.array([local]), T)
        assert (inputs_BT[row] == one[0]).all()
        assert (labels_BT[row] == labels[0]).all()
    assert mixed.count_valid(ids, T) == int((labels_BT >= 0).sum())


def test_every_layout_reads_the_same_and_each_source_without_repetition(
    make_dataset: MakeDataset,
) -> None:
    mixed, seen = _mixed(make_dataset), list[int]()
    for step in range(6):
        whole = training_batch(mixed, _layout(), seed=3, step=step).sample_ids.tolist()
        seen += whole
        sources = mixed.sources(np.array(whole), T)
        assert np.bincount(sources, minlength=3).tolist() == ([2, 2, 0] if step < 3 else [0, 2, 2])
        for dp, microbatches in ((2, 1), (4, 1), (2, 2)):
            batch = training_batch(mixed, _layout(dp, microbatches), seed=3, step=step)
            shares = [
                batch.microbatch(dp_rank=rank, microbatch=number).sample_ids_B.tolist()
                for rank in range(dp)
                for number in range(microbatches)
            ]
            assert [one for share in shares for one in share] == whole
    assert len(set(seen)) == len(seen), "no sample comes twice before its source is read"
    other = training_batch(mixed, _layout(), seed=4, step=0).sample_ids.tolist()
    assert other != seen[:4]


def test_validation_reads_each_token_of_each_source_once(make_dataset: MakeDataset) -> None:
    training, validation = _mixed(make_dataset).split(0.3)
    counted = sum(
        validation_batch(validation, _layout(), batch=number).num_valid
        for number in range(num_validation_batches(validation, _layout()))
    )
    assert counted == sum(part.num_tokens - 1 for part in validation.parts)
    for part, other, whole in zip(
        training.parts, validation.parts, _mixed(make_dataset).parts, strict=True
    ):
        assert part.num_tokens + other.num_tokens == whole.num_tokens


def test_what_is_written_is_opened(make_dataset: MakeDataset, tmp_path: Path) -> None:
    mixed, folder = _mixed(make_dataset), tmp_path / "mixture"
    write_mixture(folder, mixed)
    found = open_data(folder, verify=True)
    assert isinstance(found, MixedDataset)
    assert found.index.hash == mixed.index.hash
    assert found.mixture == mixed.mixture
    ids = [training_batch(one, _layout(), seed=0, step=4).sample_ids for one in (found, mixed)]
    assert ids[0].tolist() == ids[1].tolist()
    assert isinstance(open_data(mixed.parts[0].path), TokenDataset)
    told = json.loads((folder / "mixture.json").read_text())
    told["hashes"][1] = "0" * 64
    (folder / "mixture.json").write_text(json.dumps(told))
    with pytest.raises(DataError, match="has changed since") as error:
        open_data(folder)
    assert error.value.rules == ("data-index",)


def test_tokenizers_that_differ_and_ids_beyond_the_model_are_refused(
    make_dataset: MakeDataset,
) -> None:
    mixed = _mixed(make_dataset)
    with pytest.raises(DataError) as error:
        mixed.check_vocabulary(200)
    assert error.value.rules == ("data-token-range",) * 3
    other = mixed.parts[2]
    tokenizer = replace(other.index.tokenizer, hash="f" * 64)
    parts = (*mixed.parts[:2], replace(other, index=replace(other.index, tokenizer=tokenizer)))
    with pytest.raises(DataError) as error:
        mix(Path("here"), mixed.names, parts, mixed.mixture.phases)
    assert error.value.rules == ("data-tokenizer-same",)


def test_phases_have_a_weight_for_each_source() -> None:
    found = [(phase.until_step, phase.weights) for phase in phases_of(PARTS)]
    assert found == [(10, (3.0, 1.0, 0.0)), (None, (0.5, 0.0, 0.5))]


@pytest.mark.parametrize("weights", [(1.0,), (1.0, 2.0), (0.7, 0.2, 0.1), (1e6, 31.0, 8.0, 0.0)])
def test_places_are_those_of_the_weights_to_one(weights: tuple[float, ...]) -> None:
    places = places_of(weights)
    assert sum(places) == MIXTURE_PLACES
    for weight, count in zip(weights, places, strict=True):
        assert abs(count - MIXTURE_PLACES * weight / sum(weights)) < 1


def test_each_number_of_a_source_comes_once_and_in_order() -> None:
    mixture, seen = Mixture(phases=phases_of(PARTS)), [list[int](), list[int](), list[int]()]
    for step in range(30):
        sources, numbers = mixture.sequences(step=step, count=8)
        for source, number in zip(sources.tolist(), numbers.tolist(), strict=True):
            seen[source].append(number)
        counts = np.bincount(sources, minlength=3).tolist()
        assert counts == ([6, 2, 0] if step < 10 else [4, 0, 4])
        given = mixture.given(steps=step + 1, count=8).tolist()
        assert given == [len(numbers) for numbers in seen]
    assert seen == [list(range(len(numbers))) for numbers in seen]


def test_any_stretch_holds_each_source_in_its_share() -> None:
    mixture = Mixture(phases=phases_of([MixturePart(path=p, weight=w) for p, w in WEIGHTS.items()]))
    for step in (0, 1, 77, 4095, 10**9):
        sources, _ = mixture.sequences(step=step, count=1000)
        for source, weight in enumerate(WEIGHTS.values()):
            assert abs(int((sources == source).sum()) - 1000 * weight) <= 2
    assert mixture.most_in_a_step(10).tolist() == [7, 4, 1]


WEIGHTS = {"a": 0.65, "b": 0.3, "c": 0.05}


def test_a_step_far_ahead_follows_from_the_one_before() -> None:
    mixture, far = Mixture(phases=phases_of(PARTS)), 3 * MIXTURE_PLACES
    before = mixture.given(steps=far, count=8)
    sources, numbers = mixture.sequences(step=far, count=8)
    for source in range(3):
        mine = numbers[sources == source].tolist()
        assert mine == list(range(before[source], before[source] + len(mine)))
