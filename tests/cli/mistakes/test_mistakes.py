"""120 mistakes at the command line: one clear error each, and what it suggests mends it."""

from __future__ import annotations

import shlex
import shutil
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from echelon.core.rulebook import all_rules
from echelon.launch.environment import LAUNCH_VARIABLES
from echelon.launch.local import rank_processes
from tests.cli.mistakes.folder import make_run, write_files
from tests.cli.mistakes.mending import STARTED, Attempt, RanksStart, mended, run

TABLES = Path(__file__).parent / "table"
BUG = 70
MOST_TRIED = 2  # suggestions of one error


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistake:
    """A command with something wrong in it, the rule that says so, and how it is mended."""

    type: str
    rule: str
    exit: int = 2
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    wrong: str = ""
    """The word that a suggestion without a flag or a key stands for."""
    says: str = ""
    """A text of the error, where what mends it is an act of the reader's."""
    edit: Mapping[str, str] = field(default_factory=dict[str, str])
    """Files with the fault taken out, where the error says where it is."""
    then: str = ""
    """The command that the error leads to, where it describes it in words."""
    write: Mapping[str, str] = field(default_factory=dict[str, str])
    """Files that are damaged before."""
    remove: tuple[str, ...] = ()
    """Files and folders that are gone before, as patterns."""

    @property
    def needs_run(self) -> bool:
        """True if the command names what a run has left, or goes on without ranks of its own."""
        words = f"{self.type} {self.then} {list(self.write)} {self.remove}"
        return any(
            name in words
            for name in ("runs", "done", "prepared", "weights", "nano --prompt", "data show")
        )


def read_mistakes() -> dict[str, Mistake]:
    """Return every mistake of the tables by its kind and number."""
    found: dict[str, Mistake] = {}
    for file in sorted(TABLES.glob("*.toml")):
        entries: list[dict[str, Any]] = tomllib.loads(file.read_text())["mistake"]
        for number, entry in enumerate(entries, 1):
            found[f"{file.stem}-{number}"] = Mistake(**entry)
    return found


MISTAKES = read_mistakes()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a run, to be copied."""
    folder = tmp_path_factory.mktemp("trained")
    write_files(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        make_run()
    return folder


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a folder of files; no ranks start there, and no launcher has set a variable."""

    def refuse(*_: object, **__: object) -> None:
        raise RanksStart

    copied = tmp_path / "copy"
    if MISTAKES[request.node.callspec.params["name"]].needs_run:
        shutil.copytree(request.getfixturevalue("trained"), copied)
    else:
        write_files(copied)
    monkeypatch.chdir(copied)
    monkeypatch.setattr(rank_processes, "channel_pair", refuse)
    for name in LAUNCH_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return copied


def make_wrong(mistake: Mistake, folder: Path) -> None:
    for name, content in mistake.write.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    for pattern in mistake.remove:
        gone = [*folder.glob(pattern)]
        assert gone, f"{pattern} is not there"
        for path in gone:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_clear_error_and_is_mended_by_what_it_suggests(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mistake = MISTAKES[name]
    make_wrong(mistake, folder)
    attempt = Attempt(words=tuple(shlex.split(mistake.type)), env=mistake.env)
    outcome = run(attempt)
    printed = capsys.readouterr()
    assert outcome.code == mistake.exit, printed.err
    assert "Traceback" not in printed.err
    assert f"error[{mistake.rule}]" in printed.err, printed.err
    assert mistake.says in printed.err
    problem = outcome.of(mistake.rule)
    suggested = () if problem is None else problem.suggestions
    tries = [
        again
        for suggestion in suggested
        if problem and (again := mended(attempt, problem, suggestion, mistake.wrong)) is not None
    ][:MOST_TRIED]
    if mistake.edit:
        make_wrong(Mistake(type="", rule="", write=mistake.edit), folder)
        tries = [attempt]
    if mistake.then:
        tries = [Attempt(words=tuple(shlex.split(mistake.then)), env=mistake.env)]
    assert tries, f"nothing of {suggested} can be applied"
    for again in tries:
        after = run(again)
        told = capsys.readouterr().err
        shown = f"{shlex.join(again.words)} {dict(again.env)}\n{told}"
        assert f"error[{mistake.rule}]" not in told, shown
        assert after.code != BUG, shown
        assert after.code in (0, STARTED) or after.problems, shown


def test_there_are_120_mistakes_of_many_rules() -> None:
    rules = {mistake.rule for mistake in MISTAKES.values()}
    assert len(MISTAKES) >= 120
    assert len(rules) >= 60
    assert rules <= {rule.id for rule in all_rules()}
    assert len({mistake.type + str(mistake.env) for mistake in MISTAKES.values()}) >= 115
