// SPDX-License-Identifier: Apache-2.0
// The types of what is compiled: only what the explorer calls.
import type { MeshAxis } from "../document";

export type Table = Map<string, unknown>;

export interface Controls {
  readonly ranks: number;
  readonly workers: number;
}

export interface Prediction {
  readonly seconds: Map<string, number>;
  readonly bytes: Map<string, number>;
  readonly step_s: number;
  readonly bytes_held: number;
  readonly tokens_per_s_per_device: number;
  readonly mfu: number;
}

export interface Broken {
  readonly rule: string;
  readonly message: string;
}

export interface GuideWay {
  readonly id: string;
  readonly source: string;
  readonly title: string;
  readonly steps: readonly { readonly question: string; readonly yes: boolean; readonly why: string }[];
  readonly strategy: string;
  readonly says: string;
  readonly differs: readonly string[];
  readonly note: string;
}

export function controls_of_record(record: Table): Controls;
export function predict(tables: Table, controls: Controls, model: Table, cluster: Table): Prediction;
export function broken_rules(controls: Controls, model: Table, cluster: Table): Broken[];
export function run_text(controls: Controls, model: Table, cluster: Table): string;
export function mesh_axes(controls: Controls, cluster: Table): MeshAxis[];

// Schedules that are built in the page.

export type Kind = "F" | "B" | "W" | "BW";

export interface Action {
  readonly kind: Kind;
  readonly stage: number;
  readonly microbatch: number;
}

export interface Problem {
  readonly rule: string;
  readonly message: string;
  readonly suggestions: readonly string[];
}

export interface Schedule {
  readonly name: string;
  readonly num_ranks: number;
  readonly num_microbatches: number;
  readonly stage_ranks: number[];
  readonly mirrored: number[];
  readonly actions: Action[][];
}

export interface BlockedRank {
  readonly rank: number;
  readonly action: Action;
  readonly awaited_action: Action;
  readonly awaited_rank: number;
}

export interface Simulation {
  readonly events: { kind: string; stage: number; microbatch: number; start: number; end: number; rank: number }[];
  readonly makespan_s: number;
  readonly busy_s: number[];
  readonly idle_s: number[];
  readonly bubble_fraction: number;
  readonly bubble_overhead: number;
}

export interface ScheduleVerdict {
  readonly problems: Problem[];
  readonly circle: BlockedRank[];
  readonly drawing: string;
  readonly in_flight: number[];
  readonly simulation: Simulation | null;
}

export interface ActionLengths {
  readonly forward_s: number;
}

export function tone_of(term: string): "compute" | "communication" | "idle";
export function schedule_names(): string[];
export function schedule_default_stages(name: string): number;
export function schedule_start(
  name: string,
  ranks: number,
  virtual: number,
  microbatches: number,
): { problems: Problem[]; schedule: Schedule | null };
export function schedule_of_words(
  name: string,
  microbatches: number,
  stageRanks: readonly number[],
  mirrored: readonly number[],
  rows: [Kind, number, number][][],
): Schedule;
export function lengths_of(forward: number, input: number, weight: number, transfer: number): ActionLengths;
export function schedule_verdict(schedule: Schedule, lengths: ActionLengths, limit: number | null): ScheduleVerdict;
export function schedule_text(schedule: Schedule): string;
export function guide_ways(tables: Table, controls: Controls, model: Table, cluster: Table): GuideWay[];
