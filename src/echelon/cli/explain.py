"""`echelon explain`: why a rule exists, with an example that breaks it and one that works.

Two pages are no rules: `echelon explain zero` derives what ranks hold and send at each ZeRO stage,
`echelon explain pipeline` what they wait and hold under each schedule.
"""

from __future__ import annotations

from collections.abc import Mapping
from inspect import cleandoc
from typing import Annotated, Literal

from cyclopts import Parameter

from echelon.cli.explain_pipeline import ask_pipeline, pipeline_json, pipeline_text
from echelon.cli.explain_zero import ask, zero_json, zero_text
from echelon.cli.flags import Json
from echelon.cli.output import print_json
from echelon.core.errors import ConfigError
from echelon.core.rulebook import areas
from echelon.core.rulebook.command_line import BAD_ARGUMENT, UNKNOWN_RULE
from echelon.core.rules import Rule, did_you_mean
from echelon.core.serialize import to_json

LIST_WIDTH = 120
ZERO = "zero"
PIPELINE = "pipeline"
PAGES = (ZERO, PIPELINE)


def explain(
    rule: Annotated[
        str | None,
        Parameter(
            help="The id in the brackets of an error; or zero: what ZeRO holds and sends; or "
            "pipeline: what each schedule waits and holds."
        ),
    ] = None,
    /,
    *,
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
    if rule != ZERO:
        _refuse_without_effect(of_zero, "echelon explain zero", "--degree 4")
    if rule != PIPELINE:
        _refuse_without_effect(of_pipeline, "echelon explain pipeline", "--pp 4")
    if rule == PIPELINE:
        asked = ask_pipeline(pp=pp, microbatches=microbatches)
        if json:
            print_json("explain", {"pipeline": pipeline_json(asked)})
        else:
            print(pipeline_text(asked), end="")
        return 0
    if rule == ZERO:
        question = ask(
            degree=degree, parameters=parameters, memory_bytes=memory_bytes, precision=precision
        )
        if json:
            print_json("explain", {"zero": zero_json(question)})
        else:
            print(zero_text(question), end="")
        return 0
    by_area = areas()
    if rule is None:
        _list(by_area, as_json=json)
        return 0
    known = {entry.id: entry for rules in by_area.values() for entry in rules}
    if rule not in known:
        near = did_you_mean(rule, [*known, *PAGES])
        raise ConfigError(UNKNOWN_RULE.problem(f"there is no rule {rule!r}", works=near))
    if json:
        print_json("explain", {"rule": to_json(known[rule]), "page": known[rule].page()})
    else:
        print(known[rule].page(), end="")
    return 0


def _refuse_without_effect(flags: Mapping[str, object], page: str, example: str) -> None:
    given = [flag for flag, value in flags.items() if value is not None]
    if given:
        raise ConfigError(
            BAD_ARGUMENT.problem(
                f"{' '.join(given)} has an effect on `{page}` only",
                set_by="the command line",
                works=(f"{page} {example}",),
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
