"""The page of words: those of the field in `glossary.toml`, and those that the code's records say.

A schedule, a way of context parallelism, an optimizer, a strategy or a cause of idle time that is
added to the code has a row from then on.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from inspect import cleandoc
from pathlib import Path

from echelon.core.choices.context_kinds import CONTEXT_KINDS
from echelon.core.choices.optimizers import OPTIMIZERS
from echelon.core.choices.strategies import STRATEGIES
from echelon.schedule.build import SCHEDULES
from echelon.telemetry import bubble

WORDS = Path(__file__).parent / "glossary.toml"
HEAD = """# Glossary

Written by `python -m tests.docs.doc_pages`. The words of this field, as they are used in Echelon.
*axis* is a direction of the mesh, *dim* one of a tensor; *degree* is the size of an axis; *group*
is a set of ranks that talk to one another.
"""


def words() -> Mapping[str, str]:
    """Return the words that no record explains, and what each means."""
    return tomllib.loads(WORDS.read_text(encoding="utf-8"))


def idle_causes() -> Mapping[str, str]:
    """Return why ranks are idle, as the module that finds it out says."""
    text = cleandoc(bubble.__doc__ or "")
    found: dict[str, str] = {}
    for item in re.findall(r"^- (.*?)(?=^- |\Z)", text, re.MULTILINE | re.DOTALL):
        names, _, meaning = " ".join(item.split()).partition(": ")
        for name in re.findall(r"\*(.+?)\*", names):
            found[name] = meaning
    return found


def glossary_page() -> str:
    """Return the page."""
    return "\n".join((HEAD, *_sections())) + "\n"


def _sections() -> Iterator[str]:
    yield _table(("word", "meaning"), sorted(words().items(), key=lambda row: row[0].lower()))
    yield "\n## Schedules of a pipeline: `pipeline.schedule`\n"
    yield _table(
        ("schedule", "what it is"), [(name, _first(one)) for name, one in SCHEDULES.items()]
    )
    yield "\n## Ways of context parallelism: `context.kind`\n"
    yield _table(
        ("kind", "splits", "when", "from"),
        [(n, k.facts.splits, k.facts.when, k.facts.source) for n, k in CONTEXT_KINDS.items()],
    )
    yield "\n## Optimizers: `optimizer.kind`\n"
    yield _table(
        ("optimizer", "keeps for each weight", "from"),
        [(one.title, ", ".join(one.state), one.paper) for one in OPTIMIZERS.values()],
    )
    yield "\n## Strategies: `echelon compare RUN --strategies`\n"
    yield _table(("strategy", "splits"), [(one.name, one.about) for one in STRATEGIES.values()])
    yield "\n## Why a rank is idle: `echelon observe RUN --schedule`\n"
    yield _table(("cause", "meaning"), list(idle_causes().items()))


def _first(builder: type) -> str:
    line = cleandoc(builder.__doc__ or "").splitlines()[0]
    return re.sub(r"^Build (the )?", "", line)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
