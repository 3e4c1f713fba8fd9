"""A factory becomes a subject: what it must return, and the optimizer beside which it is proven."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from echelon.api.module_subject import ModuleSubject, in_precision, open_module, plain_optimizer
from echelon.config.load import load_job
from echelon.core.errors import ConfigError
from echelon.core.plan import Optimizer
from tests.api.module_subject.files import OWN, written
from tests.parallel.layouts import plan_of

MESH: dict[str, Any] = {"tp": 2, "dp_shard": 2}


def subject(folder: Path, text: str) -> ModuleSubject:
    """Return the subject of a file."""
    return ModuleSubject(Path(written(folder, text)), plan_of(**MESH))


def test_one_device_takes_the_mean_of_all_data_ranks(tmp_path: Path) -> None:
    plan = plan_of(**MESH)
    argument = {"file": written(tmp_path, OWN), "plan": plan.to_json(), "num_steps": 2}
    opened = open_module(argument)
    settings = opened.settings(None)
    assert settings.degrees == {"dp_shard": 2, "tp": 2}
    assert (settings.num_steps, settings.precisions) == (2, ("float64",))
    made = opened.one_device(settings.case(0, "float64", torch.device("cpu")))
    namespace: dict[str, object] = {}
    exec(OWN, namespace)
    _, batch, loss, _ = namespace["make"]()  # type: ignore[operator]
    right = torch.stack([loss(made.model, batch(0, rank)) for rank in range(2)]).mean()
    assert made.loss(0).item() == right.item()


def test_a_quick_proof_is_in_float64_alone(tmp_path: Path) -> None:
    argument = {"file": written(tmp_path, OWN), "plan": load_job("nano", []).plan.to_json()}
    for quick, precisions in ((False, ("float64", "float32")), (True, ("float64",))):
        opened = open_module({**argument, "num_steps": 2, "quick": quick})
        assert opened.settings(None).precisions == precisions


@pytest.mark.parametrize(
    ("text", "rule", "told"),
    [
        ("def make():\n    return 3\n", "verify-returned", "make returned int"),
        ("def build():\n    return 3\n", "verify-file", "has no function make"),
        ("def make():\n    raise KeyError('x')\n", "verify-raised", "KeyError"),
    ],
)
def test_a_factory_that_is_none(tmp_path: Path, text: str, rule: str, told: str) -> None:
    def build() -> None:
        opened = subject(tmp_path, text)
        opened.one_device(opened.settings(None).case(0, "float32", torch.device("cpu")))

    with pytest.raises(ConfigError) as caught:
        build()
    assert caught.value.rules == (rule,)
    assert told in str(caught.value)


def test_the_plain_optimizer_clips_exactly_and_follows_the_schedule() -> None:
    settings = Optimizer(kind="sgd", momentum=0.0, learning_rate=0.1, warmup_steps=2, total_steps=8)
    model = nn.Linear(2, 1, bias=False)
    optimizer = plain_optimizer(replace(settings, clip_norm=0.5, weight_decay=0.0), model)
    before = model.weight.detach().clone()
    model.weight.grad = torch.tensor([[3.0, 4.0]])
    optimizer.step()
    moved = before - model.weight.detach()
    torch.testing.assert_close(moved, 0.05 * torch.tensor([[0.3, 0.4]]))
    with pytest.raises(ConfigError, match=r"optimizer\.kind"):
        plain_optimizer(Optimizer(kind="muon"), model)


def test_float64_is_float64_throughout() -> None:
    plan = plan_of()
    assert in_precision(plan, torch.float32) is plan
    wide = in_precision(plan, torch.float64).mathematics.precision
    assert {wide.parameters, wide.gradients, wide.reduction, wide.master} == {"fp64"}
