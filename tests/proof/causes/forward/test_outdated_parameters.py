"""A forward pass on the values of before the last update: of a unit, of a slice, of nothing yet."""

from __future__ import annotations

import torch

from echelon.proof.causes.forward.losses import outdated_parameter_variants, with_old_values
from echelon.proof.shrink import shrink
from tests.proof.evidence import replicas
from tests.proof.layouts import layout


def test_old_values_are_those_of_names_and_places() -> None:
    new, old = ({"a": torch.full((2,), one), "b": torch.full((2,), one)} for one in (1.0, 0.0))
    assert {n: v.tolist() for n, v in with_old_values(new, old, ["a"]).items()} == {
        "a": [0.0, 0.0],
        "b": [1.0, 1.0],
    }
    where = {"a": torch.tensor([True, False])}
    assert with_old_values(new, old, ["a"], where)["a"].tolist() == [0.0, 1.0]


def test_each_unit_is_tried_and_the_whole_model() -> None:
    evidence = replicas(shrink(layout(dp=2, accumulation=1), precision="fp64"), 2)
    first, second = evidence.oracle
    assert list(outdated_parameter_variants(evidence, first)) == []
    found = list(outdated_parameter_variants(evidence, second))
    assert {variant.finding.factor for variant in found} == {"stale"}
    assert len({variant.finding.description for variant in found}) == len(found)
    stale: dict[str, int] = {}
    for variant in found:
        for name, parameter in variant.build(evidence.plan, second).named_parameters():
            if torch.equal(parameter, first.before[name]):
                stale[name] = stale.get(name, 0) + 1
            else:
                assert torch.equal(parameter, second.before[name])
    # Every parameter is old once with its unit, and once with the whole model.
    changed = [n for n in first.before if not torch.equal(first.before[n], second.before[n])]
    assert changed
    assert {stale[name] for name in changed} == {2}
    assert sum("the whole model" in variant.finding.description for variant in found) == 1
