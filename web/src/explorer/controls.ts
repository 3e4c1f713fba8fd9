// SPDX-License-Identifier: Apache-2.0
// The controls: what can be chosen, in which group, and where a choice has no effect.

import { el } from "../dom";
import { boundsOf } from "./state";
import type { Control, State, Tables, Value } from "./state";

type Idle = (state: State, tables: Tables) => string;

const FLAGS: Value[] = [false, true];
const HOMES: Value[] = ["none", "host"];

const dense: Idle = (state, tables) =>
  tables.models.find((one) => one.name === state["model"])?.shape.experts ? "" : "the model has no experts";
const travels: Idle = (state, tables) => dense(state, tables) || (state["ep"] === 1 ? "ep = 1" : "");
const below = (stage: number): Idle => {
  const why = stage === 3 ? "parameters are whole below ZeRO 3" : "ZeRO 0 cuts nothing";
  return (state) => (Number(state["zero"]) < stage ? why : "");
};
const cut: Idle = (state) => (state["tp"] === 1 ? "tp = 1" : "");
const alone: Idle = (state) => (state["cp"] === 1 ? "cp = 1" : "");
const opened: Idle = (state, tables) =>
  alone(state, tables) ||
  (tables.context_kinds[String(state["context"])]?.exchange === "inner" ? "" : "the kind decides");
const whole: Idle = (state) => {
  if (state["recompute"] === "none") return "nothing runs again";
  return state["recompute"] === "full" && state["every"] === 1 ? "every block runs again whole" : "";
};

export function controlsOf(tables: Tables): Control[] {
  const grouped = (group: string, ...rows: Omit<Control, "group">[]): Control[] =>
    rows.map((one) => ({ ...one, group }));
  const number = (name: string, label = name, more: Partial<Control> = {}) => ({ name, label, ...more });
  const choice = (name: string, label: string, choices: Value[], more: Partial<Control> = {}) => ({
    name,
    label,
    choices,
    ...more,
  });
  const mathematics = { mathematics: true };
  const at = (stage: number, plain: Value): Partial<Control> => ({ idle: below(stage), plain });
  return [
    ...grouped(
      "Model and cluster",
      choice("model", "model", tables.models.map((one) => one.name), mathematics),
      choice("cluster", "cluster", tables.clusters.map((one) => one.name), mathematics),
      choice("precision", "precision", tables.precisions, mathematics),
      choice("optimizer", "optimizer", tables.optimizers, mathematics),
    ),
    ...grouped(
      "Mesh",
      number("pp"),
      number("dp_replicate"),
      number("dp_shard"),
      choice("cp", "cp", tables.context_degrees),
      number("tp"),
      number("ep", "ep", { idle: dense, plain: 1 }),
      choice("sequence_parallel", "sequence parallel", FLAGS, { idle: cut, plain: false }),
      choice("tp_overlap", "overlap of tp", ["none", "ring", "symmetric-memory"], {
        idle: (state, all) => cut(state, all) || (state["sequence_parallel"] ? "" : "no sequence parallelism"),
        plain: "none",
      }),
      number("servers", "parameter servers", { least: 0, most: 1024 }),
    ),
    ...grouped(
      "Batch and pipeline",
      number("sequences", "global batch, sequences", { most: 2 ** 30, ...mathematics }),
      number("microbatch", "microbatch, sequences"),
      choice("length", "sequence length", tables.lengths, mathematics),
      choice("schedule", "schedule", Object.keys(tables.schedules)),
      number("virtual", "stages of a rank", { most: 64 }),
    ),
    ...grouped(
      "ZeRO",
      choice("zero", "ZeRO stage", [0, 1, 2, 3]),
      choice("reshard", "free units after use", ["always", "never"], at(3, "always")),
      choice("secondary", "secondary slices", FLAGS, {
        idle: (state, all) => below(3)(state, all) || (state["reshard"] === "never" ? "units stay" : ""),
        plain: false,
      }),
      choice("gather", "gather", ["parameters", "fp8", "int8"], { ...at(3, "parameters"), ...mathematics }),
      choice("reduce", "sum gradients", ["exact", "int8", "int4"], { ...at(1, "exact"), ...mathematics }),
      choice("optimizer_offload", "optimizer state on", HOMES, at(1, "none")),
      choice("parameter_offload", "parameters on", HOMES, at(3, "none")),
    ),
    ...grouped(
      "Recompute",
      choice("recompute", "recompute", tables.recomputes),
      number("every", "every so many blocks", {
        most: 1024,
        idle: (state) => (state["recompute"] === "full" ? "" : "no block runs again whole"),
        plain: 1,
      }),
      choice("operators", "of other blocks", tables.operators, { idle: whole, plain: "auto" }),
    ),
    ...grouped(
      "Context and experts",
      choice("context", "context kind", Object.keys(tables.context_kinds), { idle: alone, plain: "ring" }),
      number("ulysses", "ranks that exchange heads", { idle: opened, plain: 1 }),
      number("expert_tp", "pieces of an expert", { idle: dense, plain: 1 }),
      choice("dispatch", "rows to experts", ["flat", "two-hop"], { idle: travels, plain: "flat" }),
      number("chunks", "in chunks", { idle: travels, plain: 1 }),
    ),
  ];
}

export type Input = HTMLSelectElement | HTMLInputElement;

export function input(control: Control): Input {
  const id = `control-${control.name}`;
  const [min, max] = boundsOf(control);
  if (!control.choices) return el("input", { id, name: control.name, type: "number", min, max, step: 1 });
  if (control.choices.every((one) => typeof one === "boolean")) {
    return el("input", { id, name: control.name, type: "checkbox" });
  }
  const options = control.choices.map((one) => el("option", { value: String(one) }, String(one)));
  return el("select", { id, name: control.name }, ...options);
}

export function textOf(made: Input): string {
  return made instanceof HTMLInputElement && made.type === "checkbox" ? String(made.checked) : made.value;
}

export function put(made: Input, control: Control, state: State): void {
  made.removeAttribute("aria-invalid");
  if (made instanceof HTMLInputElement && made.type === "checkbox") made.checked = state[control.name] === true;
  else made.value = String(state[control.name]);
}

// A control without effect is locked, and says why.
export function settle(made: Input, control: Control, state: State, tables: Tables): void {
  const idle = control.idle?.(state, tables) ?? "";
  if (made.disabled !== (idle !== "")) made.disabled = idle !== "";
  const title = idle && `no effect: ${idle}`;
  if (made.title !== title) made.title = title;
}

export function form(controls: Control[], inputs: Map<string, Input>): HTMLElement {
  const groups = [...new Set(controls.map((one) => one.group))];
  const made = el(
    "form",
    { class: "explorer", "aria-label": "Controls" },
    ...groups.map((group) => {
      const rows = controls
        .filter((one) => one.group === group)
        .map((one) => el("div", {}, el("label", { for: `control-${one.name}` }, one.label), inputs.get(one.name)!));
      return el("fieldset", {}, el("legend", {}, group), ...rows);
    }),
  );
  made.addEventListener("submit", (event) => event.preventDefault());
  return made;
}
