"""The page of words: those of the handbook, and the causes of idle time that are told apart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from echelon.page.lessons.guides.glossary import all_words

HEAD = """# Glossary

Written by `python -m tests.docs.doc_pages`. The words of this field, as they are used in Echelon.
*axis* is a direction of the mesh, *dim* one of a tensor; *degree* is the size of an axis; *group*
is a set of ranks that talk to one another.
"""


def glossary_page() -> str:
    """Return the page."""
    return "\n".join((HEAD, *_sections())) + "\n"


def _sections() -> Iterator[str]:
    first, *others = all_words()
    yield _table(first.head, first.rows)
    for table in others:
        yield f"\n## {table.title}: `{table.setting}`\n"
        yield _table(table.head, table.rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
