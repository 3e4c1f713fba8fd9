// SPDX-License-Identifier: Apache-2.0
// Bars of parts, one over the other, beside a limit: lengths are shares of the longest.

import type { BarRow, BarsFigure } from "../document";
import { el } from "../dom";
import { legend, tint } from "./legend";

export function bars(host: HTMLElement, found: BarsFigure): void {
  const most = Math.max(found.limit, ...found.rows.map((row) => row.total), Number.MIN_VALUE);
  const share = (value: number) => `${(100 * value) / most}%`;
  const used = found.kinds.map((_, place) => found.rows.some((row) => (row.values[place] ?? 0) > 0));
  host.append(
    legend(found.kinds.flatMap((name, place) => (used[place] ? [{ name, fill: tint(place) }] : []))),
    el("div", { class: "rows" }, ...found.rows.map((row) => bar(row, found, share))),
  );
  if (found.limit > 0) {
    host.append(el("p", { class: "key" }, `The line is the memory of a device: ${found.limit_text}.`));
  }
}

function bar(row: BarRow, found: BarsFigure, share: (value: number) => string): Node {
  const parts = row.values.flatMap((value, place) =>
    value > 0
      ? [
          el("span", {
            class: "part",
            style: `width:${share(value)};background:${tint(place)}`,
            title: `${row.label}: ${found.kinds[place]} ${row.texts[place]}`,
          }),
        ]
      : [],
  );
  const limit =
    found.limit > 0 ? el("span", { class: "limit", style: `left:${share(found.limit)}` }) : null;
  return el(
    "div",
    { class: row.over ? "row over" : "row" },
    el("span", { class: "label" }, row.label),
    el("span", { class: "bar", "aria-hidden": "true" }, ...parts, limit),
    el("span", { class: "value" }, row.total_text),
    el("span", { class: "share" }, row.share_text),
  );
}
