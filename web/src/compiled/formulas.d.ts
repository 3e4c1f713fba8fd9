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
export function broken_rules(tables: Table, controls: Controls, model: Table, cluster: Table): Broken[];
export function run_text(controls: Controls, model: Table, cluster: Table): string;
export function mesh_axes(controls: Controls, cluster: Table): MeshAxis[];
export function guide_ways(tables: Table, controls: Controls, model: Table, cluster: Table): GuideWay[];
