// SPDX-License-Identifier: Apache-2.0
// Figures of lessons: those of reports, diagrams, results that unfold, trees of questions.

import type { FoldsFigure, Frame, TreeFigure } from "../document";
import { el } from "../dom";
import { figure, type Figure } from "../figures/figure";
import { diagram } from "./diagram";

export function lessonFigure(found: Frame["figures"][number], title: string, summary: string): HTMLElement {
  const host = () => el("figure", { class: found.kind, "aria-label": title, "aria-describedby": summary });
  switch (found.kind) {
    case "diagram":
      return diagram(host(), found);
    case "tree":
      return tree(host(), found);
    case "folds":
      return folds(host(), found);
    default:
      return figure(found satisfies Figure, title, summary);
  }
}

// Results that unfold into the lines that they come from.
function folds(host: HTMLElement, found: FoldsFigure): HTMLElement {
  host.append(
    ...found.folds.map((one) =>
      el(
        "details",
        { class: "fold" },
        el("summary", {}, el("span", {}, one.title), el("strong", {}, one.result)),
        el("ol", {}, ...one.lines.map((line) => el("li", {}, line))),
      ),
    ),
  );
  return host;
}

// A tree of questions as nested lists; the path that the numbers take is marked.
function tree(host: HTMLElement, found: TreeFigure): HTMLElement {
  const nodes = new Map(found.nodes.map((one) => [one.id, one]));
  const draw = (id: string, answer: string): Node => {
    const node = nodes.get(id)!;
    return el(
      "li",
      { class: node.chosen ? "chosen" : undefined },
      answer ? el("span", { class: "answer" }, answer) : null,
      el("span", { class: node.branches.length ? "question" : "leaf" }, node.text),
      node.chosen ? el("span", { class: "mark" }, node.branches.length ? " (asked)" : " (the answer)") : null,
      node.why ? el("span", { class: "why" }, ` ${node.why}`) : null,
      node.branches.length ? el("ul", {}, ...node.branches.map((one) => draw(one.node, one.answer))) : null,
    );
  };
  host.append(el("ul", { class: "questions" }, draw(found.nodes[0]!.id, "")));
  return host;
}
