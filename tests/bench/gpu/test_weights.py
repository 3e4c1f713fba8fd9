"""Frameworks of the GPU bench start from the same values, and so have the same losses."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from bench.gpu.loads import LOADS, Case, Framework, Settings
from bench.gpu.subjects import (
    HUGGING_FACE_SOURCES,
    PLAIN_SOURCES,
    PlainLlama,
    build,
    set_first_values,
)
from echelon.core.parameters import parameters

STEPS = 12
LIMIT = 8 * 2.0**-9
"""Relative: eight roundings to bf16, which takes off 2**-9 at most; losses are means of many."""


def losses(framework: Framework) -> list[float]:
    """Return the losses of some steps on the CPU."""
    case = Case(framework=framework, kernels="plain")
    step, close = build(Settings(load="tiny", sequences=4, case=case, device="cpu", seed=5))
    try:
        return [float(step()) for _ in range(STEPS)]
    finally:
        close()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("framework", ["plain", "transformers"])
def test_losses_are_those_of_echelon(framework: Framework) -> None:
    if framework == "transformers" and importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    ours, theirs = losses("echelon"), losses(framework)
    assert ours[0] - ours[-1] > 0.1
    assert theirs == pytest.approx(ours, rel=LIMIT)


def test_every_parameter_has_one_source() -> None:
    shape = LOADS["tiny"].shape
    names = {spec.name for spec in parameters(shape)}
    for sources in (PLAIN_SOURCES, HUGGING_FACE_SOURCES):
        found = [
            part.format(layer)
            for parts in sources.values()
            for part in parts
            for layer in (range(shape.layers) if "{}" in part else (0,))
        ]
        assert sorted(found) == sorted(names)


def test_a_parameter_without_a_source_is_an_error() -> None:
    model = PlainLlama(LOADS["tiny"].shape, 64)
    model.extra = torch.nn.Parameter(torch.zeros(2))
    with pytest.raises(ValueError, match="no first values for extra"):
        set_first_values(model, LOADS["tiny"].shape, 5, PLAIN_SOURCES)
