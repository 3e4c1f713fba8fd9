"""What a lesson's page shows, read back from the page, and what Python says it must show."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

from echelon.page.lessons.lesson import (
    DiagramFigure,
    FoldsFigure,
    Lesson,
    LessonFigure,
    Scene,
    TreeFigure,
    choices,
)
from echelon.planner.view.document import (
    BarsFigure,
    DataTable,
    HeatFigure,
    ScheduleFigure,
)

READ = """() => {
  const texts = (root, query) => [...root.querySelectorAll(query)].map((one) => one.textContent);
  const main = document.querySelector("main.lesson");
  const tile = (one) => ({
    id: one.dataset.tile,
    text: one.textContent,
    kind: one.title,
    state: one.classList[1],
    box: ["gridRowStart", "gridRowEnd", "gridColumnStart", "gridColumnEnd"].map(
      (name) => one.style[name],
    ),
  });
  const read = {
    diagram: (one) => ({
      places: [...one.querySelectorAll(".place")].map((place) => ({
        label: place.querySelector(".place-label").textContent,
        note: place.querySelector(".place-note")?.textContent ?? "",
        tiles: [...place.querySelectorAll("[data-tile]")].map(tile),
      })),
      arrows: texts(one, ".arrows title"),
    }),
    tree: (one) => [...one.querySelectorAll("li")].map((node) => ({
      text: node.querySelector(":scope > .question, :scope > .leaf").textContent,
      chosen: node.classList.contains("chosen"),
      why: (node.querySelector(":scope > .why")?.textContent ?? "").trim(),
      answer: node.querySelector(":scope > .answer")?.textContent ?? "",
    })),
    folds: (one) => [...one.querySelectorAll("details")].map((fold) => ({
      title: fold.querySelector("summary span").textContent,
      result: fold.querySelector("summary strong").textContent,
      lines: texts(fold, "li"),
    })),
    heat: (one) => [...one.querySelectorAll("tbody tr")].map((row) => texts(row, "th, td")),
    bars: (one) => [...one.querySelectorAll(".row")].map((row) => ({
      label: row.querySelector(".label").textContent,
      value: row.querySelector(".value").textContent,
      share: row.querySelector(".share").textContent,
      over: row.classList.contains("over"),
      parts: [...row.querySelectorAll(".part")].map((part) => part.title),
    })),
    schedule: (one) => texts(one, ".chart-title"),
  };
  const table = main.querySelector(".scroll table:not(.cells)");
  return {
    caption: main.querySelector(".caption").textContent,
    facts: [...main.querySelectorAll("dl.facts > div")].map((one) => [
      one.querySelector("dt").textContent,
      one.querySelector("strong").textContent,
      one.querySelector("dd span")?.textContent ?? "",
    ]),
    figures: [...main.querySelectorAll(".lesson-figures > figure")].map((one) => {
      const kind = one.classList[0];
      return [kind, read[kind] ? read[kind](one) : null];
    }),
    table: table ? [...table.rows].map((row) => texts(row, "th, td")) : null,
    steps: main.querySelector(".steps").textContent,
    address: location.hash,
    moves: texts(main, "details > ul > li"),
    corrections: texts(main, "section[aria-labelledby=lesson-corrections] li"),
  };
}"""


def wanted(lesson: Lesson, place: int, step: int) -> dict[str, Any]:
    """Return what the page must show of a step of a lesson's scene."""
    scene = lesson.scenes[place]
    frame = scene.frames[step]
    moves = [
        move.words
        for figure in frame.figures
        if isinstance(figure, DiagramFigure)
        for move in figure.moves
    ]
    return {
        "caption": frame.caption,
        "facts": [[fact.name, fact.value, fact.note] for fact in frame.facts],
        "figures": [[figure.kind, _figure(figure)] for figure in frame.figures],
        "table": _table(scene),
        "steps": f"step {step + 1} of {len(scene.frames)}",
        "address": address(lesson, place, step),
        "moves": moves,
        "corrections": [
            f"{one.id} says: {one.said}. What holds: {one.holds}" for one in lesson.corrections
        ],
    }


def address(lesson: Lesson, place: int, step: int) -> str:
    """Return the address of a step of a lesson's scene."""
    chosen = choices(lesson.controls)[place] if lesson.controls else {}
    values = {"lesson": lesson.id, **chosen, "step": str(step + 1)}
    # As browsers write forms: a star and what stands in words is left as it is.
    return f"#{urlencode(values, safe='*').replace('~', '%7E')}"


def _figure(figure: LessonFigure) -> Any:
    match figure:
        case DiagramFigure():
            return _diagram(figure)
        case TreeFigure():
            return _tree(figure)
        case FoldsFigure():
            return [
                {"title": one.title, "result": one.result, "lines": list(one.lines)}
                for one in figure.folds
            ]
        case HeatFigure():
            return [[row.label, *row.texts] for row in figure.rows]
        case BarsFigure():
            return _bars(figure)
        case ScheduleFigure():
            return [f"{one.name}: {one.span_text}; {one.bubble_text}" for one in figure.charts]
        case _:
            return None


def _diagram(figure: DiagramFigure) -> dict[str, Any]:
    groups = list(dict.fromkeys(place.group for place in figure.places))
    return {
        "places": [
            {
                "label": place.label,
                "note": place.note,
                "tiles": [
                    {
                        "id": tile.id,
                        "text": f"{tile.label} {tile.words}",
                        "kind": f"{figure.kinds[tile.kind]}: {tile.words}",
                        "state": tile.state,
                        "box": [
                            str(tile.row + 1),
                            f"span {tile.rows}",
                            str(tile.column + 1),
                            f"span {tile.columns}",
                        ],
                    }
                    for tile in place.tiles
                ],
            }
            for group in groups
            for place in figure.places
            if place.group == group
        ],
        "arrows": [move.words for move in figure.moves],
    }


def _tree(figure: TreeFigure) -> list[dict[str, Any]]:
    nodes = {node.id: node for node in figure.nodes}
    found: list[dict[str, Any]] = []

    def draw(name: str, answer: str) -> None:
        node = nodes[name]
        found.append({"text": node.text, "chosen": node.chosen, "why": node.why, "answer": answer})
        for branch in node.branches:
            draw(branch.node, branch.answer)

    draw(figure.nodes[0].id, "")
    return found


def _bars(figure: BarsFigure) -> list[dict[str, Any]]:
    return [
        {
            "label": row.label,
            "value": row.total_text,
            "share": row.share_text,
            "over": row.over,
            "parts": [
                f"{row.label}: {kind} {text}"
                for kind, value, text in zip(figure.kinds, row.values, row.texts, strict=True)
                if value > 0
            ],
        }
        for row in figure.rows
    ]


def _table(scene: Scene) -> list[list[str]] | None:
    table: DataTable | None = scene.table
    return None if table is None else [list(table.head), *map(list, table.rows)]
