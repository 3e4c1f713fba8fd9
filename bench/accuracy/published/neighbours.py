"""What other rows of a publisher say of the same model or machine, where a row is silent.

A table often gives a model's sizes, or a machine's links, in one place only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from bench.accuracy.groups import publisher_of
from bench.accuracy.published.machines import WITHOUT_NETWORK
from bench.accuracy.published.rows import Row

OTHER_ROWS = "other rows of the publisher"
"""Why a blank has a value that a neighbour has."""
SHARED: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("model", "layers", "hidden"), ("heads", "kv_heads", "ffn_hidden", "vocab", "gated_mlp")),
    (("layers", "hidden"), ("heads", "vocab")),
    (("hidden",), ("heads", "vocab")),
    (("gpu",), ("gpus_per_node", "intra_link", "inter_link")),
)
"""Columns in which rows must agree, and those that they then share, strictest first."""


def with_neighbours(rows: Sequence[Row]) -> list[Row]:
    """Return the rows, blanks filled from those of the same publisher that agree."""
    found = list(rows)
    for keys, columns in SHARED:
        for column in columns:
            said: dict[tuple[str, ...], Counter[str]] = {}
            for row in rows:
                if row.word(column) and not _is_no_network(row.word(column)):
                    said.setdefault(_key(row, keys), Counter())[row.word(column)] += 1
            found = [_filled(row, column, said.get(_key(row, keys))) for row in found]
    return found


def _key(row: Row, keys: Sequence[str]) -> tuple[str, ...]:
    return (publisher_of(row), *(row.word(key) for key in keys))


def _is_no_network(text: str) -> bool:
    return any(word in text.lower() for word in WITHOUT_NETWORK)


def _filled(row: Row, column: str, said: Counter[str] | None) -> Row:
    if row.word(column) or not said or not row.word("source"):
        return row
    value = said.most_common(1)[0][0]
    filled = replace(row, cells={**row.cells, column: value})
    filled.say(column, value, OTHER_ROWS)
    return filled
