# SPDX-License-Identifier: Apache-2.0
"""A decision tree as a figure: every way through it, and the path that was taken."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from echelon.handbook.guides.strategy import Strategy
from echelon.handbook.guides.trees import DecisionTree
from echelon.page.lessons.diagram import QuestionBranch, QuestionNode, TreeFigure

Answers = tuple[tuple[str, bool], ...]
"""Questions by their ids, with their answers, in the order in which they are asked."""


@dataclass(frozen=True, slots=True)
class TreePath:
    """Hold one way through a tree, and the strategy at its end."""

    answers: Answers
    strategy: Strategy


def tree_paths(tree: DecisionTree) -> tuple[TreePath, ...]:
    """Return every way through a tree, the yes of each question first."""
    nodes = {node.id: node for node in tree.nodes}

    def on(name: str, before: Answers, strategy: Strategy) -> Iterator[TreePath]:
        node = nodes[name]
        for yes, branch in ((True, node.yes), (False, node.no)):
            here, after = (*before, (name, yes)), branch.after(strategy)
            if branch.to:
                yield from on(branch.to, here, after)
            else:
                yield TreePath(here, after)

    return tuple(on(tree.nodes[0].id, (), tree.start))


def tree_figure(
    tree: DecisionTree, taken: Answers, whys: Sequence[str] = (), *, ended: bool = True
) -> TreeFigure:
    """Return all of a tree, with the questions of a path marked, and its end where it `ended`.

    `whys` are what the answers rest on. A question that several others lead to stands behind each.
    """
    nodes = {node.id: node for node in tree.nodes}
    paths = tree_paths(tree)
    ends: Mapping[Answers, Strategy] = {path.answers: path.strategy for path in paths}
    found: list[QuestionNode] = []

    def draw(before: Answers, name: str) -> None:
        node, depth = nodes[name], len(before)
        branches: list[tuple[str, Answers, str]] = []
        for yes, branch in ((True, node.yes), (False, node.no)):
            after = (*before, (name, yes))
            branches.append(("yes" if yes else "no", after, branch.to))
        asked = before == taken[:depth] and (depth < len(taken) or not ended)
        found.append(
            QuestionNode(
                id=_id(before, name),
                text=node.question.text,
                branches=tuple(
                    QuestionBranch(answer=word, node=_id(after, to)) for word, after, to in branches
                ),
                chosen=asked,
                why=whys[depth] if asked and depth < len(whys) else "",
            )
        )
        for _, after, to in branches:
            if to:
                draw(after, to)
            else:
                strategy = ends[after]
                found.append(
                    QuestionNode(
                        id=_id(after, ""),
                        text=f"{strategy.name}: {strategy.says()}",
                        chosen=ended and after == taken,
                    )
                )

    draw((), tree.nodes[0].id)
    return TreeFigure(nodes=tuple(found))


def answers_text(answers: Answers) -> str:
    """Return answers in the order of their questions: ``no, yes``."""
    return ", ".join("yes" if yes else "no" for _, yes in answers)


def _id(before: Answers, name: str) -> str:
    return "/".join([*(f"{one}-{'yes' if yes else 'no'}" for one, yes in before), name])
