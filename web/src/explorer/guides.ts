// SPDX-License-Identifier: Apache-2.0
// What published guides say to the numbers of the controls: each way through a tree, and sizes.

import type { GuideWay } from "../compiled/formulas.js";
import { el } from "../dom";

export function guidesSection(): { made: HTMLElement; show: (ways: GuideWay[]) => void } {
  const ways = el("div", { class: "ways" });
  const summary = el("p", { class: "summary" });
  const made = el(
    "section",
    { id: "guides", "aria-labelledby": "guides-title" },
    el("h2", { id: "guides-title" }, "What the guides say"),
    summary,
    ways,
    el("p", { class: "note" }, "echelon explain choose walks the same ways, and says where guides are wrong."),
  );
  let last = "";
  const show = (found: GuideWay[]) => {
    // Most controls are about a split, of which guides ask nothing: then nothing is drawn anew.
    const key = JSON.stringify(found);
    if (key === last) return;
    last = key;
    const rows = found.filter((one) => one.steps.length === 0);
    summary.textContent =
      "Each question of a guide's decision tree is answered by the model, the batch and the cluster above" +
      (rows.length ? "; rows of the size guide that cover them are below." : "; no row of the size guide covers them.");
    const open = new Set([...ways.querySelectorAll("details[open]")].map((one) => one.id));
    ways.replaceChildren(...found.map((one) => wayOf(one, open.has(`guide-${one.id}`))));
  };
  return { made, show };
}

function wayOf(way: GuideWay, open: boolean): HTMLElement {
  const agrees = way.differs.length === 0;
  return el(
    "details",
    { id: `guide-${way.id}`, class: "way", open },
    el(
      "summary",
      {},
      el("strong", {}, way.strategy),
      ` (${way.says}) - ${way.source}: `,
      el("span", { class: agrees ? "agrees" : "differs" }, agrees ? "agrees" : way.differs.join("; ")),
    ),
    way.steps.length ? el("ol", {}, ...way.steps.map(stepOf)) : null,
    el("p", { class: "note" }, way.note),
  );
}

function stepOf(step: GuideWay["steps"][number]): Node {
  return el(
    "li",
    {},
    el("strong", { class: step.yes ? "yes" : "no" }, step.yes ? "yes" : "no"),
    ` ${step.question} `,
    el("span", { class: "why" }, step.why),
  );
}
