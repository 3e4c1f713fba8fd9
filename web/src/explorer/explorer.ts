// The explorer: controls, and what they come to by compiled formulas, at once.

import { broken_rules, controls_of_record, predict, run_text } from "../compiled/formulas.js";
import type { Broken, Controls, Prediction, Table } from "../compiled/formulas.js";
import { mapped } from "../compiled/runtime.js";
import { el } from "../dom";
import { figure, type Figure } from "../figures/figure";
import { scheduleBuilder } from "../schedules/builder";
import { withBuilt } from "../schedules/link";
import { isLesson } from "../lessons/address";
import { dataTable } from "../table";
import { bytesText, memoryFigure, meshFigure, secondsText, shareText, stepFigure, termsTable } from "./figures";
import { controlsOf, effective, hashOf, stateOfHash, valueOf } from "./state";
import type { ClusterRecord, Control, ExplorerDocument, State } from "./state";

interface Parts {
  verdict: HTMLElement;
  facts: HTMLElement;
  broken: HTMLElement;
  results: HTMLElement;
  text: HTMLTextAreaElement;
  mesh?: { key: string; made: HTMLElement };
}

export function explorer(found: ExplorerDocument): Node[] {
  const controls = controlsOf(found.tables);
  const tables = mapped(found.tables) as Table;
  let state = stateOfHash(location.hash, controls, found.start);
  const wrong = new Map<string, string>();
  const parts: Parts = {
    verdict: el("p", { class: "verdict", id: "verdict", role: "status" }),
    facts: el("dl", { class: "facts" }),
    broken: el("ul", { class: "broken", "aria-label": "Rules that are broken" }),
    results: el("main", { id: "content" }),
    text: el("textarea", { readonly: true, rows: 12, "aria-label": "run.toml", spellcheck: false }),
  };
  const inputs = new Map(controls.map((one) => [one.name, input(one)]));
  const update = () => {
    const told = effective(state, controls, found.tables);
    for (const control of controls) settle(inputs.get(control.name)!, control, state, found);
    show(parts, tables, found, told, [...wrong.values()]);
  };
  for (const control of controls) {
    const made = inputs.get(control.name)!;
    put(made, control, state);
    made.addEventListener(made instanceof HTMLSelectElement ? "change" : "input", () => {
      const read = valueOf(control, made instanceof HTMLInputElement && made.type === "checkbox" ? String(made.checked) : made.value);
      made.setAttribute("aria-invalid", String("why" in read));
      if ("why" in read) {
        wrong.set(control.name, read.why);
      } else {
        wrong.delete(control.name);
        state = { ...state, [control.name]: read.value };
        history.replaceState(null, "", withBuilt(hashOf(state)));
      }
      update();
    });
  }
  addEventListener("hashchange", () => {
    if (isLesson(location.hash)) return;
    state = stateOfHash(location.hash, controls, found.start);
    wrong.clear();
    for (const control of controls) put(inputs.get(control.name)!, control, state);
    update();
  });
  update();
  return [
    el("a", { class: "skip", href: "#content" }, "Skip to the content"),
    el("header", {}, el("h1", {}, "Explorer"), parts.verdict, parts.broken, parts.facts),
    form(controls, inputs),
    parts.results,
    runSection(parts.text),
    scheduleBuilder(),
    el(
      "footer",
      {},
      el(
        "p",
        {},
        `${found.made_by}. Numbers are closed forms, as a search compares plans by; echelon plan times a pipeline `,
        "event by event and counts what a rank holds. This file loads nothing and sends nothing.",
      ),
    ),
  ];
}

function input(control: Control): HTMLSelectElement | HTMLInputElement {
  const id = `control-${control.name}`;
  if (!control.choices) {
    return el("input", { id, name: control.name, type: "number", min: 1, max: control.most, step: 1 });
  }
  if (control.choices.every((one) => typeof one === "boolean")) {
    return el("input", { id, name: control.name, type: "checkbox" });
  }
  const options = control.choices.map((one) => el("option", { value: String(one) }, String(one)));
  return el("select", { id, name: control.name }, ...options);
}

function put(made: HTMLSelectElement | HTMLInputElement, control: Control, state: State): void {
  made.removeAttribute("aria-invalid");
  if (made instanceof HTMLInputElement && made.type === "checkbox") made.checked = state[control.name] === true;
  else made.value = String(state[control.name]);
}

function settle(made: HTMLElement, control: Control, state: State, found: ExplorerDocument): void {
  const idle = control.idle?.(state, found.tables) ?? "";
  made.toggleAttribute("disabled", idle !== "");
  made.title = idle && `no effect: ${idle}`;
}

function form(controls: Control[], inputs: Map<string, HTMLElement>): Node {
  const rows = controls.map((one) =>
    el("div", {}, el("label", { for: `control-${one.name}` }, one.label), inputs.get(one.name)!),
  );
  const made = el("form", { class: "explorer", "aria-label": "Controls" }, ...rows);
  made.addEventListener("submit", (event) => event.preventDefault());
  return made;
}

function show(parts: Parts, tables: Table, found: ExplorerDocument, state: State, wrong: string[]): void {
  const { model, cluster, ...rest } = state;
  const place = found.tables.clusters.findIndex((one) => one.name === cluster);
  const record = found.tables.clusters[place]!;
  const table = (tables.get("clusters") as Table[])[place]!;
  const shape = (tables.get("models") as Table[])[found.tables.models.findIndex((one) => one.name === model)]!;
  const controls = controls_of_record(new Map(Object.entries(rest)));
  const broken = wrong.length ? [] : broken_rules(tables, controls, shape, table);
  const bad = [...wrong.map((message) => ({ rule: "", message })), ...broken];
  parts.broken.replaceChildren(...bad.map(brokenRow));
  parts.broken.hidden = bad.length === 0;
  parts.text.value = bad.length ? "" : run_text(controls, shape, table);
  if (bad.length) {
    parts.verdict.className = "verdict bad";
    parts.verdict.textContent = `These settings make no plan: ${bad.length === 1 ? "one rule is" : `${bad.length} rules are`} broken.`;
    parts.facts.replaceChildren();
    parts.results.replaceChildren();
    return;
  }
  const predicted = predict(tables, controls, shape, table);
  say(parts, predicted, controls, record);
  const open = new Set([...parts.results.querySelectorAll("section:has(details[open])")].map((one) => one.id));
  const made = sections(predicted, record);
  for (const one of made) if (open.has(one.id)) one.querySelector("details")!.open = true;
  const mesh = meshSection(parts, controls, record, table);
  parts.results.replaceChildren(...made, ...(mesh ? [mesh] : []));
}

function brokenRow(one: Broken): Node {
  return el("li", {}, one.rule ? el("code", {}, one.rule) : null, one.rule ? `: ${one.message}` : one.message);
}

function say(parts: Parts, found: Prediction, controls: Controls, cluster: ClusterRecord): void {
  const fits = found.bytes_held <= cluster.memory_bytes;
  const of = cluster.memory_bytes > 0 ? ` of ${bytesText(cluster.memory_bytes)}` : "";
  parts.verdict.className = `verdict ${fits ? "good" : "bad"}`;
  parts.verdict.textContent = `The plan ${fits ? "fits" : "does not fit"}: its fullest rank holds ${bytesText(found.bytes_held)}${of}, and a step takes ${secondsText(found.step_s)}.`;
  const rows: [string, string, number][] = [
    ["step", secondsText(found.step_s), found.step_s],
    ["tokens/s of a device", Math.round(found.tokens_per_s_per_device).toLocaleString("en-US"), found.tokens_per_s_per_device],
    ["MFU", shareText(found.mfu), found.mfu],
    ["memory of the fullest rank", bytesText(found.bytes_held), found.bytes_held],
    ["ranks", controls.ranks.toLocaleString("en-US"), controls.ranks],
  ];
  parts.facts.replaceChildren(
    ...rows.map(([name, value, exact]) =>
      el("div", {}, el("dt", {}, name), el("dd", {}, el("strong", { "data-number": exact }, value))),
    ),
  );
}

// The mesh is drawn anew where it is another: a rank that was chosen stays so else.
function meshSection(parts: Parts, controls: Controls, cluster: ClusterRecord, table: Table): Node | null {
  if (controls.ranks === 1) return null;
  const mesh = meshFigure(controls, cluster, table);
  const key = JSON.stringify(mesh);
  if (parts.mesh?.key !== key) {
    const made = section("mesh", "Where ranks are", "Choose a rank to see its groups.", mesh, null);
    parts.mesh = { key, made };
  }
  return parts.mesh.made;
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

function runSection(text: HTMLTextAreaElement): Node {
  const said = el("span", { role: "status" });
  const button = el("button", { type: "button" }, "Copy run.toml");
  button.addEventListener("click", () => {
    text.select();
    const copied = () => (said.textContent = " copied");
    // A page that is a file may not have the clipboard: what is selected can be copied by keys.
    const refused = () => (said.textContent = " selected: copy it by the keyboard");
    (navigator.clipboard?.writeText(text.value) ?? Promise.reject()).then(copied, refused);
  });
  return el(
    "section",
    { id: "run", "aria-labelledby": "run-title" },
    el("h2", { id: "run-title" }, "The run file"),
    el("p", { class: "summary" }, "echelon plan, rehearse, prove and train read it."),
    el("p", {}, button, said),
    text,
  );
}
