// SPDX-License-Identifier: Apache-2.0
// What is built, in the address: a link holds all of it. What somebody else wrote there is read strictly.

import type { Kind } from "../compiled/formulas.js";
import type { Built, Tile } from "./built";
import { word } from "./built";

export const MOST_RANKS = 8;
export const MOST_VIRTUAL = 4;
export const MOST_MICROBATCHES = 16;
const MOST_ACTIONS = MOST_RANKS * MOST_VIRTUAL * MOST_MICROBATCHES * 3;
const NAME = "built";

// Seconds of F, B, W and a message, and the most that a rank may hold; null: there is no limit.
export interface Times {
  readonly lengths: readonly [number, number, number, number];
  readonly limit: number | null;
}

export const PLAIN: Times = { lengths: [1, 1, 1, 0], limit: null };

// Seconds as somebody types them, or null.
export function secondsOf(text: string, least: number): number | null {
  const found = /^\d{1,6}(\.\d{1,6})?$/.test(text.trim()) ? Number(text) : NaN;
  return found >= least ? found : null;
}

export function textOf(built: Built, times: Times): string {
  return [
    built.name,
    built.microbatches,
    built.stageRanks.join("."),
    built.mirrored.join("."),
    times.lengths.join("-"),
    times.limit ?? "",
    ...built.lists.map((list) => list.map(word).join("-")),
  ].join("_");
}

// What a link says, or null where it says nothing that can be shown.
export function builtOf(text: string): { built: Built; times: Times } | null {
  const [name, microbatches, owners, mirrored, lengths, limit, ...rows] = text.split("_");
  const lists = rows.map(tilesOf);
  const stageRanks = wholesOf(owners ?? "");
  const mirrors = wholesOf(mirrored ?? "");
  const count = wholesOf(microbatches ?? "");
  const times = timesOf(lengths ?? "", limit ?? "");
  if (!/^[a-z0-9-]{1,60}$/.test(name ?? "") || !stageRanks || !mirrors || count?.length !== 1 || !times) return null;
  const tiles = lists.flatMap((list) => list ?? []);
  const ranks = lists.length - 1;
  const right =
    lists.every((list) => list !== null) &&
    ranks >= 1 &&
    ranks <= MOST_RANKS &&
    count[0]! >= 1 &&
    count[0]! <= MOST_MICROBATCHES &&
    stageRanks.length >= 1 &&
    stageRanks.length <= MOST_RANKS * MOST_VIRTUAL &&
    mirrors.length <= MOST_MICROBATCHES &&
    tiles.length <= MOST_ACTIONS;
  if (!right) return null;
  return { built: { name: name!, microbatches: count[0]!, stageRanks, mirrored: mirrors, lists: lists as Tile[][] }, times };
}

function wholesOf(text: string): number[] | null {
  if (text === "") return [];
  return /^\d{1,3}(\.\d{1,3})*$/.test(text) ? text.split(".").map(Number) : null;
}

function tilesOf(text: string): Tile[] | null {
  if (text === "") return [];
  const found = text.split("-").map((one) => /^(F|BW|B|W)(\d{1,3})\.(\d{1,3})$/.exec(one));
  if (found.some((one) => one === null)) return null;
  return found.map((one) => ({ kind: one![1] as Kind, stage: Number(one![2]), microbatch: Number(one![3]) }));
}

function timesOf(lengths: string, limit: string): Times | null {
  const [forward, input, weight, transfer, ...more] = lengths.split("-").map((one) => secondsOf(one, 0));
  if (more.length || forward == null || input == null || weight == null || transfer == null) return null;
  if (!/^\d{0,4}$/.test(limit)) return null;
  return { lengths: [forward, input, weight, transfer], limit: limit === "" ? null : Number(limit) };
}

export function textOfHash(hash: string): string | null {
  return new URLSearchParams(hash.replace(/^#/, "")).get(NAME);
}

// The address of other parts of the page with what is built as it stands now.
export function withBuilt(hash: string, text = textOfHash(location.hash)): string {
  if (text === null) return hash;
  const found = new URLSearchParams(hash.replace(/^#/, ""));
  found.set(NAME, text);
  return `#${found}`;
}
