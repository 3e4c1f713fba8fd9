"""A strategy by its name: its settings, its scope, and the same losses whichever it is."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import echelon as ec
from echelon.core.choices.strategies import STRATEGIES
from echelon.core.errors import ConfigError
from echelon.launch.context import RankContext
from echelon.launch.local.supervisor import RankPool
from echelon.proof.run import prove

SCRIPT = Path(__file__).parents[2] / "examples" / "strategies.py"
FIVE = ("mirrored", "zero1", "zero3", "tensor", "pipeline")
LENGTHS = ("batch.sequence_length=32", "batch.global_sequences=8")


def losses_of(name: str, folder: Path) -> tuple[str, list[float]]:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), name],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, [float(one) for one in re.findall(r"loss (\S+)", done.stdout)]


@pytest.mark.slow
def test_one_script_five_strategies_one_line_the_same_losses(tmp_path: Path) -> None:
    """S54: the name is all that changes, and every loss is the same but for rounding.

    Losses are printed with four digits, so two that differ by rounding differ by 1e-4 at most.
    """
    lines = SCRIPT.read_text(encoding="utf-8").splitlines()
    assert sum("ec.strategy(" in line for line in lines) == 1
    curves = {name: losses_of(name, tmp_path) for name in FIVE}
    _, right = curves["mirrored"]
    assert len(right) == 20
    assert right[-1] < right[0] - 1
    for name, (said, losses) in curves.items():
        assert losses == pytest.approx(right, abs=1.5e-4), name
        in_sync = 1 if name in ("tensor", "pipeline") else 2
        assert said.startswith(f"{name}: {in_sync} replicas in sync\n")


@pytest.mark.system("S53")
@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", [*FIVE, "zero2", "sp", "cp", "ulysses"])
def test_a_model_of_a_scope_equals_one_process(name: str, rank_pool: RankPool) -> None:
    """S53: each strategy of the scope is proven in float64 beside one process."""
    with ec.strategy(name, ranks=2).scope() as scope:
        model = scope.model("nano", settings=LENGTHS)
    proof = prove(model.plan, run_ranks=rank_pool.run, own_precision=False)
    assert proof.proven, proof.diagnosis


def test_every_strategy_of_the_registry_has_a_scope() -> None:
    """S53: what `echelon compare --strategies` knows, a scope does, with its very settings."""
    for name, record in STRATEGIES.items():
        found = ec.strategy(name, ranks=2)
        assert (found.record, found.settings) == (record, record.settings(2))
        assert found.num_replicas_in_sync == record.replicas(2)


def test_replicas_in_sync_are_those_that_see_other_samples() -> None:
    """S53: of tensor and pipeline ranks there is one replica."""
    in_sync = {name: ec.strategy(name, ranks=4).num_replicas_in_sync for name in FIVE}
    assert in_sync == {"mirrored": 4, "zero1": 4, "zero3": 4, "tensor": 1, "pipeline": 1}
    assert ec.strategy("mirrored").num_replicas_in_sync == 1


@pytest.mark.system("S53")
def test_variables_are_mirrored_or_cut() -> None:
    """S53: mirrored variables have a whole copy on each replica."""
    weight = "layers.0.attention.q.weight"

    def variables(name: str) -> dict[str, Any]:
        with ec.strategy(name, ranks=2).scope() as scope:
            model = scope.model("nano", settings=LENGTHS)
        return {one.name: one for one in model.variables}

    assert all(one.mirrored and one.copies == 2 for one in variables("mirrored").values())
    cut = variables("zero3")[weight]
    assert (cut.mirrored, cut.copies, cut.pieces, cut.slices) == (False, 1, 1, 2)
    split = variables("tensor")
    assert (split[weight].copies, split[weight].pieces) == (1, 2)
    assert split["layers.0.attention_norm.weight"].mirrored
    # Of the tied embedding both ends of a pipeline have a copy.
    twice = {name for name, one in variables("pipeline").items() if one.mirrored}
    assert twice == {"embedding.weight"}


FP64 = [f"precision.{one}=fp64" for one in ("parameters", "gradients", "reduction", "master")]


def mirrored_module(context: RankContext, _: object) -> tuple[list[torch.Tensor], list[float]]:
    """Train a module of one's own in a scope; return its parameters, and norms of gradients."""
    torch.manual_seed(context.rank)  # the scope makes copies alike, whatever they begin with
    with ec.strategy("MirroredStrategy", ranks=2).scope() as scope:
        made = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).double()
        model, optimizer = scope.parallelize(made, settings=FP64)
    norms: list[float] = []
    for step in range(3):
        rows = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        mine = rows.chunk(2)[context.rank]
        optimizer.scale(nn.functional.mse_loss(model(mine), mine)).backward()
        norms.append(optimizer.step().grad_norm)
    optimizer.close()
    return [one.detach().clone() for one in model.parameters()], norms


def test_a_module_made_in_a_scope_is_mirrored(rank_pool: RankPool) -> None:
    """S53: copies of a module of one's own have the same bits after every step."""
    first, second = rank_pool.run(mirrored_module, None, 2)
    assert all(torch.equal(one, other) for one, other in zip(first[0], second[0], strict=True))
    assert first[1] == second[1]
    assert all(norm > 0 for norm in first[1])


def test_names_of_other_frameworks_are_ours() -> None:
    """S53: the table of names: each is one of ours, or refused with what to take instead."""
    for name, ours in {
        "MirroredStrategy": "dp",
        "mirrored": "dp",
        "multi-worker-mirrored": "dp",
        "DDP": "dp",
        "FSDP": "zero3",
    }.items():
        assert ec.strategy(name, ranks=2).record is STRATEGIES[ours], name


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("TPUStrategy", "CPUs and GPUs"),
        ("one-device", "no strategy"),
        ("central_storage", "ec.threaded(module)"),
        ("DataParallel", "ec.threaded(module)"),
        ("threads", "ec.threaded(module)"),
        ("magic", "there are dp"),
    ],
)
def test_what_is_no_strategy_is_refused_with_why(name: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ec.strategy(name, ranks=2)
    assert caught.value.rules == ("strategy-known",)
    assert said in caught.value.problems[0].message
    assert caught.value.problems[0].suggestions


def test_a_strategy_is_for_the_ranks_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError) as caught:
        ec.strategy("mirrored", ranks=0)
    assert caught.value.rules == ("strategy-ranks",)
    place = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "h"}
    for key, value in {**place, "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(key, value)
    assert ec.strategy("mirrored").ranks == 4
    with pytest.raises(ConfigError) as caught:
        ec.strategy("mirrored", ranks=2)
    assert "4 have been started" in caught.value.problems[0].message


def test_a_scope_refuses_settings_that_are_the_strategys() -> None:
    with ec.strategy("mirrored", ranks=2).scope() as scope:
        with pytest.raises(ConfigError) as caught:
            scope.model("nano", settings=["mesh.tp=2", "train.steps=30"])
        assert caught.value.rules == ("strategy-settings",)
        assert "mesh.tp=1" in caught.value.problems[0].message
        model = scope.model("nano")
    with pytest.raises(ConfigError):
        model.fit(settings=["zero.stage=1"])


def test_a_scope_takes_what_was_made_in_it() -> None:
    """S53: a module of elsewhere, and a scope that has been left, are refused."""
    outside = nn.Linear(2, 2)
    with ec.strategy("mirrored", ranks=2).scope() as scope:
        mixed = nn.Sequential(outside, nn.Linear(2, 2))
        with pytest.raises(ConfigError) as caught:
            scope.parallelize(mixed)
        assert caught.value.rules == ("strategy-scope",)
        # They were registered anew under this module, but made before.
        assert "0.weight" in caught.value.problems[0].message
    with pytest.raises(ConfigError) as caught:
        scope.model("nano")
    assert "has been left" in caught.value.problems[0].message


def test_rules_of_the_engine_are_those_of_a_scope() -> None:
    with (
        ec.strategy("tensor", ranks=3).scope() as scope,
        pytest.raises(ConfigError) as caught,
    ):
        scope.model("nano")
    assert "tp-divides-heads" in caught.value.rules
