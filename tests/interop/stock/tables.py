"""Stock configurations of eight tools, and the table of what each gives and loses.

Below this folder stand the settings of examples that the tools ship or print, as facts in a layout
of our own; the first line of each says which example of which version it is. Beside each is its
table; `python -m tests.interop.stock.tables` writes them anew, to be read before they are
committed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from textwrap import wrap

from echelon.interop.importer import ImportedRun, import_file, keys_by_fate
from echelon.interop.tools import TOOLS

STOCK = Path(__file__).parent
FILES = sorted(
    path
    for path in STOCK.glob("*/*")
    if path.parent.name in TOOLS and path.suffix in (".json", ".sh", ".toml", ".yaml")
)
"""Stock files; deeper, and in folders of other names, stand those that they name."""
_WIDTH = 116  # columns


def table_of(found: ImportedRun) -> str:
    """Return the table of an import: keys by what became of them, then what is lost, and why."""
    return "\n".join(_lines(found)) + "\n"


def _lines(found: ImportedRun) -> Iterator[str]:
    for fate, keys in keys_by_fate(found).items():
        yield from _wrapped(f"{fate}: {len(keys)}", ", ".join(keys))
    for word, problems in (("refused", found.refused), ("does not load", found.invalid)):
        for problem in problems:
            yield from _wrapped(f"{word} [{problem.rule}]", _plain(problem.message))
    for what in found.assumptions:
        yield from _wrapped("assumed", what)


def _plain(text: str) -> str:
    return text.replace(f"{STOCK}/", "")


def _wrapped(head: str, text: str) -> list[str]:
    return wrap(
        f"{head}  {text}".rstrip(),
        _WIDTH,
        subsequent_indent="    ",
        break_on_hyphens=False,
        break_long_words=False,
    )


def main() -> None:
    """Write the table of each stock file beside it."""
    for path in FILES:
        path.with_suffix(".txt").write_text(table_of(import_file(path)), encoding="utf-8")


if __name__ == "__main__":
    main()
