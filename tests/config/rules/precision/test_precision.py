"""Precision: every combination of dtypes, when the loss is scaled, and advice that can be taken."""

from __future__ import annotations

from itertools import product

import pytest

from echelon.config.load import load_job
from echelon.config.rules.precision import ROLES, nearest_dtypes
from echelon.core.plan import Precision
from tests.config.problems import problems_of
from tests.config.suggestions import taken

BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
COMBINATIONS = list(product(BYTES, repeat=4))


def dtypes(parameters: str, gradients: str, reduction: str, master: str) -> list[str]:
    chosen = (parameters, gradients, reduction, master)
    return [f"precision.{role}={dtype}" for role, dtype in zip(ROLES, chosen, strict=True)]


def fit(parameters: str, gradients: str, reduction: str, master: str) -> bool:
    """Say independently whether dtypes go together."""
    used = {parameters, gradients, reduction, master}
    formats = used & {"bf16", "fp16"}
    return (
        len(formats) < 2
        and not (formats and "fp64" in used)
        and BYTES[gradients] >= BYTES[parameters]
        and BYTES[master] >= BYTES[parameters]
        and master != "fp16"
    )


@pytest.mark.slow
def test_what_goes_together_is_what_is_accepted_and_advice_is_too() -> None:
    accepted = 0
    for chosen in COMBINATIONS:
        sets = dtypes(*chosen)
        scaled = [*sets, "precision.loss_scaling=dynamic"]
        found = problems_of("nano", scaled if "fp16" in chosen[:3] else sets)
        found.pop("fp16-needs-loss-scaling", None)
        assert fit(*chosen) == (not found), (chosen, found)
        accepted += not found
        for problem in found.values():
            for advice in problem.suggestions:
                after = problems_of("nano", taken(advice, sets))
                assert set(after) <= {"fp16-needs-loss-scaling"}, (chosen, advice, after)
    # Without half precision, with bf16, with fp16.
    assert accepted == sum(fit(*chosen) for chosen in COMBINATIONS) == 10 + 9 + 5


@pytest.mark.parametrize(
    ("sets", "rules", "says"),
    [
        (["master=fp64", "parameters=bf16"], ["fp64-alone"], "master fp64"),
        (["parameters=bf16", "reduction=fp16"], ["one-half-format"], "reduction fp16"),
        (["parameters=fp16", "gradients=bf16"], ["one-half-format"], "gradients bf16"),
        (["gradients=bf16"], ["gradients-hold-parameters"], "(2 bytes) is narrower"),
        (["master=bf16"], ["master-holds-parameters"], "(2 bytes) is narrower"),
        (
            ["parameters=fp64"],
            ["gradients-hold-parameters", "master-holds-parameters"],
            "(4 bytes) is narrower",
        ),
        (
            ["parameters=fp16", "master=fp16", "loss_scaling=dynamic"],
            ["fp16-needs-master"],
            "6e-8",
        ),
        (["parameters=fp16"], ["fp16-needs-loss-scaling"], "are zero"),
        (["reduction=fp16"], ["fp16-needs-loss-scaling"], 'precision.reduction = "fp16"'),
        (["loss_scaling=dynamic"], ["no-effect"], "no gradient is fp16"),
        (["parameters=bf16", "loss_scaling=fixed"], ["no-effect"], "no gradient is fp16"),
        (["loss_scale=128"], ["no-effect"], 'loss_scaling = "none"'),
        (["loss_scale_window=10"], ["no-effect"], "only a dynamic scale changes"),
        (
            ["parameters=fp16", "loss_scaling=fixed", "loss_scale_hysteresis=2"],
            ["no-effect"],
            "only a dynamic scale changes",
        ),
        (
            ["parameters=fp16", "loss_scaling=fixed", "loss_scale_min=2"],
            ["no-effect"],
            "only a dynamic scale changes",
        ),
        (
            ["parameters=fp16", "loss_scaling=dynamic", "loss_scale=2", "loss_scale_min=4"],
            ["loss-scale-above-minimum"],
            "2 is below loss_scale_min = 4",
        ),
        (["parameters=fp16", "loss_scaling=fixed", "loss_scale=0"], ["out-of-range"], "above 0"),
        (["parameters=fp16", "loss_scaling=fixed", "loss_scale=1e12"], ["out-of-range"], "at most"),
        (["parameters=fp8"], ["unknown-choice"], "is not known"),
    ],
)
def test_what_cannot_be_is_refused(sets: list[str], rules: list[str], says: str) -> None:
    sets = [f"precision.{text}" for text in sets]
    found = problems_of("nano", sets)
    assert sorted(found) == rules
    assert says in found[rules[0]].message
    for rule in rules:
        assert found[rule].set_by.startswith("--set precision.")
        assert found[rule].key.startswith("precision.")
        for advice in (
            found[rule].suggestions if rule not in ("out-of-range", "unknown-choice") else ()
        ):
            after = problems_of("nano", taken(advice, sets))
            assert set(after) <= {"fp16-needs-loss-scaling"} - {rule}, advice


@pytest.mark.parametrize(
    ("sets", "precision"),
    [
        (["parameters=bf16"], Precision(parameters="bf16")),
        (
            ["parameters=bf16", "gradients=bf16", "reduction=bf16"],
            Precision(parameters="bf16", gradients="bf16", reduction="bf16"),
        ),
        (
            ["parameters=fp16", "loss_scaling=dynamic", "loss_scale_window=200"],
            Precision(parameters="fp16", loss_scaling="dynamic", loss_scale_window=200),
        ),
        (["reduction=bf16"], Precision(reduction="bf16")),
        (["master=fp64"], Precision(master="fp64")),
    ],
)
def test_mixed_precision_is_a_few_words(sets: list[str], precision: Precision) -> None:
    job = load_job("nano", [f"precision.{text}" for text in sets])
    assert job.plan.mathematics.precision == precision
    assert precision.has_master == (precision.parameters != precision.master)


def test_the_least_change_comes_first() -> None:
    assert nearest_dtypes(("fp64", "fp32", "fp32", "fp32")) == (
        'precision.parameters = "fp32"',
        'precision.gradients = "fp64" with precision.master = "fp64"',
    )
    assert nearest_dtypes(("bf16", "fp32", "fp16", "fp32")) == ('precision.reduction = "fp32"',)
