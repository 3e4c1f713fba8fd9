"""Every way through every tree is taken by some model on some cluster, and leads where it says."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from echelon.handbook.guides.strategy import strategy_outcome
from echelon.handbook.guides.trees import TREES, DecisionTree
from tests.handbook.guides.situations import situation

LONG = "batch.sequence_length=131072 model.max_positions=131072"
LONGER = "batch.sequence_length=262144 model.max_positions=262144"
FULL = "recompute.policy=full"

PATHS = {
    ("distributed", "fits=yes"): ("nano 4xcpu", "no ZeRO"),
    ("distributed", "fits=no fast=yes node=yes"): ("llama2-7b 16xh100", "no ZeRO, tp 2 or more"),
    ("distributed", "fits=no fast=yes node=no nodes=yes"): (
        "gpt3-175b 16xh100",
        "no ZeRO, tp 1 or more, pp 2 or more",
    ),
    ("distributed", "fits=no fast=yes node=no nodes=no"): ("gpt3-175b 8xa100-80gb", "ZeRO 3"),
    ("distributed", "fits=no fast=no"): ("gpt2 4xcpu", "ZeRO 3"),
    ("llm-training", "block=yes sequence=yes experts=yes"): (
        "mixtral-8x7b 16xh100",
        "ZeRO 3, ep 2 or more",
    ),
    ("llm-training", "block=yes sequence=yes experts=no"): ("nano 4xcpu", "ZeRO 3"),
    ("llm-training", "block=yes sequence=no experts=yes"): (
        "mixtral-8x7b 1xa100-40gb",
        "ZeRO 3, cp 2 or more, ep 2 or more",
    ),
    ("llm-training", "block=yes sequence=no experts=no"): ("gpt2-xl 4xcpu", "ZeRO 3, cp 2 or more"),
    ("llm-training", "block=no node=yes experts=yes"): (
        f"mixtral-8x7b 64xh100 {FULL} {LONGER}",
        "ZeRO 3, tp 2 or more, ep 2 or more",
    ),
    ("llm-training", "block=no node=yes experts=no"): (
        f"gpt3-175b 1024xh100 {FULL} {LONG} model.layers=4",
        "ZeRO 3, tp 2 or more",
    ),
    ("llm-training", "block=no node=no sequence=yes experts=yes"): (
        f"mixtral-8x7b 8xa100-80gb {FULL} {LONGER}",
        "ZeRO 3, tp 2 or more, pp 2 or more, ep 2 or more",
    ),
    ("llm-training", "block=no node=no sequence=yes experts=no"): (
        f"llama2-7b 4xcpu {FULL}",
        "ZeRO 3, tp 2 or more, pp 2 or more",
    ),
    ("llm-training", "block=no node=no sequence=no experts=yes"): (
        "mixtral-8x7b 4xcpu",
        "ZeRO 3, tp 2 or more, pp 2 or more, cp 2 or more, ep 2 or more",
    ),
    ("llm-training", "block=no node=no sequence=no experts=no"): (
        "llama2-7b 4xcpu",
        "ZeRO 3, tp 2 or more, pp 2 or more, cp 2 or more",
    ),
    ("scaling", "fits=yes"): ("nano 4xcpu", "no ZeRO"),
    ("scaling", "fits=no block=yes shards=yes"): ("llama2-7b 8xh100", "ZeRO 3"),
    ("scaling", "fits=no block=yes shards=no deep=yes tiers-deep=yes"): (
        "gpt3-175b 16xh100",
        "no ZeRO, tp 2 or more, pp 1 or more",
    ),
    ("scaling", "fits=no block=yes shards=no deep=yes tiers-deep=no"): (
        "gpt2-xl 4xcpu",
        "no ZeRO, pp 2 or more",
    ),
    ("scaling", "fits=no block=yes shards=no deep=no"): (
        "gpt3-175b 1024xh100",
        "ZeRO 3, tp 1 or more, pp 1 or more",
    ),
    ("scaling", "fits=no block=no tiers-block=yes"): (
        f"gpt3-175b 16xh100 {LONG}",
        "no ZeRO, tp 2 or more, pp 1 or more",
    ),
    ("scaling", "fits=no block=no tiers-block=no"): ("llama2-7b 4xcpu", "no ZeRO, tp 2 or more"),
    ("cheapest", "ddp=yes"): ("nano 4xcpu", "no ZeRO"),
    ("cheapest", "ddp=no zero-1=yes"): ("llama2-7b 8xh100", "ZeRO 1"),
    ("cheapest", "ddp=no zero-1=no zero-2=yes"): ("llama2-13b 16xh100", "ZeRO 2"),
    ("cheapest", "ddp=no zero-1=no zero-2=no zero-3=yes"): ("llama2-13b 8xa100-80gb", "ZeRO 3"),
    ("cheapest", "ddp=no zero-1=no zero-2=no zero-3=no recompute=yes"): (
        "gpt3-175b 128xh100",
        "ZeRO 3, full recompute",
    ),
    ("cheapest", "ddp=no zero-1=no zero-2=no zero-3=no recompute=no fast=yes"): (
        "gpt3-175b 16xh100",
        "ZeRO 1, tp 2 or more, pp 1 or more, ep 1 or more",
    ),
    ("cheapest", "ddp=no zero-1=no zero-2=no zero-3=no recompute=no fast=no"): (
        "gpt2-xl 4xcpu",
        "ZeRO 3, tp 1 or more, pp 1 or more",
    ),
}
BY_ID = {tree.id: tree for tree in TREES}


def path_ids(tree: DecisionTree) -> Iterator[str]:
    """Yield every way through a tree, as the nodes and answers that it goes through."""
    nodes = {node.id: node for node in tree.nodes}

    def on(name: str, so_far: tuple[str, ...]) -> Iterator[str]:
        for word, branch in (("yes", nodes[name].yes), ("no", nodes[name].no)):
            here = (*so_far, f"{name}={word}")
            if branch.to:
                yield from on(branch.to, here)
            else:
                yield " ".join(here)

    return on(tree.nodes[0].id, ())


@pytest.mark.system("S47")
@pytest.mark.parametrize(("tree", "path"), PATHS, ids=lambda words: words.replace(" ", ","))
def test_a_path_is_taken_and_leads_to_its_strategy(tree: str, path: str) -> None:
    words, says = PATHS[tree, path]
    steps, strategy = BY_ID[tree].walk(situation(words))
    assert " ".join(f"{node.id}={'yes' if one.yes else 'no'}" for node, one in steps) == path
    assert strategy.says() == says
    assert all(answer.why for _, answer in steps)


@pytest.mark.system("S47")
def test_every_way_through_every_tree_is_tested() -> None:
    assert set(PATHS) == {(tree.id, path) for tree in TREES for path in path_ids(tree)}


def test_data_parallelism_is_chosen_where_it_fits_and_the_planner_never_sends_more() -> None:
    here = situation("gpt2 8xh100")
    strategies = {tree.id: tree.walk(here)[1] for tree in TREES}
    assert strategies["distributed"] == strategies["scaling"] == strategies["cheapest"]
    assert strategies["cheapest"].zero == (0,)
    assert strategies["llm-training"].zero == (3,)
    assert strategies["llm-training"].conflicts_with(strategies["cheapest"]) == (
        "ZeRO 3 against 0",
    )


def test_what_a_leaf_says_of_one_device_is_what_its_strategy_holds() -> None:
    here = situation("gpt2 8xh100")
    found = strategy_outcome(BY_ID["cheapest"].walk(here)[1], here)
    assert found is not None
    assert found.fits
    assert (found.split.dp, found.split.tp, found.split.pp) == (8, 1, 1)
