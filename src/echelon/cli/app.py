# SPDX-License-Identifier: Apache-2.0
"""The commands and their parser, their help, and messages of everything that goes wrong."""

from __future__ import annotations

import logging
import platform
import shlex
import sys
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal, get_args

from cyclopts import App, CycloptsError, Group, Parameter
from cyclopts.exceptions import (
    CoercionError,
    MissingArgumentError,
    UnknownCommandError,
    UnknownOptionError,
    UnusedCliTokensError,
)

from echelon.cli.output import (
    give_up,
    loudness,
    print_error,
    print_error_json,
    split_loudness,
    stdout_refuses,
)
from echelon.core.errors import ConfigError, EchelonError, Problem
from echelon.core.messages.names import SYNONYMS
from echelon.core.messages.notes import NOTES
from echelon.core.rulebook import config as command_line
from echelon.core.rules import did_you_mean
from echelon.core.version import __version__

OF_WORDS = frozenset(
    rule.id
    for rule in (
        command_line.BAD_ARGUMENT,
        command_line.UNKNOWN_COMMAND,
        command_line.UNKNOWN_FLAG,
        command_line.UNKNOWN_RULE,
    )
)
"""Rules of the words of a command, not of the settings of a run."""

EXIT_BUG = 70  # EX_SOFTWARE of sysexits.h

COMMANDS = {
    "init": ("echelon.cli.run_file:init", "Write a run.toml that builds on a preset."),
    "import": (
        "echelon.cli.other_tools:import_",
        "Turn a configuration of another tool into a run.",
    ),
    "export": (
        "echelon.cli.other_tools:EXPORT",
        "Write a plan for another tool, or as a run.toml.",
    ),
    "export weights": (
        "echelon.cli.other_tools:weights",
        "Write trained weights for transformers, vLLM, DeepSpeed and others.",
    ),
    "compare": ("echelon.cli.compare:compare", "Show what differs between two plans."),
    "plan": ("echelon.cli.plan:plan", "Check a run; show what its ranks hold and send."),
    "explore": (
        "echelon.cli.plan:explore",
        "Write a page in which a plan follows its controls.",
    ),
    "prove": ("echelon.cli.prove:prove", "Prove that a plan computes what one device computes."),
    "rehearse": (
        "echelon.cli.rehearse:rehearse",
        "Find out what ranks would do on GPUs, without one.",
    ),
    "train": ("echelon.cli.train:train", "Train a run; --resume goes on with one."),
    "generate": ("echelon.cli.generate:generate", "Write text with a trained model."),
    "observe": ("echelon.cli.observe:observe", "Say what a run did; draw its pipeline."),
    "calibrate": (
        "echelon.cli.calibrate:CALIBRATE",
        "Measure this machine, or a model's blocks.",
    ),
    "calibrate merge": (
        "echelon.cli.calibrate:merge",
        "Join calibrations of a device, of its links, or of several nodes.",
    ),
    "demo": ("echelon.cli.demo:demo", "Plan, prove and train a small model here."),
    "explain": ("echelon.cli.explain.command:explain", "Explain a rule, or list all of them."),
    "config show": ("echelon.cli.run_file:show", "Show every setting and where it came from."),
    "config presets": ("echelon.cli.run_file:presets", "List runs, models and clusters."),
    "schedule show": ("echelon.cli.schedule.command:show", "Draw a pipeline schedule."),
    "schedule check": (
        "echelon.cli.schedule.command:check",
        "Prove a pipeline schedule in a file.",
    ),
    "data prepare": ("echelon.cli.data:prepare", "Turn text into token shards."),
    "data show": ("echelon.cli.data:show", "Say what is in prepared data."),
    "data look": ("echelon.cli.data:look", "Say what a run reads, and show a sample of a step."),
    "doctor": ("echelon.cli.doctor:doctor", "Check that this machine can plan, prove and train."),
    "help": ("echelon.cli.app:help_", "Show what a command takes."),
    "completion": ("echelon.cli.app:completion", "Print the completion script of a shell."),
}
"""Each command, in the order of a first run: where its function is, and what it does."""

GROUPS = {
    "Plan": ("init", "plan", "explore", "compare", "schedule", "calibrate", "config"),
    "Prove": ("prove", "rehearse"),
    "Run": ("demo", "data", "train", "generate"),
    "Look": ("observe", "explain", "doctor", "help", "completion"),
    "Convert": ("import", "export"),
}
"""First words of the commands, as `--help` groups them."""

FAMILIES = {
    "config": "Show the settings of a run, and the presets.",
    "schedule": "Draw pipeline schedules, and prove your own.",
    "data": "Turn text into token shards, and look at them.",
}
"""The first words that several commands share."""

LOUDNESS_FLAGS = {
    ("--quiet", "-q"): "Print no notes and no progress on stderr.",
    (
        "--verbose",
        "-v",
    ): "Print also files read, origins of settings, seconds, and where it failed.",
}
"""Flags that `cli/output.py` takes out of every command."""

FLAGS_OF_ALL = ("--help", "--version", *(long for long, _ in LOUDNESS_FLAGS))
"""Flags that need no command."""

_EXAMPLES = {
    "echelon plan": "echelon plan llama3-8b --cluster 8xh100",
    "echelon calibrate merge": "echelon calibrate merge A.toml B.toml --out C.toml",
    "echelon compare": "echelon compare nano run.toml",
    "echelon observe": "echelon observe runs/nano",
    "echelon train": "echelon train nano",
    "echelon generate": "echelon generate runs/nano --prompt Once",
    "echelon explore": "echelon explore --out explore.html",
    "echelon export": "echelon export nano --to run.toml",
    "echelon export weights": "echelon export weights runs/nano --out weights",
    "echelon import": "echelon import ds_config.json",
    "echelon data prepare": "echelon data prepare corpus.txt --out tokens",
    "echelon data show": "echelon data show tokens",
    "echelon data look": "echelon data look tokens",
    "echelon rehearse": "echelon rehearse nano",
    "echelon schedule show": "echelon schedule show 1f1b -p 4 -m 8",
    "echelon schedule check": "echelon schedule check schedule.csv",
}
"""What to type where a command lacks what it needs."""
OUT_ELSEWHERE = frozenset(
    (
        *("--html", "--figures", "--svg", "--csv", "--traces"),
        *("-o", "--output", "--outfile", "--output-dir"),
    )
)
"""What the flag of an output is called in other tools, and was called here."""
Shell = Literal["bash", "zsh", "fish"]


def build_app() -> App:
    """Return the parser; a command's module is imported when the command is named."""
    app = App(
        name="echelon",
        help="Plan a parallel training run, prove it against one device, and train it.",
        version=__version__,
        version_flags=("--version", "-V"),
        help_epilogue="Every setting of run.toml is also --set table.key=value. Each command takes "
        "-q (no notes on stderr) and -v (more of them).",
        result_action="return_value",
        default_parameter=Parameter(negative=()),
        exit_on_error=False,
        print_error=False,
        suppress_keyboard_interrupt=False,
    )
    firsts = [first for group in GROUPS.values() for first in group]
    panels = {name: Group(name, sort_key=order) for order, name in enumerate(GROUPS)}
    group_of = {first: panels[name] for name, group in GROUPS.items() for first in group}
    everywhere = Group("Every command", sort_key=len(panels))
    for flag in (app["--help"], app["--version"]):
        flag.group = (everywhere,)
    families = {
        name: App(name=name, help=help_line, group=group_of[name], sort_key=firsts.index(name))
        for name, help_line in FAMILIES.items()
    }
    for family in families.values():
        app.command(family)
    for order, (name, (function, help_line)) in enumerate(COMMANDS.items()):
        family, _, verb = name.rpartition(" ")
        if family and family not in families:
            continue  # A command such as calibrate brings its own.
        if family:
            families[family].command(function, name=verb, help=help_line, sort_key=order)
        else:
            place = firsts.index(name)
            app.command(function, name=name, help=help_line, sort_key=place, group=group_of[name])
    for names, help_line in LOUDNESS_FLAGS.items():
        app.command(App(name=names, help=help_line, group=everywhere))
    return app


def run(arguments: list[str]) -> int:
    """Run one command and return its exit code; every error of the user's is printed once."""
    arguments, asked = split_loudness(arguments)
    if len(asked) > 1:
        return _report(
            arguments,
            ConfigError(
                command_line.BAD_ARGUMENT.problem(
                    "--quiet and --verbose ask for the opposite", suggestions=("-q", "-v")
                )
            ),
        )
    with loudness(asked.pop() if asked else "normal"):
        NOTES.debug(f"echelon {__version__}, Python {platform.python_version()}")
        return _run_command(arguments)


def _run_command(arguments: list[str]) -> int:
    try:
        result = build_app()(arguments)
    except CycloptsError as error:
        return _report(arguments, ConfigError(_usage_problem(error, arguments)))
    except EchelonError as error:
        return _report(arguments, error)
    except BrokenPipeError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and stdout_refuses():
            raise
        return _report_bug()
    return result if isinstance(result, int) else 0


def _report(arguments: list[str], error: EchelonError) -> int:
    error = _with_typed(arguments, error)
    if NOTES.isEnabledFor(logging.DEBUG) and error.__traceback__ is not None:
        NOTES.debug("".join(traceback.format_tb(error.__traceback__)).rstrip())
    if "--json" in arguments:
        print_error_json(_command_of(arguments), error)
    else:
        try:
            print_error(error)
        except OSError:
            give_up(sys.stderr)
    return error.exit_code


def _with_typed(arguments: Sequence[str], error: EchelonError) -> EchelonError:
    """Return an error whose problems of the words that were typed say which words they were."""
    if not any(problem.rule in OF_WORDS and not problem.set_by for problem in error.problems):
        return error
    typed = shlex.join(["echelon", *arguments])
    return error.with_problems(
        replace(one, set_by=typed) if one.rule in OF_WORDS and not one.set_by else one
        for one in error.problems
    )


def _command_of(arguments: Sequence[str]) -> str:
    """Return the name of the command as it stands in its results too; "echelon" for none."""
    words = [argument for argument in arguments if not argument.startswith("-")]
    return next((name for n in (2, 1) if (name := " ".join(words[:n])) in COMMANDS), "echelon")


def _report_bug() -> int:
    traceback.print_exc()
    print(f"\nThis is a bug in Echelon {__version__}, not in what you typed.", file=sys.stderr)
    return EXIT_BUG


def _usage_problem(error: CycloptsError, arguments: Sequence[str]) -> Problem:
    error.verbose = False
    if isinstance(error, UnknownCommandError):
        typed = " ".join([*(error.command_chain or ()), *(error.unused_tokens or ())[:1]])
        if typed.startswith("-"):
            near = did_you_mean(typed, FLAGS_OF_ALL) or FLAGS_OF_ALL
            return command_line.UNKNOWN_FLAG.problem(
                f"echelon has no flag {typed}",
                suggestions=[f"echelon {flag}" for flag in near],
            )
        near = did_you_mean(typed, COMMANDS)
        return command_line.UNKNOWN_COMMAND.problem(
            f"there is no command {typed!r}",
            suggestions=near or COMMANDS,
        )
    if isinstance(error, UnknownOptionError):
        return _unknown_flag(error, arguments)
    message = " ".join(str(error).split())
    other = next(
        (name for one in arguments if (name := one.partition("=")[0]) in OUT_ELSEWHERE), ""
    )
    if isinstance(error, MissingArgumentError) and other and "--out requires" in message:
        return _out_elsewhere(other, arguments)
    if isinstance(error, CoercionError) and (problem := _wrong_choice(error)):
        return problem
    if isinstance(error, UnusedCliTokensError):
        message = f"more arguments than the command takes: {' '.join(error.unused_tokens or ())}"
    command = " ".join(["echelon", *(error.command_chain or ())])
    example = _resumed(arguments) if command == "echelon train" else _EXAMPLES.get(command)
    flag = _default_of(error)
    more = [*([flag] if flag else []), *([example] if example else []), f"{command} --help"]
    return command_line.BAD_ARGUMENT.problem(message, suggestions=more)


def _resumed(arguments: Sequence[str]) -> str:
    """Example of a command of training; with the run that `--resume` names."""
    words = [part for word in arguments for part in word.partition("=")[::2] if part]
    if "--resume" not in words:
        return _EXAMPLES["echelon train"]
    after = words[words.index("--resume") + 1 :]
    typed = after[0] if after and not after[0].startswith("-") else "runs/nano"
    run = typed.rstrip("/").partition("/checkpoints")[0]
    return f"echelon train {run}/run.toml --resume {typed}"


def _wrong_choice(error: CoercionError) -> Problem | None:
    """Return the problem of a word that is none of a flag's few; None for another value."""
    if error.argument is None or error.token is None:
        return None
    words = [
        str(word)
        for hint in (error.argument.hint, *get_args(error.argument.hint))
        for word in get_args(hint)
        if isinstance(word, str)
    ]
    words = words or [*getattr(error.argument.hint, "__members__", ())]
    if not words:
        return None
    name, typed = error.argument.name, str(error.token.value)
    flag = f"{name} " if name.startswith("-") else ""
    return command_line.BAD_ARGUMENT.problem(
        f"{flag}{typed} is none of {', '.join(words)}",
        suggestions=[f"{flag}{word}" for word in did_you_mean(typed, words) or words],
    )


def _default_of(error: CycloptsError) -> str:
    """Return a flag with its default, where its value is none; empty without a default."""
    if not isinstance(error, CoercionError) or error.argument is None:
        return ""
    default = error.argument.field_info.default
    number = isinstance(default, int | float) and not isinstance(default, bool)
    return f"{error.argument.name} {default}" if number else ""


def _unknown_flag(error: UnknownOptionError, arguments: Sequence[str]) -> Problem:
    flag = (error.token.keyword or error.token.value or "").split("=")[0]
    known = [name for argument in error.argument_collection for name in argument.names]
    flags = [name for name in known if name.startswith("--")]
    settings = _settings_called(flag) if "--set" in flags else ()
    if "--out" in flags and flag in OUT_ELSEWHERE:
        return _out_elsewhere(flag, arguments)
    return command_line.UNKNOWN_FLAG.problem(
        f"{' '.join(['echelon', *(error.command_chain or ())])} has no flag {flag}",
        suggestions=settings or did_you_mean(flag, flags) or [*flags, "--help"],
    )


def _out_elsewhere(flag: str, arguments: Sequence[str]) -> Problem:
    return command_line.UNKNOWN_FLAG.problem(
        f"{flag} is --out here, and what its value ends in says what is written",
        suggestions=(shlex.join(["echelon", *_with_out(arguments)]),),
    )


def _with_out(arguments: Sequence[str]) -> list[str]:
    """Return a command with `--out` for each other name of it, and values as it takes them."""
    found = list[str]()
    before = ""
    for word in arguments:
        name, equals, value = word.partition("=")
        if name in OUT_ELSEWHERE:
            found.extend(("--out", _as_out(name, value)) if equals else ("--out",))
            before = "" if equals else name
        else:
            found.append(_as_out(before, word) if before else word)
            before = ""
    return found


def _as_out(flag: str, value: str) -> str:
    """Return the value of `--out` that asks for what a former flag asked for."""
    if flag == "--traces":
        return f"{value.rstrip('/')}/rank.json.gz"
    is_folder = flag in ("--html", "--figures") and not Path(value).suffix
    return f"{value.rstrip('/')}/" if is_folder else value


def _settings_called(flag: str) -> tuple[str, ...]:
    """Return how settings are typed that have the name of a flag: ``--tp`` is ``--set mesh.tp=``.

    A table that has its name stands for its first settings; another tool's word for one does, too.
    """
    from echelon.config.schema import SETTINGS

    word = flag.lstrip("-").replace("-", "_")
    parts = {key: key.split(".") for key in SETTINGS}
    found = [key for key, names in parts.items() if names[-1] == word]
    found = found or [key for key, names in parts.items() if names[0] == word]
    found = found or [
        key
        for meant in SYNONYMS.get(word, ())
        for key, names in parts.items()
        if names[-1] == meant
    ]
    return tuple(f"--set {key}=..." for key in found[:3])


def help_(
    *command: Annotated[str, Parameter(help="A command, such as plan or data prepare.")],
) -> int:
    """Show what a command takes, as `echelon COMMAND --help` does; without one, list all."""

    build_app()([*command, "--help"])
    return 0


def completion(
    shell: Annotated[Shell, Parameter(help="The shell that reads the script.")], /
) -> int:
    """Print the script by which a shell completes commands, flags and files.

    bash: echelon completion bash > ~/.local/share/bash-completion/completions/echelon
    zsh:  echelon completion zsh > DIR/_echelon, for a DIR of $fpath
    fish: echelon completion fish > ~/.config/fish/completions/echelon.fish
    """

    script = build_app().generate_completion(shell=shell)
    # Where the script knows no word, the shell offers files: RUN is a preset or a run.toml.
    print(script.replace("complete -F ", "complete -o default -F "))
    return 0
