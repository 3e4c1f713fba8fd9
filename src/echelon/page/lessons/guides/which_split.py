# SPDX-License-Identifier: Apache-2.0
"""Which split first: the tree of questions by its answers, and models that go through all trees."""

from __future__ import annotations

from echelon.config.load import load_job
from echelon.handbook.guides.situation import PlanSituation
from echelon.handbook.guides.trees import TREES, DecisionTree
from echelon.page.document import Fact
from echelon.page.figures import DataTable
from echelon.page.lessons.corrections import corrections
from echelon.page.lessons.guides.expand import TreePath, answers_text, tree_figure, tree_paths
from echelon.page.lessons.lesson import Frame, Lesson, LessonControl, Scene, choices

TREE = TREES[0]
"""The tree that asks first whether a model fits one device."""
SITUATIONS = {
    "llama2-7b on 16 x H100": ("llama2-7b", "16xh100"),
    "gpt3-175b on 16 x H100": ("gpt3-175b", "16xh100"),
}


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
                Fact(name="to try first", value=strategy.name, note=strategy.says()),
                Fact(name="questions asked", value=str(len(asked))),
            ),
        )
    )
    rows = tuple((questions[name], "yes" if yes else "no") for name, yes in asked)
    return Scene(frames=tuple(frames), table=DataTable(head=("question", "answer"), rows=rows))


def _situation(model: str, cluster: str) -> PlanSituation:
    return PlanSituation(
        load_job(model, (f"cluster.preset={cluster}", "precision.parameters=bf16")).plan
    )


def _model_scene(situation: PlanSituation, tree: DecisionTree) -> Scene:
    steps, strategy = tree.walk(situation)
    taken = tuple((node.id, answer.yes) for node, answer in steps)
    frame = Frame(
        caption=f"{situation.model.name} through this tree: {strategy.name}.",
        figures=(tree_figure(tree, taken, [answer.why for _, answer in steps]),),
        facts=(
            Fact(name="to try first", value=strategy.name, note=strategy.says()),
            Fact(name="asked by", value=tree.source, note=tree.ours),
        ),
    )
    rows = tuple(
        (node.question.text, "yes" if answer.yes else "no", answer.why) for node, answer in steps
    )
    head = ("question", "answer", "why")
    return Scene(frames=(frame,), table=DataTable(head=head, rows=rows))
