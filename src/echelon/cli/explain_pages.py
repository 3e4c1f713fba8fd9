"""The pages of `echelon explain` that are no rules: what each is asked with, and its two forms."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from echelon.cli.explain_choose import ask_choose, choose_json
from echelon.cli.explain_choose_text import choose_text
from echelon.cli.explain_context import context_json, context_text
from echelon.cli.explain_context_fits import ask_context
from echelon.cli.explain_errata import ask_errata, errata_json, errata_text
from echelon.cli.explain_experts import ask_experts, experts_page_json, experts_page_text
from echelon.cli.explain_json import schema_text, search_schema
from echelon.cli.explain_lints import ask_lints, lints_json, lints_text
from echelon.cli.explain_memory import ask_memory, memory_json, memory_text
from echelon.cli.explain_pipeline import ask_pipeline, pipeline_json, pipeline_text
from echelon.cli.explain_units import ask_units, units_json, units_text
from echelon.cli.explain_zero import Precision, ask, zero_json, zero_text
from echelon.core.errors import ConfigError
from echelon.core.rulebook.command_line import BAD_ARGUMENT

FLAGS: Mapping[str, str] = MappingProxyType(
    {
        "run": "RUN",
        "settings": "--set",
        "cluster": "--cluster",
        "degree": "--degree",
        "parameters": "--parameters",
        "memory_bytes": "--memory-bytes",
        "precision": "--precision",
        "pp": "--pp",
        "microbatches": "--microbatches",
    }
)
"""How each field of `Given` is typed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """Hold what was typed after the name of a page; None, or no settings, where nothing was."""

    run: str | None = None
    settings: Sequence[str] = ()
    cluster: str | None = None
    degree: int | None = None
    parameters: float | None = None
    memory_bytes: float | None = None
    precision: Precision | None = None
    pp: int | None = None
    microbatches: int | None = None

    def fields(self) -> tuple[str, ...]:
        """Return the names of those that were typed."""
        return tuple(name for name in FLAGS if getattr(self, name) not in (None, ()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Describe a page: the fields that it `takes`, flags of an `example`, and how it is made.

    `ask` turns what was typed into a question, or raises ConfigError; the question has two forms.
    """

    takes: tuple[str, ...]
    example: str
    ask: Callable[[Given], Any]
    to_json: Callable[[Any], Mapping[str, object]]
    to_text: Callable[[Any], str]


PAGES: Mapping[str, Page] = MappingProxyType(
    {
        "zero": Page(
            takes=("degree", "parameters", "memory_bytes", "precision"),
            example="--degree 4",
            ask=lambda given: ask(
                degree=given.degree,
                parameters=given.parameters,
                memory_bytes=given.memory_bytes,
                precision=given.precision,
            ),
            to_json=zero_json,
            to_text=zero_text,
        ),
        "pipeline": Page(
            takes=("pp", "microbatches"),
            example="--pp 4",
            ask=lambda given: ask_pipeline(pp=given.pp, microbatches=given.microbatches),
            to_json=pipeline_json,
            to_text=pipeline_text,
        ),
        "context": Page(
            takes=("run", "settings"),
            example="nano --set mesh.cp=2",
            ask=lambda given: ask_context(given.run, given.settings),
            to_json=context_json,
            to_text=context_text,
        ),
        "experts": Page(
            takes=("run", "settings"),
            example="mixtral-8x7b",
            ask=lambda given: ask_experts(given.run, given.settings),
            to_json=experts_page_json,
            to_text=experts_page_text,
        ),
        "choose": Page(
            takes=("run", "settings", "cluster"),
            example="llama3-8b --cluster 8xh100",
            ask=lambda given: ask_choose(given.run, given.settings, given.cluster),
            to_json=choose_json,
            to_text=choose_text,
        ),
        "lints": Page(
            takes=("run", "settings"),
            example="nano",
            ask=lambda given: ask_lints(given.run, given.settings),
            to_json=lints_json,
            to_text=lints_text,
        ),
        "errata": Page(
            takes=("run",),
            example="wrong",
            ask=lambda given: ask_errata(given.run),
            to_json=errata_json,
            to_text=errata_text,
        ),
        "memory": Page(
            takes=("run", "settings", "degree", "memory_bytes", "precision"),
            example="llama2-7b --degree 4",
            ask=lambda given: ask_memory(
                given.run,
                given.settings,
                degree=given.degree,
                memory_bytes=given.memory_bytes,
                precision=given.precision,
            ),
            to_json=memory_json,
            to_text=memory_text,
        ),
        "units": Page(
            takes=("run", "settings"),
            example="llama3-8b --set cluster.preset=16xh100",
            ask=lambda given: ask_units(given.run, given.settings),
            to_json=units_json,
            to_text=units_text,
        ),
        "json": Page(
            takes=(),
            example="",
            ask=lambda _: search_schema(),
            to_json=lambda schema: schema,
            to_text=schema_text,
        ),
    }
)
"""The pages by name."""


def refuse_without_effect(page: str | None, given: Given) -> None:
    """Raise ConfigError where something was typed that `page` (None: no page) does not take."""
    takes = PAGES[page].takes if page is not None and page in PAGES else ()
    stray = [name for name in given.fields() if name not in takes]
    by_pages: dict[tuple[str, ...], list[str]] = {}
    for name in stray:
        pages = tuple(word for word, one in PAGES.items() if name in one.takes)
        by_pages.setdefault(pages, []).append(FLAGS[name])
    problems = [
        BAD_ARGUMENT.problem(
            f"{' '.join(flags)} has an effect on {_named(pages)} only",
            set_by="the command line",
            works=tuple(f"echelon explain {word} {PAGES[word].example}" for word in pages),
        )
        for pages, flags in by_pages.items()
    ]
    if problems:
        raise ConfigError(problems)


def _named(pages: tuple[str, ...]) -> str:
    """Return the commands that pages are, those after the first without their first words."""
    first, *rest = pages
    return ", ".join([f"`echelon explain {first}`", *(f"`{page}`" for page in rest)])
