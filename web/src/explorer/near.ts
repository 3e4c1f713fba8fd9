// SPDX-License-Identifier: Apache-2.0
// What is near the state of the controls: changes that mend a rule, and plans one change away.

import { boundsOf, valueOf } from "./state";
import type { Control, State, Tables, Value } from "./state";

export type Change = [name: string, value: Value][];

// What is asked of a state: the rules that it breaks, by id.
export type Ask = (state: State) => string[];

const MOST_TRIED = 40;
const MOST_NAMED = 6;
const OF_A_CONTROL = 2;
const OF_A_PAIR = 5;

export const changed = (state: State, change: Change): State => ({ ...state, ...Object.fromEntries(change) });

export const changeText = (change: Change, controls: Control[]) =>
  change
    .map(([name, value]) => `${controls.find((one) => one.name === name)?.label ?? name} = ${value}`)
    .join(" with ");

// Other values of a control, the nearest first.
export function nearValues(control: Control, state: State, devices: number): Value[] {
  const now = state[control.name]!;
  if (control.choices) {
    const place = control.choices.indexOf(now);
    return control.choices
      .map((value, at) => ({ value, far: Math.abs(at - place) }))
      .filter((one) => one.value !== now)
      .sort((one, other) => one.far - other.far)
      .map((one) => one.value);
  }
  const [least, most] = boundsOf(control);
  const value = Number(now);
  const batch = Number(state["sequences"]);
  const share = Number(state["microbatch"]) * Number(state["dp_replicate"]) * Number(state["dp_shard"]);
  const found = new Set<number>();
  for (let step = 1; step <= 8; step++) for (const near of [value - step, value + step]) found.add(near);
  for (let power = 1; power <= most && power <= 16 * Math.max(value, devices); power *= 2) {
    for (const near of [power, value * power, Math.floor(value / power)]) found.add(near);
  }
  for (const whole of [batch, Math.floor(batch / share), devices]) {
    for (let by = 1; by * by <= whole && by <= 4096; by++) {
      if (whole % by === 0) for (const near of [by, whole / by]) found.add(near);
    }
  }
  if (control.name === "sequences") {
    for (let step = -4; step <= 4; step++) found.add((Math.floor(value / share) + step) * share);
  }
  found.delete(value);
  return [...found]
    .filter((one) => one >= least && one <= most)
    .sort((one, other) => Math.abs(one - value) - Math.abs(other - value) || one - other)
    .slice(0, MOST_TRIED);
}

const count = (rules: string[], rule: string) => rules.filter((one) => one === rule).length;

// As `config/rules/violations.py`: it mends what it should, and breaks nothing.
function mends(before: string[], after: string[], rule: string): boolean {
  if (count(after, rule) >= count(before, rule)) return false;
  return after.every((one) => count(after, one) <= count(before, one));
}

// For each broken rule the nearest changes that mend it; yields between tries, so that it can wait.
export function* ways(
  state: State,
  before: string[],
  controls: Control[],
  devices: number,
  ask: Ask,
): Generator<undefined, Map<string, Change[]>> {
  const rules = [...new Set(before)];
  const found = new Map<string, { change: Change; left: number }[]>(rules.map((rule) => [rule, []]));
  const near = new Map<string, Value[]>();
  for (const control of controls) {
    if (control.name === "model") continue;
    const own = new Map(rules.map((rule) => [rule, 0]));
    near.set(control.name, nearValues(control, state, devices));
    for (const value of near.get(control.name)!) {
      if ([...own.values()].every((many) => many >= OF_A_CONTROL)) break;
      const change: Change = [[control.name, value]];
      const after = ask(changed(state, change));
      yield;
      for (const rule of rules) {
        if (own.get(rule)! >= OF_A_CONTROL || !mends(before, after, rule)) continue;
        own.set(rule, own.get(rule)! + 1);
        found.get(rule)!.push({ change, left: after.length });
      }
    }
  }
  for (const rule of rules) {
    if (found.get(rule)!.length === 0) yield* pairs(state, before, controls, near, rule, ask, found.get(rule)!);
  }
  return new Map(
    [...found].map(([rule, rows]) => [
      rule,
      rows
        .sort((one, other) => one.left - other.left)
        .slice(0, MOST_NAMED)
        .map((one) => one.change),
    ]),
  );
}

// Where no single change mends a rule: two of them together.
function* pairs(
  state: State,
  before: string[],
  controls: Control[],
  near: Map<string, Value[]>,
  rule: string,
  ask: Ask,
  found: { change: Change; left: number }[],
): Generator<undefined, void> {
  const free = controls.filter((one) => near.has(one.name) && !one.mathematics);
  const few = (one: Control) => near.get(one.name)!.slice(0, OF_A_PAIR);
  for (const [place, first] of free.entries()) {
    for (const second of free.slice(place + 1)) {
      for (const one of few(first)) {
        for (const other of few(second)) {
          const change: Change = [
            [first.name, one],
            [second.name, other],
          ];
          const after = ask(changed(state, change));
          yield;
          if (!mends(before, after, rule)) continue;
          found.push({ change, left: after.length });
          if (found.length >= OF_A_CONTROL) return;
        }
      }
    }
  }
}

const DEGREES = ["pp", "dp_replicate", "dp_shard", "cp", "tp"];

// Changes of who computes, never of what: one control, or a factor of two from one degree to another.
export function* neighbours(state: State, controls: Control[], tables: Tables): Generator<Change> {
  const can = ([name, value]: [string, Value]) =>
    "value" in valueOf(controls.find((one) => one.name === name)!, String(value));
  for (const control of controls) {
    if (control.mathematics || DEGREES.includes(control.name) || control.name === "servers") continue;
    if (control.idle?.(state, tables)) continue;
    const value = state[control.name]!;
    if (control.choices) {
      for (const other of control.choices) if (other !== value) yield [[control.name, other]];
    } else {
      for (const other of [Number(value) / 2, Number(value) * 2]) {
        if (Number.isInteger(other) && can([control.name, other])) yield [[control.name, other]];
      }
    }
  }
  for (const from of DEGREES) {
    for (const to of DEGREES) {
      const [less, more] = [Number(state[from]) / 2, Number(state[to]) * 2];
      if (from === to || !Number.isInteger(less)) continue;
      const change: Change = [
        [from, less],
        [to, more],
      ];
      if (change.every(can)) yield change;
    }
  }
}

// Run in slices between frames, until it is done or somebody has moved a control; first the numbers
// are painted, and whoever holds a key sees nothing of it.
export function slowly<T>(work: Generator<unknown, T>, stale: () => boolean, done: (found: T) => void): void {
  const SLICE_MS = 8;
  const REST_MS = 50;
  const slice = () => {
    if (stale()) return;
    const end = performance.now() + SLICE_MS;
    while (performance.now() < end) {
      const step = work.next();
      if (step.done) return done(step.value);
    }
    setTimeout(slice);
  };
  requestAnimationFrame(() => setTimeout(slice, REST_MS));
}
