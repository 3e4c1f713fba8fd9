// SPDX-License-Identifier: Apache-2.0
// What the engine says of a schedule, in words, as a table, and on an axis of seconds.

import type { ScheduleVerdict, Simulation } from "../compiled/formulas.js";
import type { DataTable, ScheduleFigure } from "../document";
import { el } from "../dom";
import { figure } from "../figures/figure";
import { dataTable } from "../table";
import { numRanks } from "./built";
import type { Built } from "./built";

const KINDS = ["F", "B", "W", "BW"];
const WORDS = ["forward", "input gradient", "weight gradient", "backward"];

const seconds = (value: number) => `${Number(value.toPrecision(6))} s`;
const share = (value: number) => `${(100 * value).toFixed(1)} %`;

export function verdictText(found: ScheduleVerdict): string {
  const rules = [...new Set(found.problems.map((one) => one.rule))].join(", ");
  const timed = found.simulation;
  if (timed) {
    const says = `a step takes ${seconds(timed.makespan_s)}, of which ranks wait ${share(timed.bubble_fraction)}`;
    return rules ? `It breaks ${rules}; without that rule ${says}.` : `It runs: ${says}.`;
  }
  if (found.circle.length) return `It deadlocks: ${found.circle.length} ranks wait for one another in a circle (${rules}).`;
  return `It can't run: ${rules}.`;
}

export function results(built: Built, found: ScheduleVerdict): Node[] {
  const timed = found.simulation;
  const parts: (Node | null)[] = [
    found.drawing ? el("pre", { id: "built-circle", tabindex: 0, "aria-label": "The circle of waits, as the terminal draws it" }, found.drawing) : null,
    timed ? numbers(timed, found) : null,
    timed ? figure(chart(built, timed), "The schedule on an axis of seconds", "built-verdict") : null,
    found.in_flight.length ? dataTable(table(built, found), "ranks of the schedule") : null,
  ];
  return parts.filter((one) => one !== null);
}

function numbers(timed: Simulation, found: ScheduleVerdict): Node {
  const rows: [string, string, number][] = [
    ["step", seconds(timed.makespan_s), timed.makespan_s],
    ["bubble: waiting over the whole step", share(timed.bubble_fraction), timed.bubble_fraction],
    ["bubble: waiting over work", share(timed.bubble_overhead), timed.bubble_overhead],
    ["most in flight on a rank", String(Math.max(...found.in_flight)), Math.max(...found.in_flight)],
  ];
  const row = ([name, text, exact]: [string, string, number]) =>
    el("div", {}, el("dt", {}, name), el("dd", { "data-number": exact }, text));
  return el("dl", { class: "numbers", id: "built-numbers" }, ...rows.map(row));
}

function table(built: Built, found: ScheduleVerdict): DataTable {
  const timed = found.simulation;
  const rows = Array.from({ length: numRanks(built) }, (_, rank) => [
    `rank ${rank}`,
    String(built.lists[rank]!.length),
    timed ? seconds(timed.busy_s[rank]!) : "",
    timed ? seconds(timed.idle_s[rank]!) : "",
    String(found.in_flight[rank]),
  ]);
  return { head: ["rank", "actions", "works", "waits", "in flight at most"], rows, right: [1, 2, 3, 4] };
}

function chart(built: Built, timed: Simulation): ScheduleFigure {
  const lanes = Array.from({ length: numRanks(built) }, (_, rank) => {
    const own = timed.events.filter((one) => one.rank === rank && one.kind !== "send");
    return {
      label: `rank ${rank}`,
      kinds: own.map((one) => KINDS.indexOf(one.kind)),
      stages: own.map((one) => one.stage),
      microbatches: own.map((one) => one.microbatch),
      starts: own.map((one) => one.start),
      ends: own.map((one) => one.end),
      idle_text: `${seconds(timed.idle_s[rank]!)} in all`,
    };
  });
  const bubble = `ranks wait ${share(timed.bubble_fraction)} of the step`;
  const made = { name: built.name, lanes, span_s: timed.makespan_s, span_text: seconds(timed.makespan_s), bubble_text: bubble, reached: null };
  return { kind: "schedule", kinds: WORDS, charts: [made], unit: "s" };
}
