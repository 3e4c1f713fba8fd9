// SPDX-License-Identifier: Apache-2.0
// What a plan of the controls holds and takes, and where its ranks are, as figures.

import type { Controls, Prediction, Table } from "../compiled/formulas.js";
import { el } from "../dom";
import { figure, type Figure } from "../figures/figure";
import { dataTable } from "../table";
import { bytesText } from "../bytes";
import { memoryFigure, meshFigure, secondsText, stepFigure, termsTable } from "./figures";
import type { ClusterRecord } from "./state";

export function resultParts() {
  const numbers = el("div", { class: "results" });
  const where = el("div", { class: "results" });
  const show = (found: Prediction, cluster: ClusterRecord) => {
    const open = new Set([...numbers.querySelectorAll("section:has(details[open])")].map((one) => one.id));
    const parts = sections(found, cluster);
    for (const one of parts) if (open.has(one.id)) one.querySelector("details")!.open = true;
    numbers.replaceChildren(...parts);
  };
  // The mesh is drawn anew where it is another: a rank that was chosen stays so else.
  let last = "";
  const mesh = (controls: Controls, cluster: ClusterRecord, table: Table) => {
    const found = meshFigure(controls, cluster, table);
    const key = JSON.stringify(found);
    if (key === last) return;
    last = key;
    where.replaceChildren(
      ...(found.ranks > 1 ? [section("mesh", "Where ranks are", "Choose a rank to see its groups.", found, null)] : []),
    );
  };
  return { made: el("div", {}, numbers, where), show, mesh };
}

function sections(found: Prediction, cluster: ClusterRecord): HTMLElement[] {
  return [
    section(
      "memory",
      "What the fullest rank holds at its peak",
      `The fullest rank holds ${bytesText(found.bytes_held)}.`,
      memoryFigure(found, cluster),
      dataTable(termsTable("bytes", found.bytes, found.bytes_held, bytesText), "bytes by term"),
    ),
    section(
      "step",
      "Seconds of a step",
      `A step takes ${secondsText(found.step_s)}.`,
      stepFigure(found),
      dataTable(termsTable("seconds", found.seconds, found.step_s, secondsText), "seconds by term"),
    ),
  ];
}

function section(id: string, title: string, summary: string, drawn: Figure, table: Node | null): HTMLElement {
  return el(
    "section",
    { id, "aria-labelledby": `${id}-title` },
    el("h2", { id: `${id}-title` }, title),
    el("p", { class: "summary", id: `${id}-summary` }, summary),
    figure(drawn, title, `${id}-summary`),
    table ? el("details", {}, el("summary", {}, "The numbers as a table"), table) : null,
  );
}
