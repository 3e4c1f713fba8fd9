"""The tree of questions by its answers, and models through every tree."""

from __future__ import annotations

import pytest

from echelon.handbook.guides.trees import TREES, DecisionTree
from echelon.page.lessons.guides.which_split import (
    SITUATIONS,
    TREE,
    decision_tree,
    model_trees,
    tree_paths,
)
from echelon.page.lessons.lesson import TreeFigure
from tests.handbook.guides.situations import situation
from tests.page.lessons.reading import facts, figure


@pytest.mark.system("S58")
def test_every_leaf_can_be_reached_by_its_answers() -> None:
    lesson = decision_tree()
    paths = tree_paths(TREE)
    ends = set[str]()
    for path, scene in zip(paths, lesson.scenes, strict=True):
        # A question a step, then the answer.
        assert len(scene.frames) == len(path.answers) + 1
        for asked, frame in enumerate(scene.frames):
            marked = [node for node in figure(frame, TreeFigure).nodes if node.chosen]
            assert len(marked) == asked + 1
        ends.add(facts(scene.frames[-1])["to try first"])
    assert ends == {
        "data parallel",
        "tensor parallel in a node",
        "pipeline over nodes, tensor inside",
        "ZeRO 3 / FSDP",
    }


@pytest.mark.parametrize("name", SITUATIONS)
@pytest.mark.parametrize("tree", TREES, ids=lambda one: one.id)
def test_a_model_goes_the_way_that_the_engine_says(name: str, tree: DecisionTree) -> None:
    model, cluster = SITUATIONS[name]
    steps, strategy = tree.walk(situation(f"{model} {cluster}"))
    (frame,) = model_trees().scene(model=name, tree=tree.title).frames
    assert facts(frame)["to try first"] == strategy.name
    nodes = figure(frame, TreeFigure).nodes
    marked = [node.text for node in nodes if node.chosen and node.branches]
    assert marked == [node.question.text for node, _ in steps]
    assert all(node.why for node in nodes if node.chosen and node.branches)
