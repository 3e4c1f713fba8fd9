"""A tree as a figure: every way through it, and the path that was taken."""

from __future__ import annotations

import pytest

from echelon.handbook.guides.trees import TREES, DecisionTree
from echelon.page.lessons.guides.which_split import answers_text, tree_figure, tree_paths
from tests.handbook.guides.test_trees import PATHS, path_ids


@pytest.mark.parametrize("tree", TREES, ids=lambda one: one.id)
def test_paths_are_those_of_the_tree(tree: DecisionTree) -> None:
    found = {
        " ".join(f"{name}={'yes' if yes else 'no'}" for name, yes in path.answers): path
        for path in tree_paths(tree)
    }
    assert set(found) == set(path_ids(tree))
    for name, path in found.items():
        assert path.strategy.says() == PATHS[tree.id, name][1]


@pytest.mark.parametrize("tree", TREES, ids=lambda one: one.id)
def test_the_figure_marks_one_path_from_the_root_to_its_end(tree: DecisionTree) -> None:
    for path in tree_paths(tree):
        figure = tree_figure(tree, path.answers, ["because"] * len(path.answers))
        nodes = {node.id: node for node in figure.nodes}
        at, asked = figure.nodes[0], list[tuple[str, str]]()
        while at.branches:
            assert at.chosen
            assert at.why == "because"
            (on,) = (one for one in at.branches if nodes[one.node].chosen)
            asked.append((at.text, on.answer))
            at = nodes[on.node]
        assert at.chosen
        assert at.text == f"{path.strategy.name}: {path.strategy.says()}"
        assert len(asked) == len(path.answers)
        assert sum(node.chosen for node in figure.nodes) == len(path.answers) + 1
        leaves = [node for node in figure.nodes if not node.branches]
        assert len(leaves) == len(tree_paths(tree))


def test_a_path_that_has_not_ended_asks_its_next_question() -> None:
    tree = TREES[0]
    figure = tree_figure(tree, (("fits", False),), ended=False)
    assert [node.id for node in figure.nodes if node.chosen] == ["fits", "fits-no/fast"]


def test_answers_are_words() -> None:
    assert answers_text((("fits", False), ("fast", True))) == "no, yes"
