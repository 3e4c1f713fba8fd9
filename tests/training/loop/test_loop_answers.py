"""A run whose answers alone count is the same under every layout, however unequal ranks are.

Many microbatches have no counted token, and so have some ranks in a whole step, or all.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest

from echelon.launch.local.supervisor import RankPool
from echelon.training.data.batches import BatchLayout, training_batch
from echelon.training.data.dataset import IGNORED_LABEL
from echelon.training.data.mixed_dataset import open_data
from echelon.training.data.tokenizer import ByteTokenizer
from echelon.training.data.writer import DatasetWriter
from tests.training.small_runs import FP64, read_steps, train

SETTINGS = (
    *FP64,
    "data.train_on=answers",
    "data.validation_fraction=0.25",
    "batch.documents=separate",
    "train.validate_every=2",
    "train.steps=4",
)
LAYOUTS = {
    "dp2": ("mesh.dp_replicate=2",),
    "zero3": ("mesh.dp_shard=2", "zero.stage=3"),
    "cp2": ("mesh.cp=2",),
    "pp2": ("mesh.pp=2",),
    "tp2": ("mesh.tp=2",),
}


def answers_of_few(folder: Path) -> Path:
    """Write 30 chats, every second of which has answers: a few tokens at its end."""
    random = np.random.default_rng(4)
    with DatasetWriter(folder, ByteTokenizer(), shard_tokens=2**20, template="a") as writer:
        for number in range(30):
            size = int(random.integers(9, 40))
            answers = np.zeros(size, dtype=np.bool_)
            if number % 2 == 0:
                answers[-int(random.integers(1, 9)) :] = True
            writer.add_chat(random.integers(0, 256, size).astype(np.uint32), answers)
        writer.commit()
    return folder


def counts(data: Path, step: int) -> list[list[int]]:
    """Return the counted labels of each microbatch of each of two data ranks."""
    dataset, _ = open_data(data, train_on="answers").split(0.25)
    layout = BatchLayout(dp=2, num_microbatches=2, microbatch_sequences=1, sequence_length=16)
    batch = training_batch(dataset, layout, seed=0, step=step)
    found = [
        [
            int((batch.microbatch(dp_rank=rank, microbatch=one).labels_BT != IGNORED_LABEL).sum())
            for one in range(2)
        ]
        for rank in range(2)
    ]
    assert sum(map(sum, found)) == batch.num_valid
    return found


def steps_and_losses(
    pool: RankPool, folder: Path, layout: Sequence[str], name: str
) -> tuple[dict[int, tuple[float, ...]], tuple[float | None, ...]]:
    """Return what each step says, and the first and the last validation loss."""
    settings = (*SETTINGS, *layout)
    told = train(pool, folder / name, folder / "data", settings, observer="validated_notes")
    return read_steps(folder / name), (told.first_validation, told.last_validation)


alone = cache(partial(steps_and_losses, layout=(), name="alone"))


def check(pool: RankPool, folder: Path, layout: str) -> None:
    if not (folder / "data").exists():
        answers_of_few(folder / "data")
    split, losses = steps_and_losses(pool, folder, LAYOUTS[layout], layout)
    whole, expected = alone(pool, folder)
    assert losses == pytest.approx(expected, rel=1e-11)
    assert sorted(split) == sorted(whole) == [1, 2, 3, 4]
    for step, values in split.items():
        assert values == pytest.approx(whole[step], rel=1e-11, abs=1e-13)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("answers")


def test_ranks_count_unequally(folder: Path) -> None:
    """What the other tests rest on: a rank has no counted token in a whole step."""
    if not (folder / "data").exists():
        answers_of_few(folder / "data")
    by_step = [counts(folder / "data", step) for step in range(4)]
    assert any(0 in map(sum, ranks) for ranks in by_step)
    assert any(sum(first) != sum(second) for first, second in by_step)


@pytest.mark.quick("cp2")
@pytest.mark.parametrize("layout", ["dp2", "cp2"])
def test_a_split_run_takes_the_steps_of_one_process(
    rank_pool: RankPool, folder: Path, layout: str
) -> None:
    check(rank_pool, folder, layout)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["zero3", "pp2", "tp2"])
def test_other_splits_do_so_too(rank_pool: RankPool, folder: Path, layout: str) -> None:
    check(rank_pool, folder, layout)
