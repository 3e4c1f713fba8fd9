// SPDX-License-Identifier: Apache-2.0
// A grid of cells, darker where the value is larger; each cell says its number.

import type { HeatFigure } from "../document";
import { el } from "../dom";

export function heat(host: HTMLElement, found: HeatFigure): void {
  const share = (value: number) => Math.round(100 * Math.min(1, value / (found.most || 1)));
  host.append(
    el(
      "div",
      { class: "scroll", tabindex: 0, role: "region", "aria-label": found.legend },
      el(
        "table",
        { class: "cells" },
        el("thead", {}, el("tr", {}, el("td", {}), ...found.columns.map((name) => el("th", { scope: "col" }, name)))),
        el(
          "tbody",
          {},
          ...found.rows.map((row) =>
            el(
              "tr",
              {},
              el("th", { scope: "row" }, row.label),
              ...row.values.map((value, place) =>
                el(
                  "td",
                  {
                    class: value !== null && share(value) > 55 ? "dark" : undefined,
                    style: value === null ? undefined : `--share:${share(value)}%`,
                  },
                  row.texts[place] ?? "",
                ),
              ),
            ),
          ),
        ),
      ),
    ),
    el("p", { class: "key" }, found.legend),
  );
}
