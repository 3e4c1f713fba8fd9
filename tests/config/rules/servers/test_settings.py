"""What parameter servers need of the mesh, of the optimizer and of the model."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.config.files.show import resolved_toml
from echelon.config.load import load_job
from echelon.core.errors import ConfigError
from tests.config.problems import SMALL, problems_of, write

TWO_WORKERS = ["mesh.dp_replicate=2", "batch.global_sequences=8", "servers.count=2"]


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write(tmp_path, SMALL)


def test_servers_are_ranks_beside_the_mesh(small: Path) -> None:
    """S06: world = W + S, and W comes from the mesh."""
    plan = load_job(small, TWO_WORKERS).plan

    assert (plan.mesh.num_workers, plan.mesh.servers, plan.mesh.world_size) == (2, 2, 4)
    assert [plan.mesh.label(rank) for rank in range(4)][2:] == ["server0", "server1"]
    assert plan.layout.collectives.algorithm == "backend"


@pytest.mark.parametrize("axis", ["tp", "pp", "cp"])
def test_workers_are_whole_replicas(small: Path, axis: str) -> None:
    """S06: what cuts the model of a worker is refused, with the mesh that works."""
    found = problems_of(small, [*TWO_WORKERS, f"mesh.{axis}=2"])

    problem = found["servers-split-samples"]
    assert f"mesh.{axis} = 2" in problem.message
    assert f"mesh.{axis} = 1" in problem.suggestions
    assert "servers.count = 0" in problem.suggestions


def test_servers_share_out_what_zero_would(small: Path) -> None:
    """S06: ZeRO is refused beside servers."""
    sets = [*TWO_WORKERS[1:], "mesh.dp_shard=2", "zero.stage=1"]
    found = problems_of(small, sets)

    problem = found["servers-split-samples"]
    assert "mesh.dp_shard = 2 and zero.stage = 1" in problem.message
    assert "mesh.dp_shard = 1 with mesh.dp_replicate = 2 with zero.stage = 0" in problem.suggestions


def test_servers_update_element_by_element(small: Path) -> None:
    """S06: Muon needs whole matrices."""
    found = problems_of(small, [*TWO_WORKERS, "optimizer.kind=muon"])

    problem = found["servers-update-elements"]
    assert problem.suggestions[:2] == ('optimizer.kind = "adamw"', 'optimizer.kind = "sgd"')


def test_algorithms_of_sums_have_no_effect(small: Path) -> None:
    """S06: servers sum gradients, so no algorithm of an all-reduce does."""
    assert list(problems_of(small, [*TWO_WORKERS, "collectives.algorithm=ring"])) == ["no-effect"]


def test_as_many_ranks_are_started_as_workers_and_servers(small: Path) -> None:
    """S06: a launcher starts W + S ranks."""
    with pytest.raises(ConfigError) as refused:
        load_job(small, TWO_WORKERS, world_size=2)
    assert "+ 2 servers = 4" in str(refused.value)


def test_asynchronous_servers_need_gloo(small: Path) -> None:
    """S07: messages of the host, whoever comes."""
    sets = [*TWO_WORKERS, "servers.updates=asynchronous", "cluster.preset=8xh100"]
    found = problems_of(small, sets)
    problem = found["asynchronous-servers-need-gloo"]
    assert 'servers.updates = "synchronous"' in problem.suggestions


def test_asynchronous_servers_follow_no_loss_scale(small: Path) -> None:
    """S07: nobody agrees on an overflow."""
    sets = [*TWO_WORKERS, "servers.updates=asynchronous", "precision.parameters=fp16"]
    sets += [f"precision.{name}=fp16" for name in ("gradients", "reduction")]
    found = problems_of(small, [*sets, "precision.loss_scaling=dynamic"])
    problem = found["asynchronous-servers-scale-no-loss"]
    assert problem.suggestions == ('servers.updates = "synchronous"',)


def test_servers_hold_dense_models(small: Path) -> None:
    """S06: routers have state that no server keeps."""
    sets = ["model.experts.num_experts=4", "model.experts.top_k=2", "model.experts.ffn=24"]
    found = problems_of(small, [*TWO_WORKERS, *sets])
    assert "servers.count = 0" in found["servers-hold-dense-models"].suggestions


@pytest.mark.parametrize(
    "sets",
    [
        ["servers.updates=asynchronous"],
        ["servers.damping=1"],
        [*TWO_WORKERS, "servers.damping=1"],
        [*TWO_WORKERS, "servers.max_staleness=5"],
        [
            *TWO_WORKERS,
            "servers.updates=asynchronous",
            "servers.max_staleness=0",
            "servers.damping=1",
        ],
    ],
)
def test_settings_of_updates_that_nobody_makes_have_no_effect(small: Path, sets: list[str]) -> None:
    """S07: a setting without effect is an error."""
    assert "no-effect" in problems_of(small, sets)


def test_a_run_file_gives_its_servers_again(small: Path, tmp_path: Path) -> None:
    """S07: every setting of servers is in the resolved run.toml."""
    sets = ["servers.updates=asynchronous", "servers.max_staleness=3", "servers.damping=0.5"]
    job = load_job(small, [*TWO_WORKERS, *sets])
    again = load_job(write(tmp_path, resolved_toml(job)))
    assert again.content_hash() == job.content_hash()
    assert again.plan.mathematics.updates.damping == 0.5
