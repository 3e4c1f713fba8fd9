"""Each command that a page tells the reader to type is run here, or said to be run elsewhere.

The commands of a page run one after the other in a folder of their own, as a reader would type
them. Those of `doc_commands.toml` are too long, or need what a test has not; beside each stands
why, and the test that runs its kind.
"""

from __future__ import annotations

import ast
import re
import shlex
import tomllib
from pathlib import Path

import pytest

from echelon.cli.main import main
from tests.docs.readme import BLOCK, ROOT, pages
from tests.docs.test_newcomer_pages import PAGES as NEWCOMER_PAGES

TESTS = Path(__file__).parents[1]
SHELL = re.compile(r"```(?:sh|bash|shell)\n(.*?)```", re.DOTALL)
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
ELSEWHERE = tomllib.loads(
    (Path(__file__).with_name("doc_commands.toml")).read_text(encoding="utf-8")
)


def commands(text: str) -> list[str]:
    """Return the commands of the sh blocks of a page, comments left out."""
    lines = [line for block in SHELL.findall(text) for line in block.splitlines()]
    return [words for line in lines if (words := re.sub(r"(^|\s)#.*", "", line).strip())]


TEXTS = {str(page.relative_to(ROOT)): page.read_text(encoding="utf-8") for page in pages()}
TYPED = {name: commands(text) for name, text in TEXTS.items() if commands(text)}
LONG = (
    *("docs/guides/prove.md", "docs/guides/replicas/parameter-servers.md"),
    *("docs/guides/fine-tuning/evaluate.md", "docs/guides/fine-tuning/supervised.md"),
    *("docs/guides/plan.md", "docs/guides/reports.md", "docs/guides/zero.md"),
)
"""Pages whose commands train, prove or search for long: `make test-all` types them."""

WHOLE = {f"docs/{page}.md" for page in NEWCOMER_PAGES}
"""Pages of which all is run, code in Python too: `test_newcomer_pages.py`."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(one, marks=pytest.mark.slow if one in LONG else ())
        for one in TYPED
        if one not in WHOLE
    ],
)
def test_what_a_page_tells_to_type_works(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for command in TYPED[name]:
        if command not in ELSEWHERE:
            program, *words = shlex.split(command)
            assert program == "echelon", f"{command}: run it here, or enter it in doc_commands.toml"
            assert main(words) == 0, (command, capsys.readouterr().err)


def test_a_console_block_shows_what_its_command_prints() -> None:
    for name, text in TEXTS.items():
        shown = [body for language, body in FENCE.findall(text) if language == "console"]
        assert len(shown) == len(BLOCK.findall(text)), name


def test_what_is_run_elsewhere_is_named_on_a_page_and_has_a_test() -> None:
    typed = {command for found in TYPED.values() for command in found}
    assert set(ELSEWHERE) - typed == set()
    for command, entry in ELSEWHERE.items():
        assert entry["why"], command
        file, _, function = entry.get("test", "").partition("::")
        if file:
            tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
            names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
            assert function in names, command


def test_what_ci_is_said_to_run_is_in_its_script() -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert ELSEWHERE["make docs"]["why"].startswith("CI runs it before make test")
    assert script.index("\nmake docs\n") < script.index("\nmake test WHOLE=1\n")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert "zensical build --clean --strict" in makefile
    assert re.search(r"^test: check ", makefile, re.MULTILINE)


@pytest.mark.parametrize("name", TEXTS)
def test_every_flag_beside_a_command_is_one_of_its_flags(name: str) -> None:
    reference = (ROOT / "docs/reference/commands.md").read_text(encoding="utf-8")
    helps = dict(re.findall(r"^## echelon ([^\n]*)\n(.*?)(?=^## |\Z)", reference, re.M | re.S))
    lines = TEXTS[name].splitlines()
    inline = {words: line for line in lines for words in re.findall(r"`echelon ([^`]+)`", line)}
    mistakes = {words for words, line in inline.items() if "`unknown-flag`" in line}
    typed = [
        line.removeprefix("echelon ") for line in TYPED.get(name, []) if line[:8] == "echelon "
    ]
    for words in (*inline, *typed):
        known = [key for key in helps if f"{words} ".startswith(f"{key} ")]
        if not known:
            continue  # `test_readme.py` looks for commands that do not exist.
        command = max(known, key=len)
        # A quoted command of another tool is one word, and its flags are that tool's.
        own = re.sub(r'"[^"]*"', "", words)
        flags = set(re.findall(r"(?<![\w-])(--?[a-z][a-z-]*)", own)) - {"-m", "--set", "--help"}
        unknown = {flag for flag in flags if not re.search(rf"{flag}\b", helps[command])}
        assert bool(unknown) == (words in mistakes), (words, unknown)
