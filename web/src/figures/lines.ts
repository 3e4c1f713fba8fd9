// SPDX-License-Identifier: Apache-2.0
// Values over the steps of a run, one line for each series, and what was planned as a level.

import { extent } from "d3-array";
import { scaleLinear } from "d3-scale";
import type { LineSeries, LinesFigure } from "../document";
import { bytesTicks } from "../bytes";
import { drawn, el, svg } from "../dom";
import { legend, tint } from "./legend";

const HEIGHT = 220;
const MARGIN = { left: 56, right: 12, top: 10, bottom: 24 };

export function lines(host: HTMLElement, found: LinesFigure): void {
  const entries = found.series.map((one, place) => ({ name: one.name, fill: tint(place) }));
  if (found.planned !== null) entries.push({ name: `planned: ${found.planned_text}`, fill: "var(--accent)" });
  const picture = el("div", { class: "picture" });
  host.append(legend(entries), picture);
  drawn(host, (width) => picture.replaceChildren(draw(found, width)));
}

function draw(found: LinesFigure, width: number): SVGElement {
  const values = found.series.flatMap((one) => one.values.filter((value) => value !== null));
  if (found.planned !== null) values.push(found.planned);
  const [low, high] = extent(values);
  const x = scaleLinear([found.steps[0] ?? 0, found.steps[found.steps.length - 1] ?? 1], [MARGIN.left, width - MARGIN.right]);
  const y = scaleLinear([low ?? 0, high ?? 1], [HEIGHT - MARGIN.bottom, MARGIN.top]).nice();
  const root = svg("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, width, height: HEIGHT, role: "img", "aria-label": `${found.unit} by step` });
  const bytes = found.unit === "bytes" ? bytesTicks(y.domain() as [number, number]) : null;
  const format = bytes?.format ?? y.tickFormat(5);
  for (const tick of bytes?.ticks ?? y.ticks(5)) {
    root.append(
      svg("line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: y(tick), y2: y(tick) }),
      svg("text", { class: "tick", x: MARGIN.left - 6, y: y(tick) + 4, "text-anchor": "end" }, format(tick)),
    );
  }
  for (const tick of x.ticks(width > 600 ? 8 : 4).filter(Number.isInteger)) {
    root.append(svg("text", { class: "tick", x: x(tick), y: HEIGHT - 6, "text-anchor": "middle" }, `${tick}`));
  }
  root.append(svg("text", { class: "tick", x: MARGIN.left, y: MARGIN.top + 2 }, bytes?.unit ?? found.unit));
  found.series.forEach((one, place) => {
    root.append(svg("path", { class: "series", d: path(found.steps, one, x, y), stroke: tint(place) }));
  });
  if (found.planned !== null) {
    const level = y(found.planned);
    root.append(svg("line", { class: "planned", x1: MARGIN.left, x2: width - MARGIN.right, y1: level, y2: level }));
  }
  return root;
}

// A step without a value breaks a line that is not joined; one that stands alone is a dot.
function path(
  steps: number[],
  series: LineSeries,
  x: (value: number) => number,
  y: (value: number) => number,
): string {
  const points = series.values
    .map((value, place): [number, number | null] => [steps[place]!, value])
    .filter(([, value]) => value !== null || !series.joined);
  let text = "";
  let open = false;
  points.forEach(([step, value], place) => {
    if (value === null) {
      open = false;
      return;
    }
    text += `${open ? "L" : "M"}${x(step).toFixed(1)} ${y(value).toFixed(1)}`;
    if (!open && (points[place + 1]?.[1] ?? null) === null) text += "h0.01";
    open = true;
  });
  return text;
}
