"""`echelon explain`: why a rule exists, with an example that breaks it and one that works.

Some pages are no rules, such as `echelon explain zero`: `explain_pages.py` has the table of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from inspect import cleandoc
from typing import Annotated, Literal

from cyclopts import Parameter

from echelon.cli.explain_entries import entries
from echelon.cli.explain_pages import PAGES, Given, Page, refuse_without_effect
from echelon.cli.flags import Json, Settings
from echelon.cli.output import print_json
from echelon.core.errors import ConfigError
from echelon.core.rulebook import areas
from echelon.core.rulebook.command_line import UNKNOWN_RULE
from echelon.core.rules import Rule, did_you_mean

LIST_WIDTH = 120


def explain(
    rule: Annotated[
        str | None,
        Parameter(
            help="The id in the brackets of an error, of a lint, or of a claim (002-07); or zero: "
            "what ZeRO holds and sends; pipeline: what each schedule waits and holds; context: how "
            "sequences are split; experts: how tokens get to experts; choose: what guides advise; "
            "lints: what is seldom wanted; errata: what guides claim; memory: states, keys and "
            "largest models; units: rates of devices and links; json: the schema of what a search "
            "prints with --json."
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
    degree: Annotated[int | None, Parameter(help="With zero, memory: N, the data ranks.")] = None,
    parameters: Annotated[
        float | None, Parameter(help="With zero: the parameters of a rank's part, such as 7e9.")
    ] = None,
    memory_bytes: Annotated[
        float | None, Parameter(help="With zero: the memory of a rank, such as 80e9.")
    ] = None,
    precision: Annotated[
        Literal["mixed", "fp32"] | None, Parameter(help="With zero: mixed unless said.")
    ] = None,
    pp: Annotated[
        int | None, Parameter(name=("--pp", "-p"), help="With pipeline: its ranks.")
    ] = None,
    microbatches: Annotated[
        int | None,
        Parameter(name=("--microbatches", "-m"), help="With pipeline: those of a step."),
    ] = None,
    json: Json = False,
) -> int:
    """Explain a rule; without one, list all of them by area."""
    given = Given(
        run=run,
        settings=settings,
        cluster=cluster,
        degree=degree,
        parameters=parameters,
        memory_bytes=memory_bytes,
        precision=precision,
        pp=pp,
        microbatches=microbatches,
    )
    refuse_without_effect(rule, given)
    if rule is None:
        _list(areas(), as_json=json)
    elif rule in PAGES:
        _show(rule, PAGES[rule], given, as_json=json)
    else:
        _explain_id(rule, as_json=json)
    return 0


def _show(name: str, page: Page, given: Given, *, as_json: bool) -> None:
    """Print a page that is no rule, in one of its two forms."""
    question = page.ask(given)
    if as_json:
        print_json("explain", {name: page.to_json(question)})
    else:
        print(page.to_text(question), end="")


def _explain_id(name: str, *, as_json: bool) -> None:
    """Print what has this id: a rule, a lint or a claim."""
    known = entries()
    if name not in known:
        near = did_you_mean(name, [*known, *PAGES])
        raise ConfigError(UNKNOWN_RULE.problem(f"there is no rule {name!r}", works=near))
    if as_json:
        print_json("explain", known[name].to_json())
    else:
        print(known[name].page(), end="")


def _list(by_area: Mapping[str, tuple[Rule, ...]], *, as_json: bool) -> None:
    if as_json:
        ids = {area: [rule.id for rule in rules] for area, rules in by_area.items()}
        print_json("explain", {"areas": ids})
        return
    width = max(len(rule.id) for rules in by_area.values() for rule in rules)
    for area, rules in by_area.items():
        print(area.replace("_", " "))
        for rule in rules:
            line = f"  {rule.id:<{width}}  {_first_sentence(rule.why)}"
            print(
                line if len(line) <= LIST_WIDTH else line[: LIST_WIDTH - 4].rstrip(" ,:") + " ..."
            )
        print()


def _first_sentence(text: str) -> str:
    words = " ".join(cleandoc(text).split())
    end = words.find(". ")
    return words if end < 0 else words[: end + 1]
