"""`ec.threaded`: the module as it is, with threads; and the snippets of its guide."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import nn

import echelon as ec

GUIDE = Path(__file__).parents[2] / "docs/guides/replicas/threads.md"


def test_a_module_stays_ones_own() -> None:
    net = nn.Linear(4, 2)
    model = ec.threaded(net, replicas=2)
    assert model.module is net
    assert list(model.parameters()) == list(net.parameters())
    assert model(torch.ones(3, 4)).shape == (3, 2)
    model.close()


def test_the_snippet_of_the_guide_runs() -> None:
    (snippet,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    told: dict[str, object] = {}
    exec(snippet, told)
    model, net = told["model"], told["net"]
    assert isinstance(model, torch.nn.Module)
    assert isinstance(net, torch.nn.Module)
    assert told["model"].sent["replicate"] == sum(one.nbytes for one in net.parameters())  # type: ignore[attr-defined]
    assert all(one.grad is not None for one in net.parameters())
