"""The page of decisions: a row for each file, with its title."""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = Path(__file__).parents[3] / "docs" / "decisions"

HEAD = """# Decisions

Written by `python -m tests.docs.doc_pages` from the titles of the pages. A page is written when a
choice is made that a later reader could reasonably question. A decision is not edited when it is
overturned: a new one says so, and the old one gets a line on top that points to it.

| # | Decision |
|---|---|
"""

TAIL = """
Copy this for a new one:

```markdown
# NNN: the choice in one sentence

**Question.** What had to be decided, and what forced it.

**Choice.** What we do.

**Why.** The facts that decided, with figures and sources where there are any.

**Not chosen.** The alternatives, and what each would have cost.

**Would change it.** What would have to become true for us to think again.
```
"""


def decisions_page() -> str:
    """Return the page; ValueError where a title does not begin with the number of its file."""
    return HEAD + "".join(map(_row, sorted(FOLDER.glob("[0-9]*.md")))) + TAIL


def _row(file: Path) -> str:
    number = file.name[:3]
    first = file.read_text(encoding="utf-8").partition("\n")[0]
    title = re.fullmatch(rf"# {number}[.:]? (.+)", first)
    if title is None:
        raise ValueError(f"{file.name} does not begin with '# {number}: ' and a title, but {first}")
    return f"| [{number}]({file.name}) | {title[1][0].upper()}{title[1][1:]} |\n"
