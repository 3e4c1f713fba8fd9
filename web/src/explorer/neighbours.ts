// SPDX-License-Identifier: Apache-2.0
// Plans of the same mathematics that are one change away: who fits, who is faster.

import type { Prediction } from "../compiled/formulas.js";
import { el } from "../dom";
import { changeButton } from "./broken";
import { bytesText } from "../bytes";
import { secondsText } from "./figures";
import { changed, neighbours } from "./near";
import type { Change } from "./near";
import type { Control, State, Tables } from "./state";

export interface Neighbour {
  change: Change;
  step_s: number;
  bytes_held: number;
}

const MOST = 8;
const MOST_SEQUENCES = 4096;

// All that fit, fastest first; yields between plans, so that it can wait.
export function* nearPlans(
  state: State,
  controls: Control[],
  tables: Tables,
  memory: number,
  ask: (state: State) => Prediction | null,
): Generator<undefined, Neighbour[]> {
  const found: Neighbour[] = [];
  for (const change of neighbours(state, controls, tables)) {
    const got = ask(changed(state, change));
    yield;
    if (got && got.bytes_held <= memory) found.push({ change, step_s: got.step_s, bytes_held: got.bytes_held });
  }
  return found.sort((one, other) => one.step_s - other.step_s).slice(0, MOST);
}

export interface Microbatches {
  // Sequences of a microbatch that make a plan, and those of them with which it fits.
  legal: number[];
  fitting: number[];
}

// Every microbatch that the batch can be cut into; yields between plans.
export function* microbatches(
  state: State,
  memory: number,
  ask: (state: State) => Prediction | null,
): Generator<undefined, Microbatches> {
  const share = Number(state["sequences"]) / (Number(state["dp_replicate"]) * Number(state["dp_shard"]));
  const found: Microbatches = { legal: [], fitting: [] };
  for (let size = 1; size <= Math.min(share, MOST_SEQUENCES); size++) {
    if (share % size) continue;
    const got = ask({ ...state, microbatch: size });
    yield;
    if (!got) continue;
    found.legal.push(size);
    if (got.bytes_held <= memory) found.fitting.push(size);
  }
  return found;
}

function boundsText({ legal, fitting }: Microbatches): string {
  const listed = (sizes: number[]) => (sizes.length ? sizes.join(", ") : "none");
  return `Sequences of a microbatch that make a plan: ${listed(legal)}; that fit: ${listed(fitting)}.`;
}

export function neighboursSection(controls: Control[], choose: (change: Change) => void) {
  const summary = el("p", { class: "summary" });
  const body = el("tbody");
  const bounds = el("p", { class: "note", id: "microbatches" });
  const made = el(
    "section",
    { id: "neighbours", hidden: true, "aria-labelledby": "neighbours-title" },
    el("h2", { id: "neighbours-title" }, "One change away"),
    summary,
    el(
      "div",
      { class: "scroll", tabindex: 0, role: "region", "aria-label": "Plans one change away" },
      el(
        "table",
        {},
        el("thead", {}, el("tr", {}, ...["change", "step", "beside this", "fullest rank"].map((one) => el("th", { scope: "col" }, one)))),
        body,
      ),
    ),
    bounds,
  );
  const show = (found: Neighbour[], sizes: Microbatches, now: Prediction, fits: boolean) => {
    bounds.textContent = boundsText(sizes);
    const better = found.filter((one) => !fits || one.step_s < now.step_s);
    made.hidden = false;
    const far = fits ? "faster than this one" : "that fit their devices";
    summary.textContent = better.length
      ? `Plans of the same mathematics, one change away, ${far}: the fastest first.`
      : `No plan of the same mathematics that is one change away is one of those ${far}.`;
    body.replaceChildren(...better.map((one) => row(one, now)));
  };
  const row = (one: Neighbour, now: Prediction) => {
    const beside = `${(100 * (one.step_s / now.step_s - 1)).toFixed(1)} %`;
    return el(
      "tr",
      { "data-step": one.step_s, "data-bytes": one.bytes_held },
      el("td", {}, changeButton(one.change, controls, choose)),
      el("td", { class: "number" }, secondsText(one.step_s)),
      el("td", { class: "number" }, one.step_s > now.step_s ? `+${beside}` : beside),
      el("td", { class: "number" }, bytesText(one.bytes_held)),
    );
  };
  return { made, show };
}
