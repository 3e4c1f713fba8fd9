// SPDX-License-Identifier: Apache-2.0
// Rules that are broken: each with its arithmetic, and buttons of the nearest values that work.

import type { Broken } from "../compiled/formulas.js";
import { el } from "../dom";
import { changeText } from "./near";
import type { Change } from "./near";
import type { Control } from "./state";

export function changeButton(change: Change, controls: Control[], choose: (change: Change) => void): HTMLElement {
  const made = el("button", { type: "button", "data-change": JSON.stringify(change) }, changeText(change, controls));
  made.addEventListener("click", () => choose(change));
  return made;
}

export function brokenList(controls: Control[], choose: (change: Change) => void) {
  const made = el("ul", { class: "broken", "aria-label": "Rules that are broken" });
  const show = (wrong: string[], broken: Broken[]) => {
    made.replaceChildren(
      ...wrong.map((why) => el("li", {}, why)),
      ...broken.map((one) => el("li", { "data-rule": one.rule }, el("code", {}, one.rule), `: ${one.message}`)),
    );
    made.hidden = wrong.length + broken.length === 0;
  };
  // The first of several rows of one rule has its buttons.
  const offer = (found: Map<string, Change[]>) => {
    for (const [rule, changes] of found) {
      const row = made.querySelector(`[data-rule="${rule}"]`);
      const buttons = changes.map((change) => changeButton(change, controls, choose));
      const said = buttons.length ? "works here:" : "no value of one or two controls near these works.";
      row?.append(el("span", { class: "works" }, ` ${said} `, ...buttons.flatMap((one) => [one, " "])));
    }
  };
  return { made, show, offer };
}
