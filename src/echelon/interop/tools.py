# SPDX-License-Identifier: Apache-2.0
"""The tools that plans are exchanged with: one record each, which everything else reads.

A tool is a folder here and an entry below. Its folder has the same four files as every other:

    keys.toml     its keys that set nothing here, and settings that it has no word for
    read.py       read_keys: its keys -> settings
    write.py      WRITER: a plan -> its keys, and what it cannot say
    abilities.py  ABILITIES: what a search for it keeps to; NAMES: what it calls our choices

They are imported when they are asked for: whoever wants the names of tools loads none of them. A
tool whose files are read only has no write.py and no abilities.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    from echelon.interop.abilities import ToolAbilities, ToolNames
    from echelon.interop.formats import ToolWriter
    from echelon.interop.import_context import ImportContext
    from echelon.interop.key_reader import KeyReader

WrittenToolName = Literal["megatron", "deepspeed", "torchtitan", "accelerate"]
"""Tools that plans are written for, too."""
ToolName = Literal[WrittenToolName, "horovod", "nemo", "nanotron", "llamafactory", "axolotl"]
"""What `--from` takes; a test holds it to the entries of TOOLS."""
TargetName = Literal["run.toml", WrittenToolName]
"""What `--to` takes."""

FileForm = Literal["json", "toml", "yaml", "command"]
FORMS: tuple[FileForm, ...] = get_args(FileForm)
"""The forms of files, in the order in which a file is held against them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """Describe a tool: its names, how its file is recognised, and where its parts stand."""

    name: ToolName
    """What commands call it; its folder has this name."""
    title: str
    """What people call it."""
    form: FileForm
    """What its file is; keys are parsed by it."""
    file: str
    """Its file in words, as the help of `echelon import` has it."""
    signs: str
    """What a file has that is recognised, in words."""
    pattern: re.Pattern[str]
    """Found in a file of this tool, and in those of no other whose form comes later."""
    base: str | None = None
    """The preset with a model for files that describe none; None where they do, or name one."""
    deepspeed_key: str | None = None
    """The key whose value is the path of a JSON of DeepSpeed; None where it has none."""
    generations: tuple[str, ...] = ()
    """The trainers of `cost/seconds/trainers.py` that run what it can run."""
    also_called: Mapping[str, str] = field(default_factory=dict[str, str])
    """Other names of its generations that `--trainer` takes."""

    @property
    def names(self) -> ToolNames:
        """Return what it calls our schedules, context kinds and optimizers."""
        return self._part("abilities").NAMES

    @property
    def read_keys(self) -> Callable[[KeyReader, ImportContext], None]:
        """Return what notes in a reader what becomes of every key of its file."""
        return self._part("read").read_keys

    @property
    def writer(self) -> ToolWriter:
        """Return how a plan is written in its words."""
        return self._part("write").WRITER

    @property
    def abilities(self) -> ToolAbilities:
        """Return what it can run."""
        return self._part("abilities").ABILITIES

    def abilities_of(self, generation: str) -> ToolAbilities:
        """Return what one of its generations can run."""
        return self._part("abilities").OF_GENERATION.get(generation, self.abilities)

    def _part(self, module: str) -> Any:
        return import_module(f"{__package__}.{self.name}.{module}")


TOOLS: Mapping[ToolName, Tool] = {
    tool.name: tool
    for tool in (
        Tool(
            name="megatron",
            title="Megatron-LM",
            form="command",
            file="a Megatron-LM command in a file",
            signs="a command of Megatron-LM",
            pattern=re.compile(r"--tensor-model-parallel-size|--micro-batch-size"),
            generations=("megatron", "megatron-core", "megatron-core-2025", "megatron-core-2026"),
            also_called={"megatron-lm": "megatron-core-2025"},
        ),
        Tool(
            name="deepspeed",
            title="DeepSpeed",
            form="json",
            file="a DeepSpeed JSON",
            signs="a JSON object",
            pattern=re.compile(r"\A\s*\{"),
            base="nano",
            generations=("megatron-deepspeed", "deepspeed", "deepspeed-2022"),
            # Who names no year does not mean the one whose gathers went parameter by parameter.
            also_called={"deepspeed": "deepspeed-2022", "deepspeed-2021": "deepspeed"},
        ),
        Tool(
            name="torchtitan",
            title="torchtitan",
            form="toml",
            file="a torchtitan TOML or FILE.py:FUNCTION",
            signs="a TOML with [parallelism] or [training]",
            pattern=re.compile(
                r"^\s*\[(parallelism|training|activation_checkpoint)\]", re.MULTILINE
            ),
            generations=("fsdp2", "fsdp2-compiled"),
            also_called={"torchtitan": "fsdp2"},
        ),
        Tool(
            name="accelerate",
            deepspeed_key="deepspeed_config.deepspeed_config_file",
            title="Accelerate",
            form="yaml",
            file="an Accelerate YAML",
            signs="a YAML with distributed_type",
            pattern=re.compile(
                r"\A(?!.*^(base_model|model_name_or_path):)"
                r".*^\s*(distributed_type|fsdp_config|compute_environment)(?=:|\s*(#|$))",
                re.MULTILINE | re.DOTALL,
            ),
            base="nano",
            generations=("fsdp", "fsdp-compiled"),
            also_called={"accelerate": "fsdp"},
        ),
        Tool(
            name="horovod",
            title="Horovod",
            form="command",
            file="a Horovod command in a file",
            signs="a command of Horovod",
            pattern=re.compile(r"\bhorovodrun\b|\bHOROVOD_[A-Z]"),
            base="nano",
        ),
        Tool(
            name="nemo",
            title="NeMo",
            form="yaml",
            file="a NeMo YAML",
            signs="one with exp_manager or trainer",
            pattern=re.compile(r"^(exp_manager|trainer):", re.MULTILINE),
        ),
        Tool(
            name="nanotron",
            title="nanotron",
            form="yaml",
            file="a nanotron YAML",
            signs="one with tokens and parallelism",
            pattern=re.compile(
                r"\A(?=.*^tokens:\s*(#.*)?$).*^parallelism:", re.MULTILINE | re.DOTALL
            ),
        ),
        Tool(
            name="llamafactory",
            deepspeed_key="deepspeed",
            title="LLaMA-Factory",
            form="yaml",
            file="a LLaMA-Factory YAML",
            signs="one with model_name_or_path",
            pattern=re.compile(r"^model_name_or_path:", re.MULTILINE),
            base="nano",
        ),
        Tool(
            name="axolotl",
            deepspeed_key="deepspeed",
            title="Axolotl",
            form="yaml",
            file="an Axolotl YAML",
            signs="one with base_model",
            pattern=re.compile(r"^base_model:", re.MULTILINE),
            base="nano",
        ),
    )
}
"""Every tool; hints name them in this order."""

WRITTEN_TOOLS: Mapping[WrittenToolName, Tool] = {
    name: TOOLS[name] for name in get_args(WrittenToolName)
}
"""Those that plans are written for."""

TARGETS: tuple[TargetName, ...] = ("run.toml", *WRITTEN_TOOLS)

ALSO_CALLED: Mapping[str, str] = {
    name: trainer for tool in TOOLS.values() for name, trainer in tool.also_called.items()
}
"""Names that `--trainer` takes, and the generation whose seconds are theirs."""


def recognition_order() -> list[Tool]:
    """Return the tools in the order in which a file is held against them."""
    return sorted(TOOLS.values(), key=lambda tool: FORMS.index(tool.form))


def describe_files() -> str:
    """Return the files that can be imported, in words."""
    *files, last = [tool.file for tool in recognition_order()]
    text = f"{', '.join(files)}, or {last}"
    return text[0].upper() + text[1:]


def trainer_names() -> list[str]:
    """Return the names that `--trainer` takes for the generations of these tools."""
    tools = TOOLS.values()
    return list(dict.fromkeys(n for tool in tools for n in (*tool.generations, *tool.also_called)))


def tool_of_trainer(trainer: str) -> Tool | None:
    """Return the tool that a generation of trainers belongs to; None for one of no tool here."""
    return next((tool for tool in TOOLS.values() if trainer in tool.generations), None)


def abilities_of_trainer(trainer: str) -> ToolAbilities | None:
    """Return what a generation of trainers can run; None where nothing is known to be missing."""
    tool = tool_of_trainer(trainer)
    if tool is not None:
        return tool.abilities_of(trainer)
    known: Mapping[str, ToolAbilities] = import_module("echelon.interop.abilities").WITHOUT_FILES
    return known.get(trainer)
