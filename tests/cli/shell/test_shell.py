"""`echelon help`, the scripts of completion, and the groups of `--help`."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from echelon.cli.app import COMMANDS, GROUPS, LOUDNESS_FLAGS
from echelon.cli.main import main
from echelon.core.version import __version__

BAR = "\u2500"


def test_every_command_stands_in_one_group() -> None:
    grouped = [first for group in GROUPS.values() for first in group]
    assert sorted(grouped) == sorted({name.split()[0] for name in COMMANDS})


def test_help_shows_groups_in_order_and_the_flags_of_every_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    places = [shown.index(f"{BAR} {name} {BAR}") for name in (*GROUPS, "Every command")]
    assert places == sorted(places)
    for long, short in (*LOUDNESS_FLAGS, ("--help", "-h"), ("--version", "-V")):
        assert f"{long} ({short})" in shown


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_is_what_its_flag_shows(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["help", *name.split()]) == 0
    by_command = capsys.readouterr().out
    assert main([*name.split(), "--help"]) == 0
    assert by_command == capsys.readouterr().out
    assert "-q" in by_command


def test_help_of_no_command_is_refused_with_the_near_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["help", "trian"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error[unknown-command]")
    assert "works here: train " in error


def test_the_version_has_a_short_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-V"]) == 0
    assert capsys.readouterr().out == f"{__version__}\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_gets_a_script_that_it_can_read(
    shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(name.split()[-1] in script for name in COMMANDS)
    assert "cluster" in script
    if shutil.which(shell):
        file = tmp_path / "echelon"
        file.write_text(script)
        subprocess.run([shell, "-n", str(file)], check=True)


@pytest.mark.skipif(shutil.which("bash") is None, reason="this system has no bash")
def test_bash_completes_commands_and_flags_and_falls_back_to_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["completion", "bash"]) == 0
    file = tmp_path / "echelon.bash"
    file.write_text(capsys.readouterr().out)
    asked = f"""
    source {file}
    complete -p echelon
    COMP_WORDS=(echelon tr) COMP_CWORD=1; _echelon; echo "${{COMPREPLY[@]}}"
    COMP_WORDS=(echelon plan nano --cl) COMP_CWORD=3; _echelon; echo "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(["bash", "-c", asked], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "complete -o default -F _echelon echelon",
        "train",
        "--cluster",
    ]
