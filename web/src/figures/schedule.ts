// SPDX-License-Identifier: Apache-2.0
// What each rank of a pipeline does in a step: planned and measured on one scale of seconds.

import type { ScheduleChart, ScheduleFigure, ScheduleLane } from "../document";
import { color, drawn, el } from "../dom";
import { secondsText } from "../seconds";
import { legend } from "./legend";
import { fitted } from "./mesh";

const FILLS = ["--k0", "--k1", "--k2", "--k3"];
const IDLE = "repeating-linear-gradient(45deg, var(--muted) 0 1.5px, var(--empty) 1.5px 6px)";
const STRIPE = 6; // pixels from one line of what is idle to the next
const LABEL = 64;
const AXIS = 18;
const ZOOM = 1.5;

interface View {
  first: number;
  span: number;
}

interface Chosen {
  chart: number;
  lane: number;
  action: number;
}

export function schedule(host: HTMLElement, found: ScheduleFigure): void {
  const whole = Math.max(...found.charts.map((chart) => chart.span_s), Number.MIN_VALUE);
  let view: View = { first: 0, span: whole };
  let chosen: Chosen | null = null;
  let width = 0;
  const said = el("p", { class: "said", "aria-live": "polite" }, "Choose an action, or move with the arrow keys.");
  const canvases = found.charts.map((chart) =>
    el("canvas", { tabindex: 0, role: "application", "aria-label": `${chart.name} schedule: arrow keys move from action to action, plus and minus zoom` }),
  );
  const show = () => {
    found.charts.forEach((chart, place) => {
      const own = chosen?.chart === place ? chosen : null;
      paint(canvases[place]!, chart, found.unit, view, own, width);
    });
    said.textContent = chosen ? words(found, chosen) : "Choose an action, or move with the arrow keys.";
  };
  const zoom = (factor: number, center: number) => {
    const span = Math.min(whole, Math.max(view.span * factor, whole / 5000));
    const share = (center - view.first) / view.span;
    view = { span, first: Math.max(0, Math.min(whole - span, center - share * span)) };
    show();
  };
  const pan = (share: number) => {
    view = { ...view, first: Math.max(0, Math.min(whole - view.span, view.first + share * view.span)) };
    show();
  };
  const button = (text: string, label: string, act: () => void) => {
    const made = el("button", { type: "button", "aria-label": label }, text);
    made.addEventListener("click", act);
    return made;
  };
  const middle = () => view.first + view.span / 2;
  host.append(
    legend([
      ...found.kinds.flatMap((name, place) => (uses(found, place) ? [{ name, fill: `var(${FILLS[place]})` }] : [])),
      ...(found.charts.some((chart) => chart.reached !== null) ? [{ name: "idle", fill: IDLE }] : []),
    ]),
    el(
      "div",
      { class: "controls" },
      button("+", "Zoom in", () => zoom(1 / ZOOM, middle())),
      button("-", "Zoom out", () => zoom(ZOOM, middle())),
      button("<", "Earlier", () => pan(-0.25)),
      button(">", "Later", () => pan(0.25)),
      button("all", "Show the whole step", () => {
        view = { first: 0, span: whole };
        show();
      }),
    ),
    ...found.charts.flatMap((chart, place) => [
      el("p", { class: "chart-title" }, el("strong", {}, chart.name), `: ${chart.span_text}; ${chart.bubble_text}`),
      canvases[place]!,
    ]),
    said,
  );
  canvases.forEach((canvas, place) => {
    const chart = found.charts[place]!;
    canvas.addEventListener("click", (event) => {
      chosen = actionAt(chart, place, view, width, event.offsetX, event.offsetY);
      show();
    });
    canvas.addEventListener(
      "wheel",
      (event) => {
        if (!event.ctrlKey && !event.metaKey) return;
        event.preventDefault();
        const at = view.first + ((event.offsetX - LABEL) / (width - LABEL)) * view.span;
        zoom(event.deltaY < 0 ? 1 / ZOOM : ZOOM, at);
      },
      { passive: false },
    );
    canvas.addEventListener("keydown", (event) => {
      const next = moved(chart, place, chosen?.chart === place ? chosen : null, event.key);
      if (event.key === "+" || event.key === "=") zoom(1 / ZOOM, middle());
      else if (event.key === "-") zoom(ZOOM, middle());
      else if (next) {
        chosen = next;
        const lane = chart.lanes[next.lane]!;
        const [start, end] = [lane.starts[next.action]!, lane.ends[next.action]!];
        if (start < view.first || end > view.first + view.span) {
          view = { ...view, first: Math.max(0, Math.min(whole - view.span, start - view.span / 2)) };
        }
        show();
      } else return;
      event.preventDefault();
    });
  });
  drawn(host, (wide) => {
    width = wide;
    show();
  });
}

function uses(found: ScheduleFigure, kind: number): boolean {
  return found.charts.some((chart) => chart.lanes.some((lane) => lane.kinds.includes(kind)));
}

function laneHeight(chart: ScheduleChart): number {
  return chart.lanes.length > 32 ? 10 : chart.lanes.length > 12 ? 16 : 24;
}

function words(found: ScheduleFigure, at: Chosen): string {
  const chart = found.charts[at.chart]!;
  const lane = chart.lanes[at.lane]!;
  const [start, end] = [lane.starts[at.action]!, lane.ends[at.action]!];
  return (
    `${chart.name}, ${lane.label}: ${found.kinds[lane.kinds[at.action]!]} of microbatch ` +
    `${lane.microbatches[at.action]} on stage ${lane.stages[at.action]}, from ` +
    `${timeText(found.unit, start, chart.span_s)} for ${timeText(found.unit, end - start)}. Idle: ${lane.idle_text}.`
  );
}

function timeText(unit: ScheduleFigure["unit"], time: number, span = time): string {
  if (unit === "s") return secondsText(time, span);
  const count = Number(time.toFixed(2));
  return `${count} ${count === 1 ? "slot" : "slots"}`;
}

function moved(chart: ScheduleChart, place: number, at: Chosen | null, key: string): Chosen | null {
  if (!["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown", "Home", "End"].includes(key)) return null;
  const first = chart.lanes.findIndex((lane) => lane.kinds.length > 0);
  if (first < 0) return null;
  if (!at) return { chart: place, lane: first, action: 0 };
  const lane = chart.lanes[at.lane]!;
  const action = (to: number) => ({ ...at, action: Math.max(0, Math.min(lane.kinds.length - 1, to)) });
  if (key === "ArrowLeft") return action(at.action - 1);
  if (key === "ArrowRight") return action(at.action + 1);
  if (key === "Home") return action(0);
  if (key === "End") return action(lane.kinds.length - 1);
  const other = at.lane + (key === "ArrowUp" ? -1 : 1);
  const target = chart.lanes[other];
  if (!target || !target.kinds.length) return at;
  return { chart: place, lane: other, action: nearest(target, lane.starts[at.action]!) };
}

// The last action that starts at `seconds` or before, else the first.
function nearest(lane: ScheduleLane, seconds: number): number {
  let [low, high] = [0, lane.starts.length - 1];
  while (low < high) {
    const middle = Math.ceil((low + high) / 2);
    if (lane.starts[middle]! <= seconds) low = middle;
    else high = middle - 1;
  }
  return low;
}

function actionAt(
  chart: ScheduleChart,
  place: number,
  view: View,
  width: number,
  x: number,
  y: number,
): Chosen | null {
  const number = Math.floor(y / laneHeight(chart));
  const lane = chart.lanes[number];
  if (!lane || !lane.starts.length || x < LABEL) return null;
  const seconds = view.first + ((x - LABEL) / (width - LABEL)) * view.span;
  const action = nearest(lane, seconds);
  if (seconds < lane.starts[action]! || seconds > lane.ends[action]!) return null;
  return { chart: place, lane: number, action };
}

function paint(
  canvas: HTMLCanvasElement,
  chart: ScheduleChart,
  unit: ScheduleFigure["unit"],
  view: View,
  chosen: Chosen | null,
  width: number,
): void {
  if (width <= 0) return;
  const high = laneHeight(chart);
  const context = fitted(canvas, width, high * chart.lanes.length + AXIS);
  const scale = (width - LABEL) / view.span;
  const fills = FILLS.map(color);
  const ink = { muted: color("--muted"), on: color("--on-k"), accent: color("--accent"), empty: color("--empty") };
  context.textBaseline = "middle";
  chart.lanes.forEach((lane, number) => {
    const top = number * high;
    context.fillStyle = ink.empty;
    const end = chart.reached === null ? width : LABEL + (chart.reached - view.first) * scale;
    const told = Math.max(0, Math.min(width, end) - LABEL);
    context.fillRect(LABEL, top + 1, told, high - 2);
    if (chart.reached !== null) hatch(context, LABEL, top + 1, told, high - 2, ink.muted);
    for (let action = nearest(lane, view.first); action < lane.kinds.length; action++) {
      const start = lane.starts[action]!;
      if (start > view.first + view.span) break;
      const left = Math.max(LABEL, LABEL + (start - view.first) * scale);
      const right = Math.min(width, LABEL + (lane.ends[action]! - view.first) * scale);
      if (right <= left) continue;
      const wide = Math.max(right - left - 0.5, 0.5);
      context.fillStyle = fills[lane.kinds[action]!] ?? ink.muted;
      context.fillRect(left, top + 1, wide, high - 2);
      if (wide > 22 && high >= 16) {
        context.fillStyle = ink.on;
        context.font = "10px system-ui, sans-serif";
        context.fillText(String(lane.microbatches[action]), left + 3, top + high / 2, wide - 4);
      }
      if (chosen && chosen.lane === number && chosen.action === action) {
        context.strokeStyle = ink.accent;
        context.lineWidth = 2;
        context.strokeRect(left, top + 1, wide, high - 2);
      }
    }
    context.fillStyle = ink.muted;
    context.font = `${high >= 16 ? 11 : 9}px system-ui, sans-serif`;
    if (high >= 16 || number % 4 === 0) context.fillText(lane.label, 0, top + high / 2, LABEL - 6);
  });
  ticks(context, unit, view, width, high * chart.lanes.length, ink.muted);
}

// Lines over what is idle, which what a rank does is painted over.
function hatch(context: CanvasRenderingContext2D, left: number, top: number, wide: number, high: number, ink: string): void {
  context.save();
  context.beginPath();
  context.rect(left, top, wide, high);
  context.clip();
  context.beginPath();
  for (let x = left - high; x < left + wide; x += STRIPE) {
    context.moveTo(x, top + high);
    context.lineTo(x + high, top);
  }
  context.strokeStyle = ink;
  context.lineWidth = 1;
  context.stroke();
  context.restore();
}

function ticks(
  context: CanvasRenderingContext2D,
  unit: ScheduleFigure["unit"],
  view: View,
  width: number,
  top: number,
  ink: string,
): void {
  const many = width > 700 ? 6 : 3;
  context.fillStyle = ink;
  context.font = "10px system-ui, sans-serif";
  if (unit === "slots") {
    slots(context, view, width, top);
    return;
  }
  for (let tick = 0; tick <= many; tick++) {
    const x = LABEL + ((width - LABEL) * tick) / many;
    context.textAlign = tick === many ? "right" : tick === 0 ? "left" : "center";
    context.fillText(secondsText(view.first + (view.span * tick) / many, view.first + view.span), x, top + 10);
  }
  context.textAlign = "left";
}

// Whole slots only, as many as there is room for.
function slots(context: CanvasRenderingContext2D, view: View, width: number, top: number): void {
  const scale = (width - LABEL) / view.span;
  const step = Math.max(1, Math.ceil(28 / scale));
  const last = Math.floor(view.first + view.span);
  context.textAlign = "center";
  for (let slot = Math.ceil(view.first / step) * step; slot <= last; slot += step) {
    const x = LABEL + (slot - view.first) * scale;
    context.textAlign = x > width - 12 ? "right" : "center";
    context.fillText(String(slot), x, top + 10);
  }
  context.textAlign = "left";
}
