// SPDX-License-Identifier: Apache-2.0
// What is computed, as the records that the figures of a report draw.

import { bytesText } from "../bytes";
import type { BarsFigure, DataTable, MeshFigure, WaterfallFigure } from "../document";
import { mesh_axes, tone_of } from "../compiled/formulas.js";
import type { Controls, Prediction, Table } from "../compiled/formulas.js";
import type { ClusterRecord } from "./state";

const TONES = { compute: "compute", communication: "exposed communication", idle: "idle" };
// Of the step: smaller terms are one bar.
const LEAST = 0.005;

export const secondsText = (seconds: number) => `${Number(seconds.toPrecision(4))} s`;
// Formats of a locale take longer than all formulas of a plan.
export const countText = (count: number) => String(count).replace(/\B(?=(\d{3})+$)/g, ",");
export const shareText = (part: number) => `${(100 * part).toFixed(1)} %`;

export function memoryFigure(found: Prediction, cluster: ClusterRecord): BarsFigure {
  const kinds = [...found.bytes].filter(([, held]) => held > 0);
  const total = found.bytes_held;
  return {
    kind: "bars",
    kinds: kinds.map(([name]) => name),
    limit: cluster.memory_bytes,
    limit_text: bytesText(cluster.memory_bytes),
    rows: [
      {
        label: "fullest rank",
        values: kinds.map(([, held]) => held),
        texts: kinds.map(([, held]) => bytesText(held)),
        total,
        total_text: bytesText(total),
        share_text: cluster.memory_bytes > 0 ? shareText(total / cluster.memory_bytes) : "",
        over: total > cluster.memory_bytes,
      },
    ],
  };
}

export function stepFigure(found: Prediction): WaterfallFigure {
  const total = found.step_s;
  const terms = [...found.seconds].filter(([, seconds]) => seconds > 0);
  const large = terms.filter(([, seconds]) => seconds >= LEAST * total);
  const small = terms.filter(([, seconds]) => seconds < LEAST * total);
  const rows = large.map(([label, seconds]) => ({ label, parts: [{ tone: tone_of(label), seconds }] }));
  if (small.length) {
    rows.push({ label: "other", parts: small.map(([name, seconds]) => ({ tone: tone_of(name), seconds })) });
  }
  let start = 0;
  return {
    kind: "waterfall",
    rows: rows.map((row) => {
      const seconds = row.parts.reduce((sum, part) => sum + part.seconds, 0);
      start += seconds;
      return { ...row, start: start - seconds, text: secondsText(seconds), share_text: shareText(seconds / total) };
    }),
    tones: (["compute", "communication", "idle"] as const).flatMap((tone) => {
      const own = terms.filter(([name]) => tone_of(name) === tone).reduce((sum, [, seconds]) => sum + seconds, 0);
      return own > 0
        ? [{ tone, name: TONES[tone], text: secondsText(own), share_text: shareText(own / total) }]
        : [];
    }),
    others: small.map(([name]) => name),
    total,
    total_text: secondsText(total),
    low: total,
    high: total,
    band_text: secondsText(total),
  };
}

export function meshFigure(controls: Controls, cluster: ClusterRecord, table: Table): MeshFigure {
  return {
    kind: "mesh",
    cluster: cluster.name,
    device: cluster.device,
    ranks: controls.workers,
    devices_per_node: cluster.devices_per_node,
    axes: mesh_axes(controls, table),
    words:
      controls.ranks > controls.workers
        ? [`Ranks from ${controls.workers} to ${controls.ranks - 1} are parameter servers, no part of the mesh.`]
        : [],
  };
}

export function termsTable(
  head: string,
  terms: Map<string, number>,
  total: number,
  text: (value: number) => string,
): DataTable {
  const rows = [...terms].map(([name, value]) => [name, text(value), shareText(value / total)]);
  return { head: ["term", head, "share"], rows: [...rows, ["total", text(total), "100.0 %"]], right: [1, 2] };
}
