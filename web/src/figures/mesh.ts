// SPDX-License-Identifier: Apache-2.0
// Ranks on the devices of nodes; a rank that is chosen shows its group on each axis.

import type { MeshAxis, MeshFigure } from "../document";
import { color, drawn, el } from "../dom";
import { legend } from "./legend";

const MOST_NAMED = 48;

// All ranks that differ from `rank` in the digits of one axis alone, in rising order.
export function group(axis: MeshAxis, rank: number): number[] {
  let found = [rank];
  for (const digit of axis.digits) {
    found = found.flatMap((one) => {
      const here = Math.floor(one / digit.stride) % digit.degree;
      const first = one - here * digit.stride;
      return Array.from({ length: digit.degree }, (_, place) => first + place * digit.stride);
    });
  }
  return found.sort((one, other) => one - other);
}

function coordinate(axis: MeshAxis, rank: number): number {
  return axis.digits.reduce(
    (sum, digit) => sum * digit.degree + (Math.floor(rank / digit.stride) % digit.degree),
    0,
  );
}

// Ranks in words: runs of neighbours are joined, and a long list is cut.
export function ranksText(ranks: number[]): string {
  const runs: [number, number][] = [];
  for (const rank of ranks) {
    const last = runs[runs.length - 1];
    if (last && rank === last[1] + 1) last[1] = rank;
    else runs.push([rank, rank]);
  }
  const said = runs.map(([first, last]) => (first === last ? `${first}` : `${first}-${last}`));
  return said.length > MOST_NAMED
    ? `${said.slice(0, MOST_NAMED).join(", ")} and ${said.length - MOST_NAMED} more`
    : said.join(", ");
}

interface Layout {
  cell: number;
  nodeColumns: number;
  deviceColumns: number;
  deviceRows: number;
  nodeWidth: number;
  nodeHeight: number;
  height: number;
}

function layout(found: MeshFigure, width: number): Layout {
  const nodes = Math.ceil(found.ranks / found.devices_per_node);
  const inNode = Math.min(found.devices_per_node, found.ranks);
  const deviceColumns = Math.ceil(Math.sqrt(inNode * 2)) || 1;
  const deviceRows = Math.ceil(inNode / deviceColumns);
  const title = (cell: number) => (cell >= 22 ? 16 : 0);
  for (const cell of [56, 44, 34, 26, 22, 16, 12, 9, 7, 5, 4, 3]) {
    const gap = cell >= 12 ? 12 : cell >= 7 ? 6 : 3;
    const nodeWidth = deviceColumns * cell + gap;
    const nodeHeight = deviceRows * cell + gap + title(cell);
    const nodeColumns = Math.max(1, Math.min(nodes, Math.floor(width / nodeWidth)));
    const height = Math.ceil(nodes / nodeColumns) * nodeHeight;
    const smallest = cell === 3;
    if ((nodeWidth <= width && height <= 560) || smallest) {
      return { cell, nodeColumns, deviceColumns, deviceRows, nodeWidth, nodeHeight, height };
    }
  }
  throw new Error("the smallest cell always fits");
}

export function mesh(host: HTMLElement, found: MeshFigure): void {
  let chosen = 0;
  let axis = found.axes.length - 1;
  const canvas = el("canvas", { role: "img", "aria-label": "Ranks on nodes" });
  const input = el("input", { type: "number", min: 0, max: found.ranks - 1, value: 0, name: "rank" });
  const select = el(
    "select",
    { name: "axis" },
    ...found.axes.map((one, place) =>
      el("option", { value: place, selected: place === axis }, `${one.name} = ${one.degree}`),
    ),
  );
  const groups = el("ul", { class: "groups", "aria-live": "polite" });
  let last = 0;
  const show = () => {
    paint(canvas, found, last, chosen, axis);
    groups.replaceChildren(
      ...found.axes.map((one, place) =>
        el(
          "li",
          { class: place === axis ? "chosen" : undefined },
          el("strong", {}, `${one.name} ${coordinate(one, chosen)} of ${one.degree}`),
          ` (${one.link}; ${one.where}): ranks ${ranksText(group(one, chosen))}`,
        ),
      ),
    );
  };
  const choose = (rank: number) => {
    if (!Number.isInteger(rank) || rank < 0 || rank >= found.ranks) return;
    chosen = rank;
    input.value = String(rank);
    show();
  };
  input.addEventListener("input", () => choose(input.valueAsNumber));
  select.addEventListener("change", () => {
    axis = Number(select.value);
    show();
  });
  canvas.addEventListener("click", (event) => {
    const rank = rankAt(found, last, event.offsetX, event.offsetY);
    if (rank !== null) choose(rank);
  });
  host.append(
    el(
      "div",
      { class: "controls" },
      el("label", {}, "rank ", input),
      found.axes.length ? el("label", {}, "group of ", select) : null,
    ),
    legend([
      { name: "the rank", fill: "var(--accent)" },
      { name: "its group", fill: "var(--communication)" },
      { name: "other ranks, darker from stage to stage", fill: "var(--idle)" },
    ]),
    canvas,
    groups,
    ...found.words.map((words) => el("p", { class: "key" }, words)),
  );
  drawn(host, (width) => {
    last = width;
    show();
  });
}

function place(found: MeshFigure, at: Layout, rank: number): [number, number] {
  const node = Math.floor(rank / found.devices_per_node);
  const device = rank % found.devices_per_node;
  const x = (node % at.nodeColumns) * at.nodeWidth + (device % at.deviceColumns) * at.cell;
  const top = at.cell >= 22 ? 16 : 0;
  const y =
    Math.floor(node / at.nodeColumns) * at.nodeHeight +
    top +
    Math.floor(device / at.deviceColumns) * at.cell;
  return [x, y];
}

function rankAt(found: MeshFigure, width: number, x: number, y: number): number | null {
  const at = layout(found, width);
  const top = at.cell >= 22 ? 16 : 0;
  const node = Math.floor(y / at.nodeHeight) * at.nodeColumns + Math.floor(x / at.nodeWidth);
  const column = Math.floor((x % at.nodeWidth) / at.cell);
  const row = Math.floor(((y % at.nodeHeight) - top) / at.cell);
  if (column >= at.deviceColumns || row < 0 || row >= at.deviceRows) return null;
  const device = row * at.deviceColumns + column;
  const rank = node * found.devices_per_node + device;
  return device < found.devices_per_node && rank < found.ranks ? rank : null;
}

function paint(
  canvas: HTMLCanvasElement,
  found: MeshFigure,
  width: number,
  chosen: number,
  axis: number,
): void {
  if (width <= 0) return;
  const at = layout(found, width);
  const context = fitted(canvas, width, at.height);
  const members = new Set(found.axes[axis] ? group(found.axes[axis], chosen) : [chosen]);
  const stages = found.axes.find((one) => one.name === "pp");
  const fills = { own: color("--accent"), group: color("--communication"), other: color("--idle") };
  const ink = { text: color("--text"), on: color("--on-accent"), muted: color("--muted") };
  context.textBaseline = "top";
  const size = at.cell - (at.cell >= 9 ? 2 : at.cell >= 5 ? 1 : 0.5);
  const box = (rank: number) => {
    const [x, y] = place(found, at, rank);
    context.fillRect(x, y, size, size);
  };
  // Colors change seldom: to set one takes longer than to draw a rank.
  const run = stages?.digits[0]?.stride ?? found.ranks;
  context.fillStyle = fills.other;
  for (let first = 0; first < found.ranks; first += run) {
    context.globalAlpha = stages ? 0.45 + (0.55 * coordinate(stages, first)) / stages.degree : 1;
    const end = Math.min(first + run, found.ranks);
    for (let rank = first; rank < end; rank++) if (!members.has(rank)) box(rank);
  }
  context.globalAlpha = 1;
  context.fillStyle = fills.group;
  for (const rank of members) if (rank !== chosen) box(rank);
  context.fillStyle = fills.own;
  box(chosen);
  if (at.cell < 22) return;
  for (let rank = 0; rank < found.ranks; rank++) {
    const [x, y] = place(found, at, rank);
    context.fillStyle = members.has(rank) ? ink.on : ink.text;
    context.font = "11px system-ui, sans-serif";
    context.fillText(String(rank), x + 3, y + 3, size - 4);
    if (at.cell >= 44) names(context, found, rank, x + 3, y + 17, size - 4);
    if (rank % found.devices_per_node === 0) {
      context.fillStyle = ink.muted;
      context.font = "11px system-ui, sans-serif";
      context.fillText(`node ${rank / found.devices_per_node}`, x, y - 14);
    }
  }
}

function names(
  context: CanvasRenderingContext2D,
  found: MeshFigure,
  rank: number,
  x: number,
  y: number,
  width: number,
): void {
  context.font = "9px system-ui, sans-serif";
  found.axes.slice(0, 3).forEach((one, line) => {
    context.fillText(`${one.name.replace("dp_", "")} ${coordinate(one, rank)}`, x, y + 11 * line, width);
  });
}

export function fitted(
  canvas: HTMLCanvasElement,
  width: number,
  height: number,
): CanvasRenderingContext2D {
  const scale = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  if (!context) throw new Error("a canvas draws in two dimensions");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}
