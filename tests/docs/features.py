"""The pages of docs/compare: features, pipelines, context, experts of others and of Echelon.

Tests stand beside it. ``python -m tests.docs.features`` writes each from the table of its name
(`features.toml`, ...); `test_features.py` compares them and looks up every test, setting and key.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
DOCS = HERE.parents[1] / "docs"


class Cell(NamedTuple):
    """What a column calls a feature, and the test, as "folder/file.py::function" under tests/.

    A peer whose source was read has words without a test.
    """

    column: str
    words: str
    test: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """One page: the name of its table and its file, the columns, and what stands above them."""

    name: str
    columns: Mapping[str, str]
    head: str

    @property
    def file(self) -> Path:
        """Return the page."""
        return DOCS / "compare" / f"{self.name}.md"

    def rows(self) -> dict[str, dict[str, dict[str, Cell]]]:
        """Return title -> feature -> column -> cell; a column without a cell is not there."""
        table = tomllib.loads((HERE / f"{self.name}.toml").read_text(encoding="utf-8"))
        return {
            title: {
                feature: {column: _cell(column, entry) for column, entry in row.items()}
                for feature, row in features.items()
            }
            for title, features in table.items()
        }

    def cells(self) -> list[Cell]:
        """Return every cell."""
        found = [row for features in self.rows().values() for row in features.values()]
        return [cell for row in found for cell in row.values()]

    def text(self) -> str:
        """Return what is written."""
        parts = [self.head]
        for title, features in self.rows().items():
            lines = [f"| | {' | '.join(self.columns.values())} |"]
            lines.append("|---" * (len(self.columns) + 1) + "|")
            for feature, row in features.items():
                shown = (_shown(row.get(column)) for column in self.columns)
                lines.append(f"| {feature} | {' | '.join(shown)} |")
            parts.append(f"## {title}\n\n" + "\n".join(lines) + "\n")
        return "\n".join(parts)


PEERS = """\
Written by `python -m tests.docs.features`. The columns of the other three are what their source
holds, at the versions of [bench/peers.txt](../../bench/peers.txt), by the name under which it is
found there; "-": nothing of the kind was found.
"""
"""What the pages about peers' source begin with."""

FEATURES = Page(
    name="features",
    columns={"fsdp": "FSDP", "zero": "DeepSpeed ZeRO", "echelon": "Echelon"},
    head="""\
# FSDP, ZeRO and Echelon

Written by `python -m tests.docs.features`. The first two columns are keys of an Accelerate FSDP
configuration and of a DeepSpeed JSON, as `echelon import` reads them: the test beside a key shows
what becomes of it here ("not needed" and "refused" come with their reason when a file is imported).
The last column is Echelon's own, with the test that shows that it does what it says. "-": no key.
""",
)

PIPELINES = Page(
    name="pipelines",
    columns={
        "megatron": "Megatron-core",
        "torch": "torch.distributed.pipelining",
        "deepspeed": "DeepSpeed",
        "echelon": "Echelon",
    },
    head=f"""\
# Pipelines: Megatron-core, torch, DeepSpeed and Echelon

{PEERS}The last column is Echelon's own, with the test that shows that it does what it says. How
fast each is, side by side: `python -m bench.pipeline`.
""",
)

CONTEXT = Page(
    name="context",
    columns={
        "megatron": "Megatron-core",
        "torch": "torch",
        "deepspeed": "DeepSpeed",
        "echelon": "Echelon",
    },
    head=f"""\
# Long sequences: Megatron-core, torch, DeepSpeed and Echelon

{PEERS}Megatron-core hands attention to Transformer Engine: what that takes or refuses was not read.
torch's column is `torch.distributed.tensor.experimental`, a ring under SDPA or gathered keys
under `flex_attention`; what stands beside it is for its caller to write. The last column is
Echelon's own, with the test that shows that it does what it says. How fast each is, side by
side: `python -m bench.context`.
""",
)

EXPERTS = Page(
    name="experts",
    columns={
        "megatron": "Megatron-core",
        "torchtitan": "torchtitan",
        "deepspeed": "DeepSpeed",
        "echelon": "Echelon",
    },
    head=f"""\
# Experts: Megatron-core, torchtitan, DeepSpeed and Echelon

{PEERS}DeepSpeed has two ways: `MoE`, a layer for your own model, and `AutoEP`, which puts its own
in the place of the blocks of Hugging Face models. The last column is Echelon's own, with the
test that shows that it does what it says. What even loads are worth on text, beside a dense
model: [curves](../../bench/results/2026-11-21-experts.md).
""",
)

PAGES = (FEATURES, PIPELINES, CONTEXT, EXPERTS)


def write() -> None:
    """Write the pages."""
    for page in PAGES:
        page.file.write_text(page.text(), encoding="utf-8")


def _cell(column: str, entry: str | list[str]) -> Cell:
    return Cell(column, entry) if isinstance(entry, str) else Cell(column, *entry)


def _shown(cell: Cell | None) -> str:
    if cell is None:
        return "-"
    if not cell.test:
        return cell.words
    file, _, function = cell.test.partition("::")
    return f'{cell.words} ([test](../../tests/{file} "{function}"))'


if __name__ == "__main__":
    write()
