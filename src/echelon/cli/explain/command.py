# SPDX-License-Identifier: Apache-2.0
"""`echelon explain`: why a rule exists, with an example that breaks it and one that works.

Some pages are no rules, such as `echelon explain zero`: `PAGES` is their table.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from inspect import cleandoc, signature
from types import MappingProxyType
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from echelon.cli.explain.choose import ask_choose, choose_json, choose_text
from echelon.cli.explain.context import ask_context, context_json, context_text
from echelon.cli.explain.entries import (
    ask_errata,
    ask_lints,
    errata_json,
    errata_text,
    find_entry,
    known_ids,
    lints_json,
    lints_text,
)
from echelon.cli.explain.experts import ask_experts, experts_page_json, experts_page_text
from echelon.cli.explain.memory import ask_memory, memory_json, memory_text
from echelon.cli.explain.pipeline import ask_pipeline, pipeline_json, pipeline_text
from echelon.cli.explain.units import ask_units, units_json, units_text
from echelon.cli.explain.words import find_word
from echelon.cli.explain.zero import ask_zero, zero_json, zero_text
from echelon.cli.flags import Json, Settings, argument_problem
from echelon.cli.output import page_columns, print_result
from echelon.core.errors import ConfigError
from echelon.core.messages.removed_settings import REMOVED_SETTINGS
from echelon.core.rulebook import areas
from echelon.core.rulebook.config import REMOVED_SETTING, UNKNOWN_RULE
from echelon.core.rules import did_you_mean
from echelon.planner.view.text_layout import WIDTH, fit_page, wrap_text

PIPED = 120  # columns of a page that no terminal shows
LEAST_TEXT = 36  # columns of text beside the ids of rules


def explain(
    rule: Annotated[
        str | None,
        Parameter(
            help="The id in the brackets of an error, of a lint, or of a claim (distributed-07); "
            "or zero: what ZeRO holds and sends; pipeline: what each schedule waits and holds; "
            "context: how sequences are split; experts: how tokens get to experts; choose: what "
            "guides advise; lints: what is seldom wanted; errata: what guides claim; memory: "
            "states, keys and largest models; units: rates of devices and links; json: the schema "
            "of what a search prints with --json."
        ),
    ] = None,
    run: Annotated[
        str | None,
        Parameter(
            help="A run.toml, or a preset (not with zero, pipeline); with choose a config.json, "
            "too; with errata: wrong, ok, ambiguous, a topic, a guide or an id."
        ),
    ] = None,
    /,
    *,
    settings: Settings = (),
    cluster: Annotated[
        str | None, Parameter(help="With choose: COUNTxDEVICE such as 8xh100, or a file.")
    ] = None,
    dp: Annotated[int | None, Parameter(help="With zero, memory: N, the data ranks.")] = None,
    parameters: Annotated[
        str | None, Parameter(help="With zero: the parameters of a rank's part, such as 7B or 7e9.")
    ] = None,
    memory_bytes: Annotated[
        str | None,
        Parameter(help='With zero, memory: the memory of a rank, such as "80 GB" or 80e9.'),
    ] = None,
    precision: Annotated[
        Literal["mixed", "fp32"] | None, Parameter(help="With zero: mixed unless said.")
    ] = None,
    pp: Annotated[
        int | None, Parameter(name=("--pp", "-p"), help="With pipeline: its ranks.")
    ] = None,
    microbatches: Annotated[
        int | None, Parameter(name=("--microbatches", "-m"), help="With pipeline: those of a step.")
    ] = None,
    json: Json = False,
) -> int:
    """Explain a rule; without one, list all of them by area."""
    columns = page_columns(PIPED)
    flags = (cluster, dp, parameters, memory_bytes, precision, pp, microbatches)
    typed = zip(FLAGS, (run, settings, *flags), strict=True)
    given = {name: value for name, value in typed if value not in (None, ())}
    refuse_without_effect(rule, given)
    if rule is None:
        print_result("explain", _ids, lambda: _list(columns), as_json=json)
    elif rule in PAGES:
        page = PAGES[rule]
        question = page.ask(**given)
        print_result(
            "explain",
            lambda: {rule: page.to_json(question)},
            lambda: _fitted(rule, page.to_text(question, columns=columns), columns),
            as_json=json,
        )
    else:
        _explain_id(rule, as_json=json, columns=columns)
    return 0


def _fitted(name: str, text: str, columns: int) -> str:
    """Return a page with its long lines in several; JSON stays as it is."""
    return text if name == "json" else fit_page(text, columns=columns)


def _explain_id(name: str, *, as_json: bool, columns: int) -> None:
    """Print what has this id: a rule, a lint, a claim, or a word of the field."""
    wide = WIDTH if as_json else columns
    found = find_entry(name, columns=wide) or find_word(name, columns=wide)
    if found is None and (removed := REMOVED_SETTINGS.get(name)):
        says = f"{name} was removed: {removed.message}"
        raise ConfigError(REMOVED_SETTING.problem(says, key=name, suggestions=removed.instead))
    if found is None:
        near = did_you_mean(name, [*known_ids(), *PAGES])
        raise ConfigError(UNKNOWN_RULE.problem(f"there is no rule {name!r}", suggestions=near))
    values, page = found
    print_result("explain", lambda: values | {"page": page}, lambda: page, as_json=as_json)


def _ids() -> dict[str, object]:
    return {"areas": {area: [rule.id for rule in rules] for area, rules in areas().items()}}


def _list(columns: int) -> str:
    """Return every rule by area, each with the sentence of why it is there."""
    by_area = areas()
    width = max(len(rule.id) for rules in by_area.values() for rule in rules)
    lines: list[str] = []
    for area, rules in by_area.items():
        lines.append(area.replace("_", " "))
        for rule in rules:
            text = _first_sentence(rule.why)
            if columns < width + LEAST_TEXT:
                lines.append(f"  {rule.id}")
                lines.extend(wrap_text(text, "    ", "    ", columns=columns))
            else:
                rest = " " * (width + 4)
                lines.extend(wrap_text(text, f"  {rule.id:<{width}}  ", rest, columns=columns))
        lines.append("")
    return "\n".join(lines) + "\n"


def _first_sentence(text: str) -> str:
    words = " ".join(cleandoc(text).split())
    end = words.find(". ")
    return words if end < 0 else words[: end + 1]


FLAGS: Mapping[str, str] = {"run": "RUN", "settings": "--set"} | {
    name: f"--{name.replace('_', '-')}"
    for name in (
        "cluster",
        "dp",
        "parameters",
        "memory_bytes",
        "precision",
        "pp",
        "microbatches",
    )
}
"""How each parameter of a page is typed."""


def search_schema() -> dict[str, Any]:
    """Return the JSON Schema of what a search prints, as published in `search.schema.json`."""
    text = (files("echelon.cli.plan") / "search.schema.json").read_text(encoding="utf-8")
    return json.loads(text)


def schema_text(schema: dict[str, Any], *, columns: int) -> str:
    """Return the schema as a file that validators read, whatever `columns` there are."""
    del columns
    return json.dumps(schema, indent=2) + "\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainPage:
    """Describe a page: flags of an `example`, and how it is made.

    `ask` turns what was typed into a question, or raises ConfigError: its parameters are what the
    page takes. The question has two forms.
    """

    example: str
    ask: Callable[..., Any]
    to_json: Callable[[Any], Mapping[str, object]]
    to_text: Callable[..., str]

    @property
    def takes(self) -> tuple[str, ...]:
        """Return the names of what may be typed after the name of the page."""
        return tuple(signature(self.ask).parameters)


PAGES: Mapping[str, ExplainPage] = MappingProxyType(
    {
        name: ExplainPage(example=example, ask=ask, to_json=to_json, to_text=to_text)
        for name, example, ask, to_json, to_text in (
            ("zero", "--dp 4", ask_zero, zero_json, zero_text),
            ("pipeline", "--pp 4", ask_pipeline, pipeline_json, pipeline_text),
            ("context", "nano --set mesh.cp=2", ask_context, context_json, context_text),
            ("experts", "mixtral-8x7b", ask_experts, experts_page_json, experts_page_text),
            ("choose", "llama3-8b --cluster 8xh100", ask_choose, choose_json, choose_text),
            ("lints", "nano", ask_lints, lints_json, lints_text),
            ("errata", "wrong", ask_errata, errata_json, errata_text),
            ("memory", "llama2-7b --dp 4", ask_memory, memory_json, memory_text),
            ("units", "llama3-8b --set cluster.preset=16xh100", ask_units, units_json, units_text),
            ("json", "", search_schema, dict[str, Any], schema_text),
        )
    }
)
"""The pages by name."""


def refuse_without_effect(page: str | None, given: Mapping[str, object]) -> None:
    """Raise ConfigError where something was typed that `page` (None: no page) does not take."""
    takes = PAGES[page].takes if page is not None and page in PAGES else ()
    by_pages: dict[tuple[str, ...], list[str]] = {}
    for name in (flag for flag in FLAGS if flag in given and flag not in takes):
        pages = tuple(word for word, one in PAGES.items() if name in one.takes)
        by_pages.setdefault(pages, []).append(FLAGS[name])
    problems = [
        argument_problem(
            f"{' '.join(flags)} has an effect on {_named(pages)} only",
            *(f"echelon explain {word} {PAGES[word].example}" for word in pages),
        )
        for pages, flags in by_pages.items()
    ]
    if problems:
        raise ConfigError(problems)


def _named(pages: tuple[str, ...]) -> str:
    """Return the commands that pages are, those after the first without their first words."""
    first, *rest = pages
    return ", ".join([f"`echelon explain {first}`", *(f"`{page}`" for page in rest)])
