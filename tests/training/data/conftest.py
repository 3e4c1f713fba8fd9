"""Prepared data of known content."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from echelon.training.data.dataset import TokenDataset
from echelon.training.data.tokenizer import ByteTokenizer
from echelon.training.data.writer import DatasetWriter

MakeDataset = Callable[..., TokenDataset]


@pytest.fixture
def make_dataset(tmp_path: Path) -> MakeDataset:
    """Return a function that writes documents of the given sizes (end included) and opens them.

    Token number `i` of the whole is `i % 251`, but for the ends of documents, which are 256.
    """

    def make(sizes: Sequence[int], *, shard_tokens: int = 2**20) -> TokenDataset:
        output = tmp_path / f"data-{len(list(tmp_path.iterdir()))}"
        start = 0
        with DatasetWriter(output, ByteTokenizer(), shard_tokens=shard_tokens) as writer:
            for size in sizes:
                tokens = np.arange(start, start + size - 1) % 251
                writer.add(tokens.astype(np.uint32), ends_document=True)
                start += size
            writer.commit()
        return TokenDataset.open(output)

    return make


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    """Return a text file of 2000 bytes."""
    path = tmp_path / "corpus.txt"
    path.write_text("All happy families are alike.\n" * 66 + "The end, really.\n   ")
    assert path.stat().st_size == 2000
    return path
