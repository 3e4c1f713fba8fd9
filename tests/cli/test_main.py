"""How a process ends: interrupts, closed pipes, full disks, and what `--help` costs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from echelon import __version__
from echelon.cli import main as cli
from echelon.cli.app import COMMANDS, build_app


def run_child(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "echelon", *arguments], capture_output=True, text=True, check=False
    )


def test_ctrl_c_ends_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt() -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("echelon.cli.doctor.doctor", interrupt)
    assert cli.main(["doctor"]) == 130
    assert capsys.readouterr() == ("", "interrupted\n")


INTERRUPTED_AT = """
import os, signal, sys

module = sys.argv.pop(1)

class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == module:
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Finder)
from echelon.cli.main import main
sys.exit(main())
"""


@pytest.mark.parametrize(
    "module", ["cyclopts", "echelon.planner.search.search", "numpy", "rich.console"]
)
def test_ctrl_c_is_one_line_while_modules_load(module: str) -> None:
    arguments = ["plan", "nano", "--cluster", "8xh100", "--pin", "tp=nothing"]
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_AT, module, *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_a_closed_pipe_is_no_traceback(tmp_path: Path) -> None:
    log = tmp_path / "log"
    shell = f'"{sys.executable}" -m echelon explain 2>"{log}" | head -n 1'
    done = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, check=False)
    assert done.stdout != ""
    assert log.read_text() == ""


LONG = ("explain", "checkpoint-exists"), ("config", "show", "nano", "--json"), ("plan", "nano")


@pytest.mark.one_in(2)
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize(
    "arguments", [("--version",), ("--help",), *LONG, ("plan", "no", "--json")]
)
def test_output_that_cannot_be_written_is_one_error(arguments: tuple[str, ...]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "echelon", *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 3
    assert done.stderr.startswith("error[output-writable]: the output could not be written")
    assert len(done.stderr.splitlines()) == 2


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_an_error_that_nobody_can_read_keeps_its_exit_code() -> None:
    with Path("/dev/full").open("w") as full:
        arguments = [sys.executable, "-m", "echelon", "explain", "no-rule"]
        assert subprocess.run(arguments, stderr=full, check=False).returncode == 2


def test_a_closed_output_is_no_traceback() -> None:
    shell = f'"{sys.executable}" -m echelon --version >&-'
    done = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_module_runs_as_the_script_does() -> None:
    done = run_child("--version")
    assert (done.returncode, done.stdout.strip()) == (0, __version__)


def test_help_of_every_command_imports_no_torch() -> None:
    code = (
        "import sys\n"
        "from echelon.cli.app import COMMANDS\n"
        "from echelon.cli.main import main\n"
        "codes = {main([*name.split(), '--help']) for name in COMMANDS} | {main(['--help'])}\n"
        "print('torch' in sys.modules, codes, file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1] == "False {0}"


def test_no_command_has_more_than_twelve_flags() -> None:
    app = build_app()
    for name in COMMANDS:
        found = app
        for word in name.split():
            found = found[word]
        arguments = found.assemble_argument_collection()
        # What is named by its place, as RUN is, is no flag.
        flags = [one for one in arguments if one.field_info.kind.name != "POSITIONAL_ONLY"]
        assert arguments, name
        assert len(flags) <= 12, name


def test_what_is_written_is_named_by_one_flag() -> None:
    app, named = build_app(), set[str]()
    for name in COMMANDS:
        found = app
        for word in name.split():
            found = found[word]
        for argument in found.assemble_argument_collection():
            named |= {flag for flag in argument.names if flag.startswith("--out")}
    assert named == {"--out"}
