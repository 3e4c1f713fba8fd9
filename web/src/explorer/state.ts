// SPDX-License-Identifier: Apache-2.0
// What the controls say: all of it is in the address, so that a link holds the whole state.

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
  context_kinds: Record<string, { exchange: string }>;
  recomputes: string[];
  operators: string[];
  precisions: string[];
  optimizers: string[];
  context_degrees: number[];
  lengths: number[];
}

export interface ExplorerDocument {
  schema: number;
  kind: "explorer";
  title: string;
  start: State;
  tables: Tables;
  made_by: string;
}

export interface Control {
  name: string;
  label: string;
  group: string;
  // What can be chosen; none: a whole number from `least` to `most`.
  choices?: Value[];
  least?: number;
  most?: number;
  // Why the control has no effect; "" where it has one.
  idle?: (state: State, tables: Tables) => string;
  // What it is then.
  plain?: Value;
  // Whether it decides what is computed, not who computes it.
  mathematics?: boolean;
}

const MOST = 1_048_576;

export const boundsOf = (control: Control): [number, number] => [control.least ?? 1, control.most ?? MOST];

// A value of a control from its text, or why it is none.
export function valueOf(control: Control, text: string): { value: Value } | { why: string } {
  if (control.choices) {
    const found = control.choices.find((one) => String(one) === text);
    return found === undefined ? { why: `${control.label} can't be ${text}` } : { value: found };
  }
  const number = Number(text);
  const [least, most] = boundsOf(control);
  if (!/^\d{1,10}$/.test(text.trim()) || number < least || number > most) {
    return { why: `${control.label} is a whole number from ${least} to ${most.toLocaleString("en-US")}` };
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
