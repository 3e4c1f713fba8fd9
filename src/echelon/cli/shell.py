# SPDX-License-Identifier: Apache-2.0
"""`echelon help` and `echelon completion`: flags of a command, and the script of a shell."""

from __future__ import annotations

from typing import Annotated, Literal

from cyclopts import Parameter

Shell = Literal["bash", "zsh", "fish"]


def help_(
    *command: Annotated[str, Parameter(help="A command, such as plan or data prepare.")],
) -> int:
    """Show what a command takes, as `echelon COMMAND --help` does; without one, list all."""
    from echelon.cli.app import build_app

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
    from echelon.cli.app import build_app

    script = build_app().generate_completion(shell=shell)
    # Where the script knows no word, the shell offers files: RUN is a preset or a run.toml.
    print(script.replace("complete -F ", "complete -o default -F "))
    return 0
