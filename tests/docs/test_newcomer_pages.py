"""The five pages for a newcomer: all that they tell to type or save is run, from an empty folder.

Blocks run in the order of the page, each in the folder that those before it have left:

sh      each line, by a shell's words
python  saved under the name that the line above says ("Save this as `train.py`"), for a command
        below that starts it; part of a program that the line above links; else run as it is
toml    saved under its name, too; else what a run file over `nano` may hold, and is resolved
"""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from echelon.cli.main import main
from tests.docs.readme import DOCS, ROOT

GUIDES = "guides/runs/own-data", "guides/interop/own-module", "guides/fine-tuning/lora"
TOOLS = "guides/interop/from-megatron-deepspeed", "guides/interop/to-hugging-face"
PAGES = (*GUIDES, *TOOLS)
TEN_MINUTES = 1500
"""Words that are read in ten minutes, with time for the commands."""

NOT_RUN = ("lm_eval ", "runs/")
"""How text begins that is no command of Echelon: what downloads tasks, and folders of a run."""

BLOCK = re.compile(r"([^\n]*)\n\n```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SAVED = re.compile(r"Save this as `([\w.-]+)`")
PROGRAM = re.compile(r"\[examples/[\w.]+\]\([./]*/(examples/\w+\.py)\) is the whole program")
PROGRAMS = {
    "echelon": None,
    "torchrun": [sys.executable, "-m", "torch.distributed.run"],
    "python": [sys.executable],
}


@dataclass(frozen=True, slots=True)
class Block:
    """Hold a block of code with the line above it."""

    above: str
    language: str
    body: str

    @property
    def saved(self) -> str | None:
        """Return the name of the file that the page says to save it as."""
        found = SAVED.search(self.above)
        return found and found[1]

    @property
    def program(self) -> Path | None:
        """Return the program of which it is a part."""
        found = PROGRAM.search(self.above)
        return found and ROOT / found[1]

    def commands(self) -> Iterator[list[str]]:
        """Yield the words of each line of a shell."""
        for line in self.body.splitlines():
            if words := shlex.split(line, comments=True):
                yield words


def blocks(page: str) -> list[Block]:
    """Return all blocks of a page; each of its fences belongs to one."""
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    found = [Block(*match.groups()) for match in BLOCK.finditer(text)]
    assert 2 * len(found) == len(re.findall(r"^```", text, re.MULTILINE)), page
    return found


def run_block(block: Block, folder: Path) -> None:
    """Do what a reader of a block does, in the folder where the reader is."""
    if block.language == "text":
        assert all(line.startswith(NOT_RUN) for line in block.body.splitlines())
    elif block.saved is not None:
        (folder / block.saved).write_text(block.body, encoding="utf-8")
    elif block.language == "toml":
        (folder / "part.toml").write_text(f'extends = "nano"\n\n{block.body}', encoding="utf-8")
        assert main(["config", "show", "part.toml"]) == 0
    elif block.language == "python" and block.program is None:
        run_words(["python", "-c", block.body])
    elif block.language == "sh":
        for words in block.commands():
            run_words(words)


def run_words(words: list[str]) -> None:
    """Run a command; those of Echelon in this process."""
    if words[0] == "echelon":
        assert main(words[1:]) == 0, words
        return
    command = [*(PROGRAMS[words[0]] or ()), *words[1:]]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, (words, done.stdout, done.stderr)


@pytest.mark.quick("guides/interop/to-hugging-face")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", PAGES)
def test_a_page_works_from_an_empty_folder(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if "examples" in (DOCS / f"{page}.md").read_text(encoding="utf-8"):
        # A reader who cloned the repository types them there.
        (tmp_path / "examples").symlink_to(ROOT / "examples")
    for block in blocks(page):
        run_block(block, tmp_path)


@pytest.mark.parametrize("page", PAGES)
def test_each_block_is_one_that_is_run_and_the_page_is_read_in_ten_minutes(page: str) -> None:
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    assert len(text.split()) <= TEN_MINUTES
    saved = set[str]()
    for block in blocks(page):
        assert block.language in ("sh", "python", "toml", "text")
        saved |= {block.saved} if block.saved else set()
        for words in block.commands() if block.language == "sh" else ():
            assert words[0] in PROGRAMS, words
            saved -= set(words)
    assert not saved, "what is saved is started, or read"


@pytest.mark.parametrize("page", PAGES)
def test_a_part_of_a_program_stands_in_it_as_it_is_shown(page: str) -> None:
    for block in blocks(page):
        if block.program is not None:
            program = ast.parse(block.program.read_text(encoding="utf-8"))
            whole = {ast.unparse(one) for one in ast.walk(program) if isinstance(one, ast.stmt)}
            assert {ast.unparse(one) for one in ast.parse(block.body).body} <= whole
            typed = [
                words for one in blocks(page) if one.language == "sh" for words in one.commands()
            ]
            name = str(block.program.relative_to(ROOT))
            assert any(name in words for words in typed), f"{name} is started on the page"
