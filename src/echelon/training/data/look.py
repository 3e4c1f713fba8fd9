# SPDX-License-Identifier: Apache-2.0
"""What is in prepared data: sources, documents, ids in use; and what a step of a run reads of it.

All tokens are read once, a few million at a time, so memory stays bounded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from echelon.core.errors import ConfigError
from echelon.core.rulebook.data import SAMPLE_OF_STEP
from echelon.training.data.batches import BatchLayout, training_batch
from echelon.training.data.dataset import IGNORED_LABEL, TokenDataset
from echelon.training.data.mixed_dataset import AnyDataset, MixedDataset

_PIECE = 2**22  # tokens that are read together
DOCUMENT_BORDER = "<|document|>"
"""What stands in a shown text where a document ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceLook:
    """Say what one source holds."""

    name: str
    """What the user named, or the folder of prepared data."""
    num_tokens: int
    """Tokens, ends of documents among them."""
    num_documents: int
    """Documents."""
    lengths: tuple[tuple[int, int], ...]
    """Documents by length: (n, count) counts those of n/2 < tokens <= n, n a power of two."""
    longest: int
    """Tokens of the longest document."""
    distinct: int
    """Token ids that occur."""
    vocabulary: int
    """Token ids of the tokenizer."""
    share: float | None = None
    """Share of the sequences of a run that come from it; None where there is no run."""
    times: float | None = None
    """How often a run reads its training part; None where there is no run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleLook:
    """Show one sequence that a step reads."""

    step: int
    """The step, from 1, as step lines count them."""
    sample: int
    """Its place in the global batch, from 0."""
    data_rank: int
    """The data-parallel rank that computes it."""
    source: str
    """Where it comes from."""
    sources_of_step: tuple[int, ...]
    """Sequences of the step by source."""
    num_documents: int
    """Documents of which it holds a part."""
    counted: int
    """Labels that count."""
    text: str
    """The text, with `DOCUMENT_BORDER` where a document ends."""


def look_at_sources(
    dataset: AnyDataset, *, steps: int = 0, layout: BatchLayout | None = None
) -> tuple[SourceLook, ...]:
    """Return what each source holds; of a run of `steps` steps also how often it is read."""
    mixed = isinstance(dataset, MixedDataset)
    parts = dataset.parts if isinstance(dataset, MixedDataset) else (dataset,)
    names = dataset.names if isinstance(dataset, MixedDataset) else (str(dataset.path),)
    found: list[SourceLook] = []
    for place, (name, part) in enumerate(zip(names, parts, strict=True)):
        share = times = None
        if layout is not None and steps:
            total = steps * layout.global_sequences
            given = total
            if mixed:
                by_source = dataset.mixture.given(steps=steps, count=layout.global_sequences)
                given = int(by_source[place])
            share = given / total
            times = given / part.num_samples(layout.sequence_length)
        found.append(_look_at(name, part, share, times))
    return tuple(found)


def _look_at(name: str, part: TokenDataset, share: float | None, times: float | None) -> SourceLook:
    vocabulary = part.index.tokenizer.vocabulary
    used = np.zeros(max(vocabulary, part.index.max_token + 1), dtype=bool)
    for tokens in _pieces(part):
        used[tokens] = True
    lengths = part.document_lengths()
    bins = np.ceil(np.log2(np.maximum(lengths, 1))).astype(int)
    counts = np.bincount(bins) if len(bins) else np.zeros(0, dtype=int)
    return SourceLook(
        name=name,
        num_tokens=part.num_tokens,
        num_documents=len(lengths),
        lengths=tuple((2**n, int(count)) for n, count in enumerate(counts) if count),
        longest=int(lengths.max(initial=0)),
        distinct=int(used.sum()),
        vocabulary=vocabulary,
        share=share,
        times=times,
    )


def look_at_sample(
    dataset: AnyDataset, layout: BatchLayout, *, seed: int, step: int, sample: int, epoch_end: str
) -> SampleLook:
    """Return sequence `sample` (from 0) of step `step` (from 1) of a run; ConfigError for none."""
    batch = layout.global_sequences
    if step < 1 or not 0 <= sample < batch:
        raise ConfigError(
            SAMPLE_OF_STEP.problem(
                f"step {step}, sample {sample}: steps are counted from 1, and a step has samples 0 "
                f"to {batch - 1}",
                suggestions=(f"--step {max(step, 1)} --sample {min(max(sample, 0), batch - 1)}",),
            )
        )
    ending = "pad" if epoch_end == "pad" else "continue"
    read = training_batch(dataset, layout, seed=seed, step=step - 1, epoch_end=ending)
    ids, length = read.sample_ids, layout.sequence_length
    inputs_BT, labels_BT = dataset.read(ids[sample : sample + 1], length)
    source, by_source = str(dataset.path), (batch,)
    if isinstance(dataset, MixedDataset):
        sources = dataset.sources(ids, length)
        source = dataset.names[int(sources[sample])]
        by_source = tuple(np.bincount(sources, minlength=len(dataset.names)).tolist())
    counted = int((labels_BT != IGNORED_LABEL).sum())
    # Past the end of the data positions only fill the sample up.
    filled = dataset.counting("all").count_valid(ids[sample : sample + 1], length)
    tokens = inputs_BT[0, : max(filled, 1)]
    end = dataset.index.tokenizer.end_of_document
    starts = dataset.document_starts(ids[sample : sample + 1], inputs_BT)[0]
    pieces = list(_documents(tokens, end, starts))
    tokenizer = dataset.tokenizer()
    text = "".join(
        tokenizer.decode(piece) + (f"{DOCUMENT_BORDER}\n" if ended else "")
        for piece, ended in pieces
    )
    return SampleLook(
        step=step,
        sample=sample,
        data_rank=sample // (batch // layout.dp),
        source=source,
        sources_of_step=by_source,
        num_documents=len(pieces),
        counted=counted,
        text=text,
    )


def _documents(
    tokens: NDArray[np.int64], end: int, starts: Sequence[int]
) -> Iterator[tuple[Sequence[int], bool]]:
    """Yield the tokens of each document, without its end, and whether it ends here.

    A document ends at its end-of-document, and where another of `starts` follows.
    """
    ends = {int(place) + 1 for place in np.flatnonzero(tokens == end)}
    borders = sorted(ends | {start for start in starts if 0 < start <= len(tokens)})
    begin = 0
    for border in borders:
        last = border - 1 if border in ends else border
        yield tokens[begin:last].tolist(), True
        begin = border
    if begin < len(tokens):
        yield tokens[begin:].tolist(), False


def _pieces(part: TokenDataset) -> Iterator[NDArray[np.int64]]:
    for begin in range(0, part.num_tokens, _PIECE):
        yield part.tokens(begin, begin + _PIECE)
