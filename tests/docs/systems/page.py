"""The page docs/systems.md: every system, when it works, and the tests that show it.

A test says so by its marker, `@pytest.mark.system("S09")`, with the ids of `systems.toml`; markers
are read from the source, so that nothing is imported. `python -m tests.docs.systems.page` writes
the page, `test_page.py` compares it.
"""

from __future__ import annotations

import ast
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
TESTS = HERE.parents[1]
PAGE = TESTS.parent / "docs" / "systems.md"
MARKER = "pytest.mark.system"
GPU_ONLY = "cuda"
"""The folder of tests that need a GPU: what they show is not shown everywhere."""

COLUMNS = ("system", "works when", "state", "shown by")
HEAD = """# Systems

Written by `python -m tests.docs.systems.page`. Each row is a system of distributed training, with
what must hold where it works. One that `works` has the tests that show it on a CPU; what is not
there yet says so.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """Say what a system is, and when it works; `open`: why it does not yet, or ""."""

    id: str
    title: str
    system: str
    works: str
    open: str = ""

    @property
    def state(self) -> str:
        """Return how it stands with it."""
        if self.open in ("", "not built"):
            return self.open or "works"
        return f"open: {self.open}"


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Evidence:
    """Name a test: its file under tests/, and its function."""

    file: str
    function: str


def systems() -> list[System]:
    """Return the rows of the table."""
    table = tomllib.loads((HERE / "systems.toml").read_text(encoding="utf-8"))
    return [System(id=key, **row) for key, row in table.items()]


def evidence(root: Path = TESTS) -> Mapping[str, Sequence[Evidence]]:
    """Return id -> the tests under `root` that are marked with it."""
    found: defaultdict[str, list[Evidence]] = defaultdict(list)
    for file in sorted(root.rglob("test_*.py")):
        text = file.read_text(encoding="utf-8")
        if f"@{MARKER}(" not in text or GPU_ONLY in file.relative_to(root).parts:
            continue
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef):
                one = Evidence(file=file.relative_to(root).as_posix(), function=node.name)
                for key in _marked(node):
                    found[key].append(one)
    return found


def _marked(test: ast.FunctionDef) -> Iterator[str]:
    for decorator in test.decorator_list:
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == MARKER:
            yield from (str(ast.literal_eval(argument)) for argument in decorator.args)


def problems(rows: Sequence[System], shown: Mapping[str, Sequence[Evidence]]) -> list[str]:
    """Return what is wrong: a row that works without a test, a marker of no row."""
    unknown = sorted({*shown} - {row.id for row in rows})
    return [
        *(
            f"{row.id} works, and no test shows it"
            for row in rows
            if not row.open and not shown.get(row.id)
        ),
        *(f"{key} is marked in {shown[key][0].file}, and is no row" for key in unknown),
    ]


def page(rows: Sequence[System], shown: Mapping[str, Sequence[Evidence]]) -> str:
    """Return the page."""
    parts, title = [HEAD], ""
    for row in rows:
        if row.title != title:
            title = row.title
            parts.append(f"\n## {title}\n\n| | {' | '.join(COLUMNS)} |\n{'|---' * 5}|")
        tests = "<br>".join(map(_link, sorted(shown.get(row.id, ()))))
        parts.append(f"| {row.id} | {row.system} | {row.works} | {row.state} | {tests or '-'} |")
    return "\n".join(parts) + "\n"


def _link(one: Evidence) -> str:
    words = one.function.removeprefix("test_").replace("_", " ")
    return f"[{words}](../tests/{one.file})"


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(systems(), evidence()), encoding="utf-8")


if __name__ == "__main__":
    main()
