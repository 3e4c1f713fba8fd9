// Plans of the same mathematics that are one change away: who fits, who is faster.

import type { Prediction } from "../compiled/formulas.js";
import { el } from "../dom";
import { changeButton } from "./broken";
import { bytesText, secondsText } from "./figures";
import { changed, neighbours } from "./near";
import type { Change } from "./near";
import type { Control, State, Tables } from "./state";

export interface Neighbour {
  change: Change;
  step_s: number;
  bytes_held: number;
}

const MOST = 8;

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

export function neighboursSection(controls: Control[], choose: (change: Change) => void) {
  const summary = el("p", { class: "summary" });
  const body = el("tbody");
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
  );
  const show = (found: Neighbour[], now: Prediction, fits: boolean) => {
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
