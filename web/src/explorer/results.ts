// What a plan of the controls holds and takes, and where its ranks are, as figures.

import type { Controls, Prediction, Table } from "../compiled/formulas.js";
import { el } from "../dom";
import { figure, type Figure } from "../figures/figure";
import { dataTable } from "../table";
import { bytesText, memoryFigure, meshFigure, secondsText, stepFigure, termsTable } from "./figures";
import type { ClusterRecord } from "./state";

export function resultParts() {
  const made = el("div", { class: "results" });
  let mesh: { key: string; drawn: HTMLElement } | null = null;
  // The mesh is drawn anew where it is another: a rank that was chosen stays so else.
  const meshPart = (controls: Controls, cluster: ClusterRecord, table: Table): HTMLElement | null => {
    if (controls.workers === 1) return null;
    const found = meshFigure(controls, cluster, table);
    const key = JSON.stringify(found);
    if (mesh?.key !== key) {
      mesh = { key, drawn: section("mesh", "Where ranks are", "Choose a rank to see its groups.", found, null) };
    }
    return mesh.drawn;
  };
  const show = (found: Prediction, controls: Controls, cluster: ClusterRecord, table: Table) => {
    const open = new Set([...made.querySelectorAll("section:has(details[open])")].map((one) => one.id));
    const parts = sections(found, cluster);
    for (const one of parts) if (open.has(one.id)) one.querySelector("details")!.open = true;
    const drawn = meshPart(controls, cluster, table);
    made.replaceChildren(...parts, ...(drawn ? [drawn] : []));
  };
  return { made, show };
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
