"""The page of decisions, by area: a row for each file, with its title and if it still holds."""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = Path(__file__).parents[3] / "docs" / "decisions"

AREAS = {
    "The house: packages, records, names": (1, 5, 26, 28, 84, 94, 96, 97, 98, 99),
    "Ranks: starting, watching, ending": (6, 47, 58, 65, 85, 87, 92, 93),
    "Operations and their order": (3, 4, 9, 31, 46, 55, 104),
    "Data ranks, ZeRO and offload": (7, 8, 11, 13, 45, 50, 57),
    "Optimizers, precision, loss and kernels": (12, 36, 38, 39, 41, 44),
    "Pipelines": (15, 16, 17, 18, 19),
    "Tensor and context ranks": (20, 21, 40),
    "Experts": (22, 23, 78),
    "Modules of your own": (14, 51, 56, 68, 69, 80, 81),
    "Servers and islands": (48, 49, 53, 54),
    "Models, adapters and generation": (66, 67, 70, 71, 79),
    "Data": (74,),
    "Checkpoints and files of other tools": (2, 10, 72, 75, 76, 77, 82, 83),
    "Cost and the planner": (24, 25, 27, 32, 33, 34, 37, 42, 52, 88, 90, 91),
    "Proof": (29, 30, 95),
    "Rehearsal and telemetry": (35, 43, 73, 86, 105, 106),
    "Pages, figures and lessons": (59, 60, 61, 62, 63, 64, 89, 100),
}
"""Numbers of the decisions of each area."""
GONE = re.compile(r"(?:Superseded|Overturned) by (?:decision )?\[(\d{3})\]\(([\w-]+\.md)\)")

HEAD = """# Decisions

Written by `python -m tests.docs.doc_pages` from the titles of the pages. A page is written when a
choice is made that a later reader could reasonably question. A decision is not edited when it is
overturned: a new one says so, and the old one gets a line on top that points to it. Areas stand in
`tests/docs/reference/decisions.py`.
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
    """Return the page; ValueError where a file has no title of its number, or no area."""
    files = {int(file.name[:3]): file for file in sorted(FOLDER.glob("[0-9]*.md"))}
    placed = {number for numbers in AREAS.values() for number in numbers}
    if bare := sorted(files.keys() - placed):
        raise ValueError(f"decisions without an area in AREAS: {bare}")
    parts = [HEAD]
    for area, numbers in AREAS.items():
        rows = "".join(_row(files[number]) for number in numbers if number in files)
        parts.append(f"\n## {area}\n\n| # | Decision |\n|---|---|\n{rows}")
    return "".join(parts) + TAIL.replace("\nCopy", "\n## A new one\n\nCopy", 1)


def _row(file: Path) -> str:
    number = file.name[:3]
    first, _, rest = file.read_text(encoding="utf-8").partition("\n")
    title = re.fullmatch(rf"# {number}[.:]? (.+)", first)
    if title is None:
        raise ValueError(f"{file.name} does not begin with '# {number}: ' and a title, but {first}")
    words = f"{title[1][0].upper()}{title[1][1:]}"
    if gone := GONE.search(rest.partition("**")[0]):
        words = f"~~{words}~~ superseded by [{gone[1]}]({gone[2]})"
    return f"| [{number}]({file.name}) | {words} |\n"
