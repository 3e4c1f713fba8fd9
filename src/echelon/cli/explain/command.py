# SPDX-License-Identifier: Apache-2.0
"""`echelon explain`: why a rule exists, with an example that breaks it and one that works.

Some pages are no rules, such as `echelon explain zero`: `PAGES` is their table.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
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
from echelon.cli.explain.memory import (
    ask_memory,
    ask_zero,
    memory_json,
    memory_text,
    zero_json,
    zero_text,
)
from echelon.cli.explain.pipeline import ask_pipeline, pipeline_json, pipeline_text
from echelon.cli.explain.units import ask_units, units_json, units_text
from echelon.cli.flags import Json, Settings, argument_problem
from echelon.cli.output import page_columns, print_result
from echelon.config.schema import SETTINGS
from echelon.core.choices.strategies import STRATEGY_NAMES
from echelon.core.errors import ConfigError
from echelon.core.messages.names import SYNONYMS
from echelon.core.messages.removed_settings import REMOVED_SETTINGS
from echelon.core.rulebook import all_rules, areas
from echelon.core.rulebook.config import REMOVED_SETTING, UNKNOWN_RULE
from echelon.core.rules import did_you_mean
from echelon.core.settings.value_types import toml_text
from echelon.handbook.glossary import glossary_tables
from echelon.planner.view.text_layout import WIDTH, fit_page, wrap_text

PIPED = 120  # columns of a page that no terminal shows
LEAST_TEXT = 36  # columns of text beside the ids of rules

MOST_RULES = 12  # on the page of a word


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
        ids = {area: [one.id for one in rules] for area, rules in areas().items()}
        print_result("explain", lambda: {"areas": ids}, lambda: _list(columns), as_json=json)
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
    for removed in REMOVED_SETTINGS.values():
        if found is None and name in (removed.key, removed.key.rpartition(".")[2]):
            says = f"{removed.key} was removed: {removed.message}"
            raise ConfigError(REMOVED_SETTING.problem(says, suggestions=removed.instead))
    if found is None:
        near = did_you_mean(name, [*known_ids(), *PAGES])
        raise ConfigError(UNKNOWN_RULE.problem(f"there is no rule {name!r}", suggestions=near))
    values, page = found
    print_result("explain", lambda: values | {"page": page}, lambda: page, as_json=as_json)


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
    text = (files("echelon.cli") / "search.schema.json").read_text(encoding="utf-8")
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


def find_word(name: str, *, columns: int) -> tuple[dict[str, Any], str] | None:
    """Return the page of a word, as JSON values and as text; None for an unknown word."""
    words = _spellings(name)
    meanings = [*_meanings(words), *_no_strategy_here(_plain(name))]
    named = [key for key in SETTINGS if _plain(key.rpartition(".")[2]) in words]
    settings = [name] if name in SETTINGS else named
    if not meanings and not settings:
        return None
    names = {word for text, _ in meanings for word in _names(text)} | words
    names.discard("data")  # of data parallel; rules of data are about what is read
    rules = [rule.id for rule in all_rules() if names.intersection(rule.id.split("-"))]
    about = {key: SETTINGS[key].about for key in settings}
    values = {"word": name, "meanings": dict(meanings), "settings": about, "rules": rules}
    return values, _page(meanings, settings, rules, columns)


def _spellings(name: str) -> frozenset[str]:
    """Spellings to compare: the word in lower case, and the words of Echelon with its meaning."""
    plain = _plain(name.rpartition(".")[2] if name in SETTINGS else name)
    strategies = [name.ours for name in STRATEGY_NAMES if _plain(name.name) == plain and name.ours]
    return frozenset(
        (plain, *map(_plain, SYNONYMS.get(name.lower(), ())), *map(_plain, strategies))
    )


def _plain(name: str) -> str:
    return re.sub(r"[-_ ]|parallelism$|parallel$", "", name.lower())


def _names(word: str) -> set[str]:
    """Return the names in a word of the glossary: ``tensor parallel (`tp`)`` is tensor, and tp."""
    full, _, short = word.partition(" (")
    return {_plain(name) for name in (full, *re.findall(r"`([^`]+)`", short))}


def _meanings(words: frozenset[str]) -> Iterator[tuple[str, str]]:
    """Yield the words of the glossary with one of these names, each with its meaning."""
    for table in glossary_tables():
        for row in table.rows:
            names = _names(row[0])
            if words & names:
                yield row[0], "; ".join(text for text in row[1:] if text)


def _no_strategy_here(word: str) -> Iterator[tuple[str, str]]:
    """Yield strategies of other tools that Echelon lacks, each with the choice to take instead."""
    for other in STRATEGY_NAMES:
        if not other.ours and _plain(other.name) == word:
            yield f"{other.name} of {other.tool}", other.why


def _page(
    meanings: list[tuple[str, str]], settings: list[str], rules: list[str], columns: int
) -> str:
    lines: list[str] = []
    for word, meaning in meanings:
        lines += wrap_text(f"{word}: {meaning}", "", "  ", columns=columns)
    for key in settings:
        setting = SETTINGS[key]
        default = "" if setting.default is None else f" (default {toml_text(setting.default)})"
        lines += wrap_text(f"--set {key}=...  {setting.about}{default}", "", "  ", columns=columns)
    if rules:
        lines += wrap_text(f"rules: {', '.join(rules[:MOST_RULES])}", "", "  ", columns=columns)
    return "\n".join(lines) + "\n"
