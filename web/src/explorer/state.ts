// What the controls say: all of it is in the address, so that a link holds the whole state.

import type { LessonBook } from "../document";

export type Value = number | string | boolean;
export type State = Record<string, Value>;

export interface ClusterRecord {
  name: string;
  device: string;
  devices: number;
  devices_per_node: number;
  memory_bytes: number;
}

export interface Tables {
  models: { name: string; shape: { experts: unknown } }[];
  clusters: ClusterRecord[];
  schedules: Record<string, number>;
  context_kinds: Record<string, unknown>;
  recomputes: string[];
  context_degrees: number[];
  lengths: number[];
}

export interface ExplorerDocument {
  schema: number;
  kind: "explorer";
  title: string;
  start: State;
  tables: Tables;
  book: LessonBook;
  made_by: string;
}

export interface Control {
  name: string;
  label: string;
  // What can be chosen; none: a whole number from 1 to `most`.
  choices?: Value[];
  most?: number;
  // Why the control has no effect; "" where it has one.
  idle?: (state: State, tables: Tables) => string;
  // What it is then.
  plain?: Value;
}

const MOST = 1_048_576;

const degree = (name: string, label: string): Control => ({ name, label, most: MOST });

export function controlsOf(tables: Tables): Control[] {
  const dense = (state: State) =>
    tables.models.find((one) => one.name === state["model"])?.shape.experts ? "" : "the model has no experts";
  return [
    { name: "model", label: "model", choices: tables.models.map((one) => one.name) },
    { name: "cluster", label: "cluster", choices: tables.clusters.map((one) => one.name) },
    degree("pp", "pp"),
    degree("dp_replicate", "dp_replicate"),
    degree("dp_shard", "dp_shard"),
    { name: "cp", label: "cp", choices: tables.context_degrees },
    degree("tp", "tp"),
    { ...degree("ep", "ep"), idle: dense, plain: 1 },
    { name: "zero", label: "ZeRO stage", choices: [0, 1, 2, 3] },
    { name: "schedule", label: "schedule", choices: Object.keys(tables.schedules) },
    { name: "virtual", label: "stages of a rank", most: 64 },
    degree("microbatch", "microbatch, sequences"),
    { name: "sequences", label: "global batch, sequences", most: 2 ** 30 },
    { name: "length", label: "sequence length", choices: tables.lengths },
    { name: "recompute", label: "recompute", choices: tables.recomputes },
    {
      name: "context",
      label: "context kind",
      choices: Object.keys(tables.context_kinds),
      idle: (state) => (state["cp"] === 1 ? "cp = 1" : ""),
      plain: "ring",
    },
    {
      name: "sequence_parallel",
      label: "sequence parallel",
      choices: [false, true],
      idle: (state) => (state["tp"] === 1 ? "tp = 1" : ""),
      plain: false,
    },
  ];
}

// A value of a control from its text, or why it is none.
export function valueOf(control: Control, text: string): { value: Value } | { why: string } {
  if (control.choices) {
    const found = control.choices.find((one) => String(one) === text);
    return found === undefined ? { why: `${control.label} can't be ${text}` } : { value: found };
  }
  const number = Number(text);
  if (!/^\d{1,10}$/.test(text.trim()) || number < 1 || number > control.most!) {
    return { why: `${control.label} is a whole number from 1 to ${control.most!.toLocaleString("en-US")}` };
  }
  return { value: number };
}

export function stateOfHash(hash: string, controls: Control[], start: State): State {
  const found = { ...start };
  const given = new URLSearchParams(hash.replace(/^#/, ""));
  for (const control of controls) {
    const text = given.get(control.name);
    if (text === null) continue;
    const read = valueOf(control, text);
    if ("value" in read) found[control.name] = read.value;
  }
  return found;
}

export function hashOf(state: State): string {
  return `#${new URLSearchParams(Object.entries(state).map(([name, value]) => [name, String(value)]))}`;
}

// The state with what has no effect as it is where nobody says anything.
export function effective(state: State, controls: Control[], tables: Tables): State {
  const found = { ...state };
  for (const control of controls) {
    if (control.plain !== undefined && control.idle?.(state, tables)) found[control.name] = control.plain;
  }
  return found;
}
