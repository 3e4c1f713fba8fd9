// SPDX-License-Identifier: Apache-2.0
// Results that unfold into the lines that they come from.

import type { FoldsFigure } from "../document";
import { el } from "../dom";

export function folds(host: HTMLElement, found: FoldsFigure): HTMLElement {
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
