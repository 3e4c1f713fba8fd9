"""A decision tree as data: nodes with a question and two branches; walking one gives a strategy.

A branch changes the strategy and leads on, so a tree whose leaves each name a strategy and a list
of steps that each add an axis are the same type. Nodes may be reached from several others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from echelon.planner.guides.questions import Answer, Question
from echelon.planner.guides.situation import Situation
from echelon.planner.guides.strategy import Degrees, Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """Say where an answer leads: the id of a node, or "" for the end.

    `becomes` is the strategy from here on; `adds` are axes that the one so far gets beside.
    """

    to: str = ""
    becomes: Strategy | None = None
    adds: Mapping[str, Degrees] | None = None

    def after(self, strategy: Strategy) -> Strategy:
        """Return the strategy behind this branch."""
        strategy = self.becomes or strategy
        if not self.adds:
            return strategy
        name = " + ".join([strategy.name, *(axis.upper() for axis in self.adds)])
        return replace(strategy, name=name, **self.adds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """Hold a question, and the branches of its two answers."""

    id: str
    question: Question
    yes: Branch
    no: Branch


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """Hold a guide's way to a strategy: `start` is what it begins with, `nodes[0]` asked first.

    `source` names the guide, `ours` what it leaves open and we decided.
    """

    id: str
    source: str
    title: str
    ours: str
    start: Strategy
    nodes: tuple[Node, ...]

    def node(self, name: str) -> Node:
        """Return a node by its id."""
        return next(node for node in self.nodes if node.id == name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Hold one question that was asked, and its answer."""

    node: Node
    answer: Answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """Hold the way through a tree, and the strategy at its end."""

    tree: Tree
    steps: tuple[Step, ...]
    strategy: Strategy

    @property
    def id(self) -> str:
        """Return the path as the nodes and answers that it went through."""
        return " ".join(f"{s.node.id}={'yes' if s.answer.yes else 'no'}" for s in self.steps)


def walk(tree: Tree, situation: Situation) -> Path:
    """Return the path of a situation through a tree."""
    strategy, node, steps = tree.start, tree.nodes[0], list[Step]()
    while True:
        answer = node.question.ask(situation)
        steps.append(Step(node=node, answer=answer))
        branch = node.yes if answer.yes else node.no
        strategy = branch.after(strategy)
        if not branch.to:
            return Path(tree=tree, steps=tuple(steps), strategy=strategy)
        node = tree.node(branch.to)


def path_ids(tree: Tree) -> Iterator[str]:
    """Yield every way through a tree, as `Path.id` writes it."""

    def on(name: str, so_far: tuple[str, ...]) -> Iterator[str]:
        node = tree.node(name)
        for word, branch in (("yes", node.yes), ("no", node.no)):
            here = (*so_far, f"{name}={word}")
            if branch.to:
                yield from on(branch.to, here)
            else:
                yield " ".join(here)

    return on(tree.nodes[0].id, ())
