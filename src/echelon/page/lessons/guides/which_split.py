# SPDX-License-Identifier: Apache-2.0
"""Which split first: the tree of questions by its answers, and models that go through all trees."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from echelon.config.load import load_job
from echelon.handbook.guides.situation import PlanSituation
from echelon.handbook.guides.strategy import Strategy
from echelon.handbook.guides.trees import TREES, DecisionTree
from echelon.page.lessons.corrections import corrections
from echelon.page.lessons.lesson import (
    Frame,
    Lesson,
    LessonControl,
    QuestionBranch,
    QuestionNode,
    Scene,
    TreeFigure,
    choices,
)
from echelon.planner.view.document import DataTable, Fact

TREE = TREES[0]
"""The tree that asks first whether a model fits one device."""
SITUATIONS = {
    "llama2-7b on 16 x H100": ("llama2-7b", "16xh100"),
    "gpt3-175b on 16 x H100": ("gpt3-175b", "16xh100"),
}

Answers = tuple[tuple[str, bool], ...]
"""Questions by their ids, with their answers, in the order in which they are asked."""


def decision_tree() -> Lesson:
    """Return the lesson: a tree, and one path through it question by question."""
    paths = tree_paths(TREE)
    control = LessonControl(
        name="path",
        label="answers in turn",
        values=tuple(answers_text(one.answers) for one in paths),
    )
    return Lesson(
        id="decision-tree",
        topic="Guides",
        title="Which split first: a tree of questions",
        rows=("M10",),
        summary=(
            "Questions lead to a split that is worth trying first. Answer them one by one, or see "
            "in the next figure how models answer."
        ),
        source=f"a tree of echelon explain choose; {TREE.ours}",
        controls=(control,),
        scenes=tuple(_path_scene(one) for one in paths),
        corrections=corrections("llm-training-71", "between-02"),
        commands=("echelon explain choose llama3-8b --cluster 8xh100",),
    )


def model_trees() -> Lesson:
    """Return the lesson: some models on a cluster, through each of the trees."""
    controls = (
        LessonControl(name="model", label="model", values=tuple(SITUATIONS)),
        LessonControl(name="tree", label="tree", values=tuple(one.title for one in TREES)),
    )
    by_title = {one.title: one for one in TREES}
    situations = {name: _situation(*words) for name, words in SITUATIONS.items()}
    return Lesson(
        id="models-through-trees",
        topic="Guides",
        title="Models that go through four trees",
        rows=(),
        summary=(
            "Three published guides ask other questions, and so give other answers. The fourth "
            "tree takes the cheapest communication that fits."
        ),
        source="the trees of echelon explain choose, asked of plans of these models",
        controls=controls,
        scenes=tuple(
            _model_scene(situations[one["model"]], by_title[one["tree"]])
            for one in choices(controls)
        ),
        commands=tuple(
            f"echelon explain choose {model} --cluster {cluster}"
            for model, cluster in SITUATIONS.values()
        ),
    )


def _path_scene(path: TreePath) -> Scene:
    asked = path.answers
    questions = {node.id: node.question.text for node in TREE.nodes}
    frames = [
        Frame(
            caption=f"Question {step + 1}: {questions[asked[step][0]]}",
            figures=(tree_figure(TREE, asked[:step], ended=False),),
        )
        for step in range(len(asked))
    ]
    strategy = path.strategy
    frames.append(
        Frame(
            caption=f"The answers {answers_text(asked)} lead to: {strategy.name}.",
            figures=(tree_figure(TREE, asked),),
            facts=(
                Fact("to try first", strategy.name, strategy.says()),
                Fact("questions asked", str(len(asked))),
            ),
        )
    )
    rows = tuple((questions[name], "yes" if yes else "no") for name, yes in asked)
    return Scene(frames=tuple(frames), table=DataTable.of(("question", "answer"), rows))


def _situation(model: str, cluster: str) -> PlanSituation:
    return PlanSituation.of(
        load_job(model, (f"cluster.preset={cluster}", "precision.parameters=bf16")).plan
    )


def _model_scene(situation: PlanSituation, tree: DecisionTree) -> Scene:
    steps, strategy = tree.walk(situation)
    taken = tuple((node.id, answer.yes) for node, answer in steps)
    frame = Frame(
        caption=f"{situation.model.name} through this tree: {strategy.name}.",
        figures=(tree_figure(tree, taken, [answer.why for _, answer in steps]),),
        facts=(
            Fact("to try first", strategy.name, strategy.says()),
            Fact("asked by", tree.source, tree.ours),
        ),
    )
    rows = tuple(
        (node.question.text, "yes" if answer.yes else "no", answer.why) for node, answer in steps
    )
    head = ("question", "answer", "why")
    return Scene(frames=(frame,), table=DataTable.of(head, rows))


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
