"""Differentiable collectives: values, gradients of each pair, and what is refused."""

from __future__ import annotations

import pytest
import torch

import echelon as ec
from echelon.core.errors import ConfigError
from echelon.launch.local.supervisor import RankPool
from tests.api import collectives_targets as targets
from tests.api.collectives_targets import splits, values

Ranks = list[dict[str, tuple[torch.Tensor, bool, bool]]]


SIZES = [2, *(pytest.param(size, marks=pytest.mark.slow) for size in (3, 4))]


@pytest.fixture(scope="module", params=SIZES)
def ranks(request: pytest.FixtureRequest, rank_pool: RankPool) -> Ranks:
    """Check every collective on two, three and four ranks."""
    return rank_pool.run(targets.check_each, None, world_size=request.param)


def test_values(ranks: Ranks) -> None:
    size = len(ranks)
    x, total = values(size), values(size).sum(0)
    for place, found in enumerate(ranks):
        got = {name: one[0] for name, one in found.items()}
        sums = ("all_reduce", "ring", "tree", "halving-doubling", "hierarchical")
        assert all(torch.allclose(got[name], total) for name in sums if name in got)
        gathered = [name for name in got if name.startswith("all_gather")]
        assert len(gathered) == (4 if size == 4 else 2)
        assert all(torch.equal(got[name], x.flatten(0, 1)) for name in gathered)
        own, scattered = total[2 * place : 2 * place + 2], [n for n in got if "scatter" in n]
        assert len(scattered) == len(gathered)
        assert all(torch.allclose(got[name], own) for name in scattered)
        assert torch.equal(
            got["all_to_all"], torch.cat([one[2 * place : 2 * place + 2] for one in x])
        )
        starts = [sum(splits(size, other)[:place]) for other in range(size)]
        stops = [sum(splits(size, other)[: place + 1]) for other in range(size)]
        parts = [one[i:j] for one, i, j in zip(x, starts, stops, strict=True)]
        assert torch.equal(got["all_to_all uneven"], torch.cat(parts))
        assert torch.equal(got["broadcast"], x[1])
        at_root = total if place == size - 1 else torch.zeros_like(total)
        assert torch.allclose(got["reduce"], at_root)


@pytest.mark.system("S10")
def test_gradients_of_every_pair_of_transposes(ranks: Ranks) -> None:
    """S10: gradcheck in float64 over 2, 3 and 4 ranks, all-to-all with uneven splits included."""
    for found in ranks:
        assert {name: one[1] for name, one in found.items()} == dict.fromkeys(found, True)


@pytest.mark.system("S10")
def test_backward_is_differentiable(ranks: Ranks) -> None:
    for found in ranks:
        assert {name: one[2] for name, one in found.items()} == dict.fromkeys(found, True)


def test_wrong_arguments_are_refused_with_their_arithmetic(rank_pool: RankPool) -> None:
    for said in rank_pool.run(targets.refused, None, world_size=2):
        assert said["rows"] == said["parts"] == "2 ranks do not divide 3 rows (3 % 2 = 1)"
        assert said["rule"] == "collective-argument"
        assert "its shape is []" in said["scalar"]
        assert "given both, or neither" in said["one"]
        assert said["counts"] == "send_rows = [3] is not a count for each of 2 ranks"
        assert said["sum"] == "send_rows add up to 2, and x has 3 rows"
        assert "sends itself 2 rows, and receives 3" in said["own"]
        assert said["source"] == "source = 2 is no place in a group of 2 ranks"
        assert said["root"] == "root = -1 is no place in a group of 2 ranks"
        assert "'star' is none of backend, ring, tree" in said["algorithm"]
        assert "over 2 ranks, but each of k > 1 nodes" in said["nodes"]
        assert said["unnamed"] == 'ranks_per_node is for algorithm="hierarchical", which needs it'
        assert said["tree"].endswith("sums whole tensors, and scatters and gathers nothing")
        assert said["useless slices"] == said["useless"]
        assert said["useless"] == 'ranks_per_node changes nothing with algorithm="backend"'


def test_a_process_that_has_joined_no_others_is_told_how() -> None:
    with pytest.raises(ConfigError) as refused:
        ec.collectives.all_reduce(torch.ones(2))
    (problem,) = refused.value.problems
    assert problem.suggestions == ('torch.distributed.init_process_group("gloo")',)
