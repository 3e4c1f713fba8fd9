# SPDX-License-Identifier: Apache-2.0
"""Rows that the trainer's loop reads of a run's own data, for the prover, which imports no trainer.

The real loop runs on one rank with the data settings of the run: it opens, splits, orders and cuts.
The first `max_bytes` of each source are prepared, and the model is small, for no step is taken.
`delivered.json` in the folder of the prover has the rows of some steps and of the first and the
last validation batch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from zlib import crc32

from echelon.config.job import DataSettings, Job, TrainSettings
from echelon.core.piece_sizes import PROOF_PIECES
from echelon.core.plan import Plan
from echelon.core.serialize import from_json
from echelon.core.settings.list_types import phases_of
from echelon.launch.context import RankContext
from echelon.models.batch import TokenBatch
from echelon.training.data.batches import num_validation_batches
from echelon.training.data.corpus import data_of_settings
from echelon.training.data.dataset import TokenDataset
from echelon.training.data.mixed_dataset import AnyDataset, MixedDataset, open_data
from echelon.training.evaluator import NoObserver, plan_alone
from echelon.training.loop import RankTask, TrainLoop

FILE_NAME = "delivered.json"


def deliver(context: RankContext, argument: Mapping[str, Any]) -> None:
    """Write the rows; `argument` has `folder`, `plan`, `data`, `length`, `max_bytes`.

    Sequences have `length` tokens, or fewer: each source must have two global batches, and a sample
    of its held-out part. Sums are over stretches of `stretch` tokens, of the first
    `most_tokens` of each part.
    """
    folder, data = Path(argument["folder"]), from_json(DataSettings, argument["data"])
    prepared = data_of_settings(data, folder, max_bytes=argument["max_bytes"], pieces=PROOF_PIECES)
    dataset = open_data(prepared, train_on=data.train_on)
    parts = dataset.split(data.validation_fraction) if data.validation_fraction else (dataset,) * 2
    plan = Plan.from_json(argument["plan"])
    length = min(argument["length"], _longest(plan.mathematics.global_sequences, *parts))
    job = Job(
        plan=_reading(plan, dataset, length),
        data=data,
        train=TrainSettings(steps=1, run_name="data"),
    )
    task = RankTask(job=job, run_dir=str(folder / "run"), data=str(prepared), observer="")
    loop = TrainLoop(context, task, NoObserver())
    try:
        steps = _steps(data, parts[0].num_samples(length), plan.mathematics.global_sequences)
        last = num_validation_batches(loop.validation, loop.layout) - 1
        delivered = {
            "length": length,
            "tokenizer": str(prepared if dataset.index.tokenizer.name != "bytes" else ""),
            "end": dataset.index.tokenizer.end_of_document,
            "sources": [part.index.hash for part in _sources(dataset)],
            "parts": [[_text(part, argument) for part in _sources(half)] for half in parts],
            "training": {step: _batch(loop.load(step), loop.num_tokens(step)) for step in steps},
            "validation": {
                number: _batch(loop.load_validation(number), None) for number in {0, last}
            },
        }
    finally:
        loop.engine.close()
    (folder / FILE_NAME).write_text(json.dumps(delivered), encoding="utf-8")


def _sources(dataset: AnyDataset) -> Sequence[TokenDataset]:
    return dataset.parts if isinstance(dataset, MixedDataset) else (dataset,)


def _text(part: TokenDataset, argument: Mapping[str, Any]) -> dict[str, Any]:
    """The size of a part, sums over stretches of its first tokens, and its documents' lengths."""
    size, stretch, most = part.num_tokens, argument["stretch"], argument["most_tokens"]
    firsts = range(0, min(size, most), stretch)
    stretches = (part.tokens(first, min(first + stretch, size)) for first in firsts)
    return {
        "num_tokens": size,
        "sums": [crc32(tokens.astype("<u4").tobytes()) for tokens in stretches],
        "documents": part.document_lengths().tolist() if size <= most else None,
    }


def _longest(batch: int, training: AnyDataset, validation: AnyDataset) -> int:
    """Length of the longest sequences that leave each part of each source enough samples."""
    enough = [part.num_tokens // (2 * batch) for part in _sources(training)]
    return max(1, min(*enough, *(part.num_tokens - 1 for part in _sources(validation))))


def _reading(plan: Plan, dataset: AnyDataset, length: int) -> Plan:
    """A plan of one rank with the batches of `plan` and sequences of `length`."""
    mathematics = plan.mathematics
    model = replace(
        mathematics.model,
        vocab=dataset.index.tokenizer.vocabulary,
        max_positions=max(length, mathematics.model.max_positions),
    )
    mathematics = replace(mathematics, model=model, sequence_length=length)
    return plan_alone(replace(plan, mathematics=mathematics))


def _steps(data: DataSettings, num_samples: int, batch: int) -> list[int]:
    """Steps in which phases of a mixture change, or an epoch ends, and those next to them."""
    if data.mixture:
        return list(range(2 + max(phase.until_step or 0 for phase in phases_of(data.mixture))))
    last = num_samples // batch
    return sorted({0, 1, *range(max(last - 1, 0), last + 2)})


def _batch(batches: Sequence[TokenBatch], num_tokens: int | None) -> dict[str, Any]:
    return {"num_tokens": num_tokens, "rows": [row for batch in batches for row in _rows(batch)]}


def _rows(batch: TokenBatch) -> Iterator[dict[str, Any]]:
    """The sequences of a microbatch, in their order."""
    shape = batch.num_positions, batch.num_sequences
    tokens_TB, labels_TB = batch.tokens_N.view(shape), batch.labels_N.view(shape)
    for row, sample in enumerate(batch.sample_ids_B.tolist()):
        yield {
            "sample": sample,
            "tokens": tokens_TB[:, row].tolist(),
            "labels": labels_TB[:, row].tolist(),
            "documents": None if batch.documents is None else batch.documents[row],
        }
