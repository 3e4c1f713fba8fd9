"""`echelon explain`: why a rule exists, with an example that breaks it and one that works.

Four pages are no rules: `echelon explain zero` derives what ranks hold and send at each ZeRO
stage, `echelon explain pipeline` what they wait and hold under each schedule, `echelon explain
context` how a long sequence is split, and which way fits a run, `echelon explain experts` how
tokens get to experts, and what that costs a run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import cleandoc
from typing import Annotated, Literal, TypeVar

from cyclopts import Parameter

from echelon.cli.explain_context import context_json, context_text
from echelon.cli.explain_context_fits import ask_context
from echelon.cli.explain_experts import ask_experts, experts_page_json, experts_page_text
from echelon.cli.explain_pipeline import ask_pipeline, pipeline_json, pipeline_text
from echelon.cli.explain_zero import ask, zero_json, zero_text
from echelon.cli.flags import Json, Settings
from echelon.cli.output import print_json
from echelon.core.errors import ConfigError
from echelon.core.rulebook import areas
from echelon.core.rulebook.command_line import BAD_ARGUMENT, UNKNOWN_RULE
from echelon.core.rules import Rule, did_you_mean
from echelon.core.serialize import to_json

LIST_WIDTH = 120
ZERO = "zero"
PIPELINE = "pipeline"
CONTEXT = "context"
EXPERTS = "experts"
PAGES = {
    ZERO: "--degree 4",
    PIPELINE: "--pp 4",
    CONTEXT: "nano --set mesh.cp=2",
    EXPERTS: "mixtral-8x7b",
}
"""The pages that are no rules, and flags that they take."""

Asked = TypeVar("Asked")


def explain(
    rule: Annotated[
        str | None,
        Parameter(
            help="The id in the brackets of an error; or zero: what ZeRO holds and sends; or "
            "pipeline: what each schedule waits and holds; or context: how sequences are split; or "
            "experts: how tokens get to experts."
        ),
    ] = None,
    run: Annotated[
        str | None, Parameter(help="With context or experts: a run.toml, or a preset.")
    ] = None,
    /,
    *,
    settings: Settings = (),
    degree: Annotated[int | None, Parameter(help="With zero: N, the data ranks.")] = None,
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
    of_zero = {
        "--degree": degree,
        "--parameters": parameters,
        "--memory-bytes": memory_bytes,
        "--precision": precision,
    }
    of_pipeline = {"--pp": pp, "--microbatches": microbatches}
    of_run = {"RUN": run, "--set": settings or None}
    for pages, flags in (
        ((ZERO,), of_zero),
        ((PIPELINE,), of_pipeline),
        ((CONTEXT, EXPERTS), of_run),
    ):
        if rule not in pages:
            _refuse_without_effect(flags, pages)
    if rule == EXPERTS:
        forms = experts_page_json, experts_page_text
        return _show(EXPERTS, ask_experts(run, settings), forms, json)
    if rule == CONTEXT:
        return _show(CONTEXT, ask_context(run, settings), (context_json, context_text), json)
    if rule == PIPELINE:
        asked = ask_pipeline(pp=pp, microbatches=microbatches)
        return _show(PIPELINE, asked, (pipeline_json, pipeline_text), json)
    if rule == ZERO:
        question = ask(
            degree=degree, parameters=parameters, memory_bytes=memory_bytes, precision=precision
        )
        return _show(ZERO, question, (zero_json, zero_text), json)
    _explain_rule(rule, as_json=json)
    return 0


def _show(
    page: str,
    question: Asked,
    forms: tuple[Callable[[Asked], Mapping[str, object]], Callable[[Asked], str]],
    as_json: bool,
) -> int:
    """Print a page that is no rule, in one of its two forms."""
    to_json_values, to_text = forms
    if as_json:
        print_json("explain", {page: to_json_values(question)})
    else:
        print(to_text(question), end="")
    return 0


def _explain_rule(rule: str | None, *, as_json: bool) -> None:
    by_area = areas()
    if rule is None:
        _list(by_area, as_json=as_json)
        return
    known = {entry.id: entry for rules in by_area.values() for entry in rules}
    if rule not in known:
        near = did_you_mean(rule, [*known, *PAGES])
        raise ConfigError(UNKNOWN_RULE.problem(f"there is no rule {rule!r}", works=near))
    if as_json:
        print_json("explain", {"rule": to_json(known[rule]), "page": known[rule].page()})
    else:
        print(known[rule].page(), end="")


def _refuse_without_effect(flags: Mapping[str, object], pages: tuple[str, ...]) -> None:
    given = [flag for flag, value in flags.items() if value is not None]
    if given:
        named = " and ".join(f"`echelon explain {page}`" for page in pages)
        raise ConfigError(
            BAD_ARGUMENT.problem(
                f"{' '.join(given)} has an effect on {named} only",
                set_by="the command line",
                works=tuple(f"echelon explain {page} {PAGES[page]}" for page in pages),
            )
        )


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
