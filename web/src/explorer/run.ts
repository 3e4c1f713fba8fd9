// SPDX-License-Identifier: Apache-2.0
// The run file of the controls, and a button that copies it.

import { el } from "../dom";

export function runSection(): { made: HTMLElement; show: (text: string) => void } {
  const text = el("textarea", { readonly: true, rows: 12, "aria-label": "run.toml", spellcheck: false });
  const said = el("span", { role: "status" });
  const button = el("button", { type: "button" }, "Copy run.toml");
  button.addEventListener("click", () => {
    text.select();
    const copied = () => (said.textContent = " copied");
    // A page that is a file may not have the clipboard: what is selected can be copied by keys.
    const refused = () => (said.textContent = " selected: copy it by the keyboard");
    (navigator.clipboard?.writeText(text.value) ?? Promise.reject()).then(copied, refused);
  });
  const made = el(
    "section",
    { id: "run", "aria-labelledby": "run-title" },
    el("h2", { id: "run-title" }, "The run file"),
    el("p", { class: "summary" }, "echelon plan, rehearse, prove and train read it."),
    el("p", {}, button, said),
    text,
  );
  return {
    made,
    show: (found) => {
      text.value = found;
      said.textContent = "";
    },
  };
}
