"""Under any split the ranks together read the packed batches of TRL: ids and labels."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from echelon.models.batch import TokenBatch
from echelon.training.data.batches import BatchLayout, training_batch
from echelon.training.data.dataset import IGNORED_LABEL
from echelon.training.data.mixed_dataset import open_data
from echelon.training.data.prepare import PrepareOptions, prepare
from tests.training.data.chats.made_tokenizers import (
    MARKED,
    Record,
    tokenizer_folder,
    turn,
    write_records,
)
from tests.training.data.chats.test_encoder import of_trl
from tests.training.small_runs import small_job

LENGTH, CHATS = 16, 40
SPLITS = {
    "one rank": (),
    "data ranks": ("mesh.dp_shard=2", "zero.stage=3"),
    "tensor ranks": ("mesh.tp=2",),
    "stages": ("mesh.pp=2",),
    "context ranks": ("mesh.cp=2",),
    "striped": ("mesh.cp=2", "context.kind=striped"),
    "data, tensor and stages": ("mesh.dp_replicate=2", "mesh.tp=2", "mesh.pp=2"),
    "data and context": ("mesh.dp_replicate=2", "mesh.cp=2"),
}


def chats() -> list[Record]:
    """Return chats of one to three turns, of many lengths."""
    made: list[Record] = []
    for number in range(CHATS):
        turns: list[dict[str, str]] = []
        for place in range(1 + number % 3):
            turns.append(
                turn("user", f"What is {number} + {place}? " + "Be brief. " * (number % 4))
            )
            turns.append(turn("assistant", f"It is {number + place}, of course."))
        made.append({"messages": turns})
    return made


def rows_of_trl(folder: Path, records: list[Record]) -> tuple[np.ndarray, np.ndarray]:
    """Return ids and labels of full sequences as TRL packs them, [N, T] each."""
    datasets = pytest.importorskip("datasets")
    trl = pytest.importorskip("trl")
    found = of_trl(folder, records, assistant_only=True)
    table = datasets.Dataset.from_dict(
        {"input_ids": [one for one, _ in found], "labels": [one for _, one in found]}
    )
    packed: Any = trl.pack_dataset(table, LENGTH, strategy="wrapped")
    rows = [row for row in packed if len(row["input_ids"]) == LENGTH]
    return np.array([row["input_ids"] for row in rows]), np.array([row["labels"] for row in rows])


@pytest.mark.slow
def test_ranks_together_read_the_packed_batches_of_trl(tmp_path: Path) -> None:
    tokenizer = tokenizer_folder(tmp_path / "tokenizer", MARKED)
    ids_NT, labels_NT = rows_of_trl(tokenizer, chats())
    source = write_records(tmp_path / "chats.jsonl", chats())
    options = PrepareOptions(format="chat")
    prepare([source], tmp_path / "data", tokenizer=str(tokenizer), options=options)
    dataset = open_data(tmp_path / "data", train_on="answers")
    # Ours are shifted: the last one is the first of the row that follows.
    wanted_NT = np.full_like(labels_NT, IGNORED_LABEL)
    wanted_NT[:, :-1] = labels_NT[:, 1:]
    wanted_NT[:-1, -1] = labels_NT[1:, 0]
    last = len(ids_NT) - 1
    for name, settings in SPLITS.items():
        plan = small_job([*settings, f"batch.sequence_length={LENGTH}"]).plan
        layout = BatchLayout.from_plan(plan)
        read: dict[tuple[int, int], tuple[int, int]] = {}
        num_valid = counted = 0
        for step in range(dataset.num_samples(LENGTH) // layout.global_sequences):
            batch = training_batch(dataset, layout, seed=plan.mathematics.seed, step=step)
            num_valid += batch.num_valid
            for rank, place in product(range(layout.dp), range(layout.num_microbatches)):
                rows = batch.microbatch(dp_rank=rank, microbatch=place)
                whole = TokenBatch.from_rows(
                    torch.from_numpy(rows.inputs_BT),
                    torch.from_numpy(rows.labels_BT),
                    torch.from_numpy(rows.sample_ids_B),
                )
                for cp in range(plan.mesh.cp):
                    part = whole.cut(plan.placement.runs(cp) if plan.mesh.cp > 1 else ())
                    counted += part.num_valid()
                    shape = (-1, len(rows.sample_ids_B))
                    for position, ids, labels in zip(
                        part.positions_T.tolist(),
                        part.tokens_N.view(shape).tolist(),
                        part.labels_N.view(shape).tolist(),
                        strict=True,
                    ):
                        for sample, one, label in zip(
                            rows.sample_ids_B.tolist(), ids, labels, strict=True
                        ):
                            assert (sample, position) not in read, (name, sample, position)
                            read[sample, position] = (one, label)
        assert counted == num_valid > 0
        samples = {sample for sample, _ in read}
        assert len(read) == len(samples) * LENGTH
        assert len(samples) > last - layout.global_sequences
        for (sample, position), (one, label) in read.items():
            if sample <= last:
                assert one == ids_NT[sample, position], (name, sample, position)
            if sample < last:
                assert label == wanted_NT[sample, position], (name, sample, position)
