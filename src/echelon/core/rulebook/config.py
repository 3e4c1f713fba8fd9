# SPDX-License-Identifier: Apache-2.0
"""Rules about run files, and about what is typed on a command line."""

from echelon.core.rules import Area, Rule

TOML_SYNTAX = Rule(
    id="toml-syntax",
    why="""
    A run file is TOML 1.0 in UTF-8. Strings stand in double quotes, tables in [brackets], and a key
    is set once. The message names the line.
    """,
    example="""
    [mesh]
    %s
    """,
    bad="tp = two",
    fixed="tp = 2",
)

NO_SUCH_FILE = Rule(
    id="no-such-file",
    why="""
    A file that a run names must exist and be readable. The message lists what does lie beside it.
    A path inside a run file is relative to that file; one after --set is relative to where you are.
    """,
    bad="echelon train exmaples/nano.toml",
    fixed="echelon train examples/nano.toml",
)

UNKNOWN_PRESET = Rule(
    id="unknown-preset",
    why="""
    A preset is a run, a model or a cluster that comes with Echelon. A cluster is also COUNTxDEVICE,
    such as 8xh100 or 256xa100-80gb: whole nodes, or one part of a node.
    """,
    example="""
    [model]
    %s
    """,
    bad='preset = "lama3-8b"',
    fixed='preset = "llama3-8b"',
)

EXTENDS_CYCLE = Rule(
    id="extends-cycle",
    why="""
    `extends` names what a run file builds on. A file that builds on itself, directly or through
    others, has no first value.
    """,
    bad="""
    # a.toml
    extends = "b.toml"
    # b.toml
    extends = "a.toml"
    """,
    fixed="""
    # b.toml
    extends = "nano"
    """,
)

SET_SYNTAX = Rule(
    id="set-syntax",
    why="""
    --set takes table.key=value. The value is TOML; a word that is not TOML is taken as a string, so
    quotes are needed only inside lists. `extends` is not a setting of one run but of a file.
    """,
    bad="echelon train run.toml --set mesh.tp 8",
    fixed="echelon train run.toml --set mesh.tp=8",
)

UNKNOWN_KEY = Rule(
    id="unknown-key",
    why="""
    A key or table that Echelon does not know is refused rather than ignored: a misspelt setting
    that is silently dropped is a different run.
    """,
    example="""
    [mesh]
    %s
    """,
    bad="tensor = 8",
    fixed="tp = 8",
)

REMOVED_SETTING = Rule(
    id="removed-setting",
    why="""
    A setting of an earlier version that is gone is refused rather than ignored: the run would be
    another one. The message says what to write instead. A file that Echelon wrote names every
    setting; one that is gone is read where it holds the value of runs that do not use it.
    """,
    example="""
    [mesh]
    dp_replicate = 2
    [batch]
    global_sequences = 4
    [servers]
    count = 1
    updates = "asynchronous"
    %s
    """,
    bad="min_workers = 1",
    fixed="max_staleness = 1",
)

WRONG_TYPE = Rule(
    id="wrong-type",
    why="""
    Values are not converted: "2" is a string, 2.0 a number with a fraction, true a truth value, and
    none of them is the whole number 2.
    """,
    example="""
    [mesh]
    %s
    """,
    bad='tp = "2"',
    fixed="tp = 2",
)

UNREADABLE_QUANTITY = Rule(
    id="unreadable-quantity",
    why="""
    A size, a rate or a time is a number in bytes, bytes/s, FLOP/s or seconds, or a text with its
    unit: "24 GB" (10^9), "80 GiB" (2^30), "50 GB/s", "400 Gb/s" (bits, 50 GB/s), "989 TFLOP/s",
    "8 us". Case counts: GB are bytes and Gb bits. Any other text is refused, not guessed.
    """,
    example="""
    [zero]
    %s
    """,
    bad='bucket_bytes = "25 megs"',
    fixed='bucket_bytes = "25 MiB"',
)

OUT_OF_RANGE = Rule(
    id="out-of-range",
    why="""
    The value has the right type and lies outside what the setting can mean: a count below one, a
    negative learning rate, a fraction of one or more.
    """,
    example="""
    [optimizer]
    %s
    """,
    bad="learning_rate = -0.001",
    fixed="learning_rate = 0.001",
)

UNKNOWN_CHOICE = Rule(
    id="unknown-choice",
    why="""
    Some settings take one of a few words. Nothing else is understood, and nothing is guessed.
    """,
    example="""
    [optimizer]
    %s
    """,
    bad='schedule = "cosin"',
    fixed='schedule = "cosine"',
)

MISSING_SETTING = Rule(
    id="missing-setting",
    why="""
    Most settings have a default; the model and the size of a batch have none, because no value is
    right for most people. A preset under `extends` brings both.
    """,
    bad="""
    [model]
    preset = "gpt2"
    """,
    fixed="""
    [model]
    preset = "gpt2"
    [batch]
    global_sequences = 512
    sequence_length = 1024
    """,
)

CONFLICTING_SETTINGS = Rule(
    id="conflicting-settings",
    why="""
    Two settings of one file say different things about the same choice, and neither is the more
    special. A value of yours does override one of a preset, and --set overrides a file: those are
    no conflicts.
    """,
    example="""
    [model]
    preset = "llama3-8b"
    %s
    """,
    bad='hf_config = "config.json"',
    fixed="layers = 4                  # a field of yours overrides the preset's",
)

NO_EFFECT = Rule(
    id="no-effect",
    why="""
    A setting that cannot change anything is an error: whoever wrote it believes that it does. The
    message says which other setting would give it a meaning. A value equal to the default is fine.
    """,
    bad="""
    [mesh]
    tp = 1
    sequence_parallel = true    # splits over tp, and tp is 1
    """,
    fixed="""
    [mesh]
    tp = 2
    sequence_parallel = true
    """,
)

NOT_BUILT_YET = Rule(
    id="not-built-yet",
    why="""
    The name is reserved: the setting is part of Echelon's design and this version cannot do it. It
    is refused, not ignored, and the message says what works today.
    """,
    bad="""
    [model]
    activation = "gelu"
    [model.experts]             # which have SiLU
    num_experts = 4
    top_k = 2
    ffn = 64
    """,
    fixed="""
    [model]
    activation = "silu"
    [model.experts]
    num_experts = 4
    top_k = 2
    ffn = 64
    """,
)


COMMAND_LINE_AREA = Area("command_line")
"""What is typed: commands, flags and arguments."""

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
