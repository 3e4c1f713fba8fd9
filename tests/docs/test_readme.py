"""What pages show is what their commands print, and what they name exists."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import echelon
from echelon.cli.app import COMMANDS, FAMILIES
from tests.docs import features
from tests.docs.doc_site import prose, target
from tests.docs.readme import (
    BLOCK,
    DOCS,
    FIGURES,
    GALLERY,
    ROOT,
    SLOW,
    comparable,
    comparable_figure,
    drawn,
    pages,
    printed,
)

PAGES = {str(page.relative_to(ROOT)): page.read_text(encoding="utf-8") for page in pages()}
BLOCKS = [
    pytest.param(
        match,
        id=f"{name}: {match[1]}",
        # One block with a proof takes as long as many others: one of them is enough here.
        marks=pytest.mark.slow
        if " prove " in match[1] and (name, "--subject" in match[1]) != ("README.md", False)
        else (),
    )
    for name, text in PAGES.items()
    for match in BLOCK.finditer(text)
]
MOST_README_LINES = 180
SOURCE = ROOT / "src" / "echelon"
A_FILE = re.compile(r"(?<![\w/.*-])((?:[\w.-]+/)*[\w-]+\.(?:py|toml|csv|sh|svg))\b")
WRONG_BY_INTENT = "docs/reference/rules.md"
"""The page of rules shows an example that breaks each."""
OF_OTHERS = {str(page.file.relative_to(ROOT)) for page in features.PAGES}
"""Pages that name the files of other tools, as found in their source."""
WRITTEN_BY_USERS = {
    *("run.toml", "cluster.toml", "best.toml", "back.toml", "other.toml", "my-schedule.csv"),
    *(
        "pretrain_gpt.py",
        "train.py",
        "config_registry.py",
        "FILE.py",
        "mixed.toml",
        "device.toml",
        "node.toml",
    ),
    *("NAME.svg", "paper.svg", "paper-memory.svg", "paper-step.svg"),
    *("figures/memory.svg", "figures/step.svg"),
}
"""Files that a page tells the reader to write, or that are another tool's."""


@pytest.mark.one_in(16)
@pytest.mark.parametrize("match", BLOCKS)
def test_a_block_is_what_its_command_prints(
    match: re.Match[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert comparable(match[2]) == comparable(printed(match[1])), "make readme"


def test_there_are_blocks() -> None:
    assert len(BLOCK.findall(PAGES["README.md"])) >= 2
    assert len(BLOCKS) >= 10


def test_the_readme_is_short() -> None:
    assert len(PAGES["README.md"].splitlines()) <= MOST_README_LINES


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "path", [pytest.param(one, marks=[pytest.mark.slow] * (one in SLOW)) for one in FIGURES]
)
def test_a_figure_is_what_its_command_draws(path: str) -> None:
    kept = (ROOT / path).read_text(encoding="utf-8")
    assert comparable_figure(path, kept) == comparable_figure(path, drawn(FIGURES[path]))
    assert len(kept) < 50_000


def test_every_figure_is_on_a_page() -> None:
    shown = {
        found
        for name, text in PAGES.items()
        for link in re.findall(r"!\[[^\]]*\]\(([^)\s]+\.svg)\)", text)
        if (found := target(ROOT / name, link)) is not None
    }
    assert shown == {ROOT / path for path in FIGURES}
    # The first of them is the picture of the README.
    assert re.findall(r"!\[[^\]]*\]\(([^)]*)\)", PAGES["README.md"])[0] in FIGURES


def test_the_gallery_says_by_which_command_each_figure_is_drawn() -> None:
    page = PAGES["docs/gallery.md"]
    for path, command in FIGURES.items():
        if path.startswith(GALLERY):
            assert f"](assets/{path.removeprefix('docs/assets/')})" in page
            assert command.rpartition(" --out ")[0] in page


@pytest.mark.parametrize("name", sorted(set(PAGES) - {WRONG_BY_INTENT}))
def test_every_command_that_is_named_exists(name: str) -> None:
    families = "|".join(FAMILIES)
    for line in PAGES[name].splitlines():
        named = set(re.findall(rf"(?:`|^|\$ )echelon ((?:(?:{families}) )?[a-z]+)\b", line))
        unknown = named - set(COMMANDS)
        assert bool(unknown) == ("`unknown-command`" in line), line


@pytest.mark.parametrize("name", sorted(set(PAGES) - OF_OTHERS))
def test_every_file_that_is_named_exists(name: str) -> None:
    code = [part for part, plain in prose(PAGES[name]) if not plain and part[:3] != "```"]
    named = {match[1] for part in code for match in A_FILE.finditer(part)}
    homes = (ROOT, SOURCE, (ROOT / name).parent)
    missing = {file for file in named if not any((home / file).exists() for home in homes)}
    assert missing - WRITTEN_BY_USERS == set()


def test_what_is_looked_for_is_in_the_files_of_the_table() -> None:
    text = PAGES["docs/architecture.md"]
    table = text[text.index("## Each of these in at most two files") :]
    rows = [line.split("|")[1:-1] for line in table.splitlines() if line.startswith("| ")][1:]
    looked_for = " ".join(what for what, _ in rows)
    for what in ("LoRA", "explorer's numbers", "config.json", "failed rank", "mode joins"):
        assert what in looked_for
    assert len(rows) >= 18
    for what, where in rows:
        files = re.findall(r"`([\w/]+\.py)`(?: \(`(\w+)`)?", where)
        assert 1 <= len(files) <= 2, what
        for file, name in files:
            home = SOURCE if (SOURCE / file).exists() else ROOT
            source = (home / file).read_text(encoding="utf-8")
            assert name in _defined(source) | {""}, (what, file, name)


def test_the_picture_of_the_floors_is_the_contract() -> None:
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    picture = text[text.index("```text") : text.index("`layout` says")]
    shown = re.findall(r"^([a-z]+) ", picture, re.MULTILINE)
    contract = (ROOT / ".importlinter").read_text(encoding="utf-8")
    layers = re.search(r"layers =\n((?:    .*\n)+)", contract)
    assert layers is not None
    assert shown == re.findall(r"[a-z]+", layers[1])
    rooms = re.findall(r"^([a-z]+) +[^\[\n]*((?:\[[a-z]+\] ?)+)", picture, re.MULTILINE)
    assert len(rooms) > 6
    for floor, names in rooms:
        folders = {path.parent.name for path in (SOURCE / floor).glob("*/__init__.py")}
        assert set(re.findall(r"[a-z]+", names)) - folders == set(), floor


def test_python_that_is_shown_is_python_and_its_names_exist() -> None:
    snippets = [
        snippet
        for text in PAGES.values()
        for snippet in re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    ]
    assert len(snippets) >= 3
    for snippet in snippets:
        nodes = list(ast.walk(ast.parse(snippet)))
        names = {
            node.attr
            for node in nodes
            if isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "ec"
        }
        assert names - set(echelon.__all__) == set()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_python_of_the_readme_runs_as_it_is_pasted(tmp_path: Path) -> None:
    snippets = re.findall(r"```python\n(.*?)```", PAGES["README.md"], re.DOTALL)
    (tmp_path / "pasted.py").write_text("\n".join(snippets), encoding="utf-8")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    ran = subprocess.run(
        [sys.executable, "pasted.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert next((tmp_path / "runs").iterdir()).is_dir()


def test_every_page_is_in_the_site() -> None:
    site = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    guides = [page.relative_to(DOCS) for page in pages() if page.is_relative_to(DOCS)]
    assert [
        str(page) for page in guides if "decisions" not in page.parts and str(page) not in site
    ] == []
    for page in re.findall(r": ([\w/.-]+\.md)$", site, re.MULTILINE):
        assert (DOCS / page).exists() or (ROOT / Path(page).relative_to("source")).exists()


def _defined(source: str) -> set[str]:
    body = ast.parse(source).body
    targets = {
        name.id
        for node in body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for name in ast.walk(node)
        if isinstance(name, ast.Name)
    }
    return targets | {
        node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
