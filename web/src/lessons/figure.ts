// SPDX-License-Identifier: Apache-2.0
import type { Frame } from "../document";
import { el } from "../dom";
import { figure, type Figure } from "../figures/figure";
import { diagram } from "./diagram";
import { folds } from "./folds";
import { tree } from "./tree";

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
