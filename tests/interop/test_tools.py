"""The registry of tools: complete entries, names that are ours, and no second list of tools."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import get_args

import pytest

import echelon
from echelon.api.exporting import WeightFormat
from echelon.core.choices.context_kinds import CONTEXT_KINDS, ContextKindRecord
from echelon.core.choices.optimizers import OPTIMIZERS, OptimizerRecord
from echelon.cost.seconds.trainers import FRAMEWORKS
from echelon.interop.abilities import ToolAbilities, ToolNames, by_word
from echelon.interop.formats import ToolWriter
from echelon.interop.tools import (
    ALSO_CALLED,
    FORMS,
    TARGETS,
    TOOLS,
    WRITTEN_TOOLS,
    TargetName,
    ToolName,
    WrittenToolName,
    describe_files,
    recognition_order,
    tool_of_trainer,
    trainer_names,
)
from echelon.schedule.build import SCHEDULES
from echelon.schedule.builders.builder import Builder

SOURCE = Path(echelon.__file__).parent


def test_the_choices_of_commands_are_the_entries() -> None:
    assert get_args(ToolName) == tuple(TOOLS)
    assert get_args(TargetName) == TARGETS
    assert get_args(WrittenToolName) == tuple(WRITTEN_TOOLS)
    assert tuple(WRITTEN_TOOLS) == tuple(name for name in TOOLS if name in WRITTEN_TOOLS)
    assert list(dict.fromkeys(tool.form for tool in recognition_order())) == list(FORMS)


@pytest.mark.parametrize("name", TOOLS)
def test_every_entry_is_read(name: ToolName) -> None:
    tool = TOOLS[name]
    assert callable(tool.read_keys)
    assert tool.title in tool.file
    assert name in WRITTEN_TOOLS or not tool.generations


@pytest.mark.parametrize("name", WRITTEN_TOOLS)
def test_an_entry_has_its_four_parts(name: WrittenToolName) -> None:
    tool = WRITTEN_TOOLS[name]
    assert tool.name == name
    assert isinstance(tool.names, ToolNames)
    assert isinstance(tool.writer, ToolWriter)
    assert isinstance(tool.abilities, ToolAbilities)
    assert callable(tool.read_keys)
    assert tool.title in tool.file


@pytest.mark.parametrize("name", WRITTEN_TOOLS)
def test_what_a_tool_names_and_can_run_is_ours(name: WrittenToolName) -> None:
    names, abilities = WRITTEN_TOOLS[name].names, WRITTEN_TOOLS[name].abilities
    assert set(names.schedules) | set(abilities.schedules or ()) <= set(SCHEDULES)
    kinds = set(names.context_kinds) | set(abilities.context_kinds or ())
    assert kinds <= set(CONTEXT_KINDS)
    assert set(names.optimizers) <= set(OPTIMIZERS)
    for words in (names.schedules, names.context_kinds, names.optimizers):
        assert by_word(by_word(words)) == words, "two of ours have one word there"


def test_trainers_are_found_by_every_name() -> None:
    for name in trainer_names():
        trainer = ALSO_CALLED.get(name, name)
        assert trainer in FRAMEWORKS
        assert tool_of_trainer(trainer) is not None
    assert tool_of_trainer("echelon") is None
    assert set(WRITTEN_TOOLS) <= set(trainer_names())


def test_files_are_described_for_the_help() -> None:
    text = describe_files()
    assert text[0].isupper()
    assert all(tool.file[1:] in text for tool in TOOLS.values())


@pytest.mark.parametrize(
    "registry", [SCHEDULES, CONTEXT_KINDS, OPTIMIZERS], ids=("schedules", "context", "optimizers")
)
def test_records_name_tools_that_there_are(
    registry: Mapping[str, type[Builder] | ContextKindRecord | OptimizerRecord],
) -> None:
    assert {tool for record in registry.values() for tool in record.tool_names} <= set(TOOLS)


def words_of_a_record(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield what stands in the `tool_names` of a schedule, a context kind or an optimizer."""
    for node in ast.walk(tree):
        match node:
            case (
                ast.keyword(arg="tool_names", value=ast.AST() as value)
                | ast.AnnAssign(target=ast.Name(id="tool_names"), value=ast.AST() as value)
                | ast.Assign(targets=[ast.Name(id="tool_names")], value=ast.AST() as value)
            ):
                yield from ast.walk(value)
            case _:
                pass


def lists_of_tools(tree: ast.AST) -> Iterator[int]:
    """Yield the lines of collections and Literals with the names of two tools or more.

    Some formats of weights are called as their tools are: lists of formats are none of tools.
    """
    formats = set(get_args(WeightFormat)) - set(TOOLS)
    words_of_records = set(words_of_a_record(tree))
    for node in ast.walk(tree):
        if node in words_of_records:
            continue
        if isinstance(node, ast.Tuple | ast.List | ast.Set):
            items = node.elts
        elif isinstance(node, ast.Dict):
            items = node.keys
        else:
            continue
        words = {item.value for item in items if isinstance(item, ast.Constant)}
        if len(words & set(TOOLS)) > 1 and not words & formats:
            yield node.lineno


@pytest.mark.slow
def test_tools_are_listed_in_one_place() -> None:
    # The seconds of trainers are fitted by generation, below this floor, and so is how far off.
    fitted = SOURCE / "cost" / "seconds"
    bands = SOURCE / "planner" / "predict" / "residuals.py"
    found = [
        f"{path.relative_to(SOURCE)}:{line}"
        for path in sorted(SOURCE.rglob("*.py"))
        if not path.is_relative_to(fitted) and path != bands
        for line in lists_of_tools(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert {place.partition(":")[0] for place in found} == {"interop/tools.py"}
