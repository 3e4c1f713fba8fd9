"""What must hold before a module is split, on a rank and among ranks: one clear error each."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import echelon as ec
from echelon.api.parallelizing import parallelize
from echelon.core.plan import Optimizer, Plan, Precision, Recompute, Zero
from echelon.core.rulebook.module import MODULE_MESH
from echelon.launch.local.supervisor import RankPool
from echelon.parallel.module.start import check_plan
from tests.parallel.layouts import MIXTRAL, plan_of
from tests.parallel.module import mistakes
from tests.parallel.module.models import make
from tests.parallel.module.refusals import PLAIN, backward, parallel, refusal
from tests.parallel.module.tensor import families


@pytest.mark.parametrize(
    ("rule", "plan"),
    [
        ("module-tensor-rules", plan_of(tp=2)),
        ("module-loss", plan_of(pp=2)),
        ("module-settings", plan_of(recompute=Recompute(policy="full"))),
        ("module-settings", plan_of(optimizer=Optimizer(kind="muon"))),
        ("module-settings", plan_of(model=MIXTRAL)),
        ("module-settings", plan_of(precision=Precision(matmul="fp8", fp8_block=4))),
        ("module-settings", plan_of(dp_shard=2, zero=Zero(stage=3, secondary=True))),
        ("module-settings", plan_of(dp_shard=2, zero=Zero(stage=3, gather="int8"))),
        ("module-settings", plan_of(dp_shard=2, zero=Zero(stage=3, reduce="int4"))),
        ("module-mesh", plan_of(dp_shard=2, ep=2)),
        ("module-ranks", plan_of(dp=2)),
    ],
)
def test_a_plan_that_does_not_fit(rule: str, plan: Plan) -> None:
    assert refusal(lambda: parallelize(make("transformer"), plan)).rules == (rule,)


def test_what_the_rule_about_the_mesh_shows_is_so() -> None:
    given = {"ec": ec, "model": families.make("own_moe").float()}
    for text, rule in ((MODULE_MESH.bad, "module-mesh"), (MODULE_MESH.fixed, "module-ranks")):
        # One rank is not enough for what works: everything else is right.
        assert rule in refusal(lambda text=text: exec(text, dict(given))).rules


def test_two_axes_are_two_problems_with_their_values() -> None:
    error = refusal(lambda: check_plan(plan_of(cp=2, pp=2)))
    assert error.rules == ("module-mesh", "module-mesh")
    assert "mesh.pp = 2" in str(error)
    assert "mesh.cp = 2" in str(error)


def test_parameters_that_cannot_be_split() -> None:
    with torch.device("meta"):
        empty = nn.Linear(3, 3)
    complex_numbers = nn.Module()
    complex_numbers.weight = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    complex_numbers.bias = nn.Parameter(torch.zeros(3))
    split, _ = parallelize(nn.Linear(3, 3), PLAIN)
    for module, told in (
        (empty, "weight and 1 more are on the meta device"),
        (complex_numbers, "weight is"),
        (split, "split already"),
    ):
        error = refusal(lambda module=module: parallelize(module, PLAIN))
        assert error.rules == ("module-parameters",)
        assert told in str(error)


def test_what_is_frozen_is_known_at_the_start() -> None:
    model, optimizer = parallel(PLAIN)
    backward(model)
    model.get_parameter("positions").requires_grad_(True)
    assert refusal(optimizer.step).rules == ("frozen-changed",)
    group = {"params": [nn.Parameter(torch.zeros(2))]}
    assert refusal(lambda: optimizer.add_param_group(group)).rules == ("frozen-changed",)


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("shape", "parameter weight is not the same on ranks 0 and 1: (3, 3)"),
        ("frozen", "torch.float32 trained and (3, 3) torch.float32 frozen"),
        ("buffer", "buffer scale is not the same on ranks 0 and 1"),
        ("order", "the order of parameters"),
        ("plan", "the plan is not the same"),
    ],
)
def test_ranks_hold_the_same_module(rank_pool: RankPool, kind: str, told: str) -> None:
    for rules, text in rank_pool.run(mistakes.different_modules, kind, world_size=2):
        assert rules == ("module-same",)
        assert told in text
