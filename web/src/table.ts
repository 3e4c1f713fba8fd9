// SPDX-License-Identifier: Apache-2.0
import type { DataTable } from "./document";
import { el } from "./dom";

// A table that scrolls by itself where it is wider than the page.
export function dataTable(table: DataTable, label: string): HTMLElement {
  const right = new Set(table.right);
  const cell = (tag: "th" | "td", text: string, place: number) =>
    el(tag, { class: right.has(place) ? "number" : undefined, scope: tag === "th" ? "col" : undefined }, text);
  return el(
    "div",
    { class: "scroll", tabindex: 0, role: "region", "aria-label": `${label}: table` },
    el(
      "table",
      {},
      el("thead", {}, el("tr", {}, ...table.head.map((text, place) => cell("th", text, place)))),
      el("tbody", {}, ...table.rows.map((row) => el("tr", {}, ...row.map((text, place) => cell("td", text, place))))),
    ),
  );
}
