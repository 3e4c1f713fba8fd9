// SPDX-License-Identifier: Apache-2.0
// A schedule that is being built: tiles in lists, one for each rank and one for what is set aside.
// Nothing is ever changed in place, so that what was before can come back.

import { schedule_of_words } from "../compiled/formulas.js";
import type { Kind, Schedule } from "../compiled/formulas.js";

// An action; two that say the same are two tiles.
export interface Tile {
  readonly kind: Kind;
  readonly stage: number;
  readonly microbatch: number;
}

export interface Built {
  readonly name: string;
  readonly microbatches: number;
  readonly stageRanks: readonly number[];
  readonly mirrored: readonly number[];
  // The list of each rank, then what is set aside.
  readonly lists: readonly (readonly Tile[])[];
}

export interface Place {
  readonly list: number;
  readonly place: number;
}

const CHANGED = "built-from-";

export const word = (tile: Tile) => `${tile.kind}${tile.stage}.${tile.microbatch}`;
export const numRanks = (built: Built) => built.lists.length - 1;
export const tileAt = (built: Built, at: Place): Tile | undefined => built.lists[at.list]?.[at.place];

export function builtFrom(schedule: Schedule, empty: boolean): Built {
  const rows = schedule.actions.map((row) => row.map(({ kind, stage, microbatch }) => ({ kind, stage, microbatch })));
  const order = (one: Tile) => [one.stage, one.microbatch, one.kind === "F" ? 0 : one.kind === "W" ? 2 : 1];
  const all = rows.flat().sort((a, b) => compared(order(a), order(b)));
  return {
    name: empty ? CHANGED + schedule.name : schedule.name,
    microbatches: schedule.num_microbatches,
    stageRanks: schedule.stage_ranks,
    mirrored: schedule.mirrored,
    lists: empty ? [...rows.map(() => []), all] : [...rows, []],
  };
}

function compared(left: number[], right: number[]): number {
  const place = left.findIndex((one, at) => one !== right[at]);
  return place < 0 ? 0 : left[place]! - right[place]!;
}

// What the engine reads: the lists of the ranks.
export function scheduleOf(built: Built): Schedule {
  const rows = built.lists.slice(0, -1).map((row) => row.map((one): [Kind, number, number] => [one.kind, one.stage, one.microbatch]));
  return schedule_of_words(built.name, built.microbatches, built.stageRanks, built.mirrored, rows);
}

function changed(built: Built, lists: (readonly Tile[])[]): Built {
  return { ...built, name: built.name.startsWith(CHANGED) ? built.name : CHANGED + built.name, lists };
}

// Where a tile can be put, counted without the tile itself.
export function within(built: Built, from: Place, to: Place): Place {
  const list = Math.max(0, Math.min(built.lists.length - 1, to.list));
  const most = built.lists[list]!.length - (list === from.list ? 1 : 0);
  return { list, place: Math.max(0, Math.min(most, to.place)) };
}

export function moved(built: Built, from: Place, to: Place): Built {
  const tile = tileAt(built, from);
  if (!tile || (from.list === to.list && from.place === to.place)) return built;
  const lists = built.lists.map((list) => [...list]);
  lists[from.list]!.splice(from.place, 1);
  lists[to.list]!.splice(to.place, 0, tile);
  return changed(built, lists);
}

// B and W in the place of BW, or BW in that of B (and W gone, wherever it is).
export function splitOrFused(built: Built, at: Place): Built {
  const tile = tileAt(built, at);
  if (!tile || tile.kind === "F") return built;
  const same = (one: Tile) => one.stage === tile.stage && one.microbatch === tile.microbatch;
  if (tile.kind === "BW") {
    const halves: Tile[] = [{ ...tile, kind: "B" }, { ...tile, kind: "W" }];
    return changed(built, built.lists.map((list) => list.flatMap((one) => (one === tile ? halves : [one]))));
  }
  const all = built.lists.flat();
  const keeps = tile.kind === "B" ? tile : all.find((one) => one.kind === "B" && same(one));
  const goes = tile.kind === "W" ? tile : all.find((one) => one.kind === "W" && same(one));
  if (!keeps || !goes) return built;
  const whole: Tile = { ...tile, kind: "BW" };
  return changed(
    built,
    built.lists.map((list) => list.filter((one) => one !== goes).map((one) => (one === keeps ? whole : one))),
  );
}

export function placeOf(built: Built, tile: Tile): Place | null {
  for (const [list, row] of built.lists.entries()) {
    const place = row.indexOf(tile);
    if (place >= 0) return { list, place };
  }
  return null;
}

export function sameTiles(left: Built, right: Built): boolean {
  return (
    left.stageRanks === right.stageRanks &&
    left.lists.length === right.lists.length &&
    left.lists.every((list, at) => list.length === right.lists[at]!.length && list.every((one, place) => one === right.lists[at]![place]))
  );
}
