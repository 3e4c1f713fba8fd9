// SPDX-License-Identifier: Apache-2.0
// A tree of questions as nested lists; the path that the numbers take is marked.

import type { TreeFigure } from "../document";
import { el } from "../dom";

export function tree(host: HTMLElement, found: TreeFigure): HTMLElement {
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
