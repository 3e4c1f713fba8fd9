"""A flag that several commands have takes the same in all of them, and each is told here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cyclopts import Argument

from echelon.cli.app import COMMANDS, OUT_ELSEWHERE, build_app
from echelon.cli.main import main
from echelon.cli.other_tools import TargetName, WeightFormat

TAKES = {
    "--set": "table.key=value",
    "--pin": "key=value",
    "--workers": "Processes",
    "--cluster": "COUNTxDEVICE",
    "--model": "preset",
    "--extends": "preset",
    "--out": "write",
    "--dtype": "tensors",
    "--model-type": "transformers",
    "--file-bytes": "most bytes",
    "--threads": "at a time",
    "--from": "FILE",
    "--to": "read it",
    "--ranks": "anks",
    "--launcher": "line",
    "--allow": "key",
    "--strategies": "beside one process",
    "--dp": "data ranks",
    "--pp": "ranks",
    "--tp": "ranks",
    "--microbatches": "step",
    "--virtual-stages": "Stages",
    "--most-in-flight": "pairs",
    "--slots": "slots",
    "--max-bytes": "2 GB",
    "--memory-bytes": "80 GB",
    "--parameters": "7e9",
    "--price": "hour",
    "--precision": "mixed",
    "--objective": "tokens",
    "--trainer": "seconds",
    "--subject": "program",
    "--module": "module of your own",
    "--resume": "go on",
    "--step": "step",
    "--mirror": "tensorboard",
    "--sample": "step",
    "--tokenizer": "tokenizer",
    "--format": "read",
    "--field": "field",
    "--split": "part",
    "--prompt": "text",
    "--prompt-file": "file",
    "--max-tokens": "tokens",
    "--temperature": "token",
    "--top-k": "tokens",
    "--top-p": "tokens",
    "--seed": "draw",
    "--block-tokens": "Positions",
}
"""What each flag with a value takes: a word that its help has in every command."""

READERS = {str(TargetName), str(WeightFormat)}
"""Who reads what is written: a plan (`export`) is for others than weights (`export weights`)."""

ONE_OR_MORE = {"pathlib.Path", "tuple[str, ...]"}
"""What `--out` takes: a name, or of commands that write several things one for each."""

RUN = {"run.toml", "preset", "run"}
"""What a RUN may be: its help names one of these."""


def flags_of(name: str) -> Iterator[tuple[str, Argument]]:
    """Yield the flags of a command as `--help` shows them, and its other arguments."""
    app = build_app()
    for word in name.split():
        app = app[word]
    for argument in app.assemble_argument_collection():
        for flag in argument.names:
            if not flag.startswith(("--no-", "--empty-")):
                yield flag, argument


@pytest.mark.parametrize("name", COMMANDS)
def test_a_flag_takes_in_each_command_what_it_takes_in_others(name: str) -> None:
    found = dict(flags_of(name))
    for flag, argument in found.items():
        help_text = argument.parameter.help or ""
        if flag.startswith("--") and argument.hint is not bool:
            assert TAKES[flag] in help_text, f"{name} {flag}: {help_text}"
        if flag == "RUN":
            assert any(word in help_text for word in RUN), f"{name}: {help_text}"


def test_flags_of_one_name_have_one_type_and_one_short_form() -> None:
    types: dict[str, set[str]] = {}
    for name in COMMANDS:
        for flag, argument in flags_of(name):
            if flag.startswith("-"):
                hint = str(argument.hint).replace("<class '", "").replace("'>", "")
                types.setdefault(flag, set()).add(hint.replace(" | None", ""))
    several = {flag: kinds for flag, kinds in types.items() if len(kinds) > 1}
    assert several == {"--to": READERS, "--out": ONE_OR_MORE}


def test_a_setting_that_is_a_flag_too_is_called_the_same() -> None:
    settings = {"mesh.pp": "--pp", "pipeline.virtual_stages": "--virtual-stages"}
    settings |= {"pipeline.most_in_flight": "--most-in-flight", "extends": "--extends"}
    shown = {flag for name in COMMANDS for flag, _ in flags_of(name)}
    for key, flag in settings.items():
        assert flag in shown
        assert flag == "--" + key.rpartition(".")[2].replace("_", "-")
    assert "--times" not in shown, "pipeline.times is a file of measured times"


@pytest.mark.quick("--svg", "-o")
@pytest.mark.parametrize("typed", sorted(OUT_ELSEWHERE))
def test_another_name_of_the_output_is_refused_with_out(
    typed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    writers = [name for name in COMMANDS if "--out" in dict(flags_of(name))]
    assert len(writers) >= 14
    for name in writers:
        assert typed not in dict(flags_of(name))
        needed = {"export": ["--to", "megatron"], "export weights": ["--out", "y"]}.get(name, [])
        assert main([*name.split(), "run", *needed, typed, "x.csv"]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error[unknown-flag]"), name
        assert "--out x.csv" in error.partition("works here:")[2].split("more:")[0], (name, error)


@pytest.mark.parametrize(
    ("typed", "instead"),
    [
        ("plan nano --html=plan.html --figures of", "plan nano --out plan.html --out of/"),
        ("rehearse nano --traces t/", "rehearse nano --out t/rank.json.gz"),
        (
            "schedule show 1f1b --svg a.svg --csv b.csv",
            "schedule show 1f1b --out a.svg --out b.csv",
        ),
    ],
)
def test_a_former_name_is_refused_with_the_whole_line_that_does_it(
    typed: str, instead: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(typed.split()) == 2
    assert f"works here: echelon {instead}" in capsys.readouterr().err


def test_no_other_flag_names_what_is_written() -> None:
    for name in COMMANDS:
        for flag, argument in flags_of(name):
            if flag.startswith("--") and flag != "--out":
                assert "write to" not in (argument.parameter.help or "").lower(), (name, flag)
