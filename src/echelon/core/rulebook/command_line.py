# SPDX-License-Identifier: Apache-2.0
"""Rules about what is typed: commands, flags and arguments."""

from echelon.core.rules import Rule

UNKNOWN_COMMAND = Rule(
    id="unknown-command",
    why="""
    The first word after `echelon` names what to do. A word that names nothing is refused, with the
    commands that look like it, and nothing is started.
    """,
    bad="echelon trian run.toml",
    fixed="echelon train run.toml",
)

UNKNOWN_FLAG = Rule(
    id="unknown-flag",
    why="""
    A flag that the command does not have is refused rather than ignored: a run that silently drops
    a setting is a different run. Flags are few on purpose; everything in run.toml is reached by
    `--set table.key=value`, as often as needed.
    """,
    bad="echelon train run.toml --steps 100",
    fixed="echelon train run.toml --set train.steps=100",
)

BAD_ARGUMENT = Rule(
    id="bad-argument",
    why="""
    A required argument is missing, there is one too many, or a flag has no value or one of the
    wrong type. `echelon COMMAND --help` shows what the command takes.
    """,
    bad="echelon train",
    fixed="echelon train run.toml",
)

UNKNOWN_RULE = Rule(
    id="unknown-rule",
    why="""
    `echelon explain` takes the id in the brackets of an error. Without an id it lists every rule by
    area.
    """,
    bad="echelon explain tp-divides-heds",
    fixed="echelon explain tp-divides-heads",
)

NEVER_OVERWRITE = Rule(
    id="never-overwrite",
    why="""
    No command writes over a file that exists, because it may hold the only copy of your settings.
    Name another file, or remove this one yourself.
    """,
    bad="echelon init --out run.toml     # run.toml exists",
    fixed="echelon init --out run-2.toml",
)

CANNOT_WRITE = Rule(
    id="cannot-write",
    why="""
    The file cannot be written where it was asked for: its folder does not exist, may not be written
    to, or the disk is full.
    """,
    bad="echelon init --out missing-folder/run.toml",
    fixed="mkdir missing-folder\nechelon init --out missing-folder/run.toml",
)

OUTPUT_WRITABLE = Rule(
    id="output-writable",
    why="""
    What a command found goes to standard output. Where that cannot be written to the end (a full
    disk behind `>`, a device that refuses), the result is cut short, and the command has failed
    whatever it found.
    """,
    bad="echelon plan nano >/dev/full",
    fixed="echelon plan nano >plan.txt     # on a disk with room",
)

FONT_INSTALLED = Rule(
    id="font-installed",
    why="""
    A figure as PNG has its words drawn into it, by a font of this machine. A container may have
    none; then the figure would have no words. SVG names fonts and needs none here.
    """,
    bad="echelon plan nano --out nano.png     # in a container without fonts",
    fixed="apt-get install fonts-dejavu-core\nechelon plan nano --out nano.png",
)
