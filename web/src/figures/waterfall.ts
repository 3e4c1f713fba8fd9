// SPDX-License-Identifier: Apache-2.0
// The seconds of a step: each bar starts where the one before it ended.

import type { WaterfallFigure, WaterfallRow } from "../document";
import { el } from "../dom";
import { legend } from "./legend";

const FILLS: Record<string, string> = {
  compute: "var(--compute)",
  communication: "var(--communication)",
  idle: "var(--idle)",
};

export function waterfall(host: HTMLElement, found: WaterfallFigure): void {
  const most = Math.max(found.high, found.total, Number.MIN_VALUE);
  const names = new Map<string, string>(found.tones.map((one) => [one.tone, one.name]));
  const tones = [...new Set(found.rows.flatMap((row) => row.parts.map((part) => part.tone)))];
  const share = (seconds: number) => `${(100 * seconds) / most}%`;
  host.append(
    legend(tones.map((tone) => ({ name: names.get(tone)!, fill: FILLS[tone]! }))),
    el("div", { class: "rows" }, ...found.rows.map((row) => bar(row, names, share)), total(found, share)),
  );
}

function bar(row: WaterfallRow, names: Map<string, string>, share: (seconds: number) => string): Node {
  const parts = row.parts.map((part) =>
    el("span", {
      class: "part",
      style: `width:${share(part.seconds)};background:${FILLS[part.tone]}`,
      title: `${row.label}: ${row.text}, ${names.get(part.tone)}`,
    }),
  );
  return el(
    "div",
    { class: "row" },
    el("span", { class: "label" }, row.label),
    el(
      "span",
      { class: "bar", "aria-hidden": "true" },
      el("span", { class: "gap", style: `width:${share(row.start)}` }),
      ...parts,
    ),
    el("span", { class: "value" }, row.text),
    el("span", { class: "share" }, row.share_text),
  );
}

function total(found: WaterfallFigure, share: (seconds: number) => string): Node {
  return el(
    "div",
    { class: "row total" },
    el("span", { class: "label" }, "step"),
    el(
      "span",
      { class: "bar", "aria-hidden": "true" },
      el("span", {
        class: "band",
        style: `left:${share(found.low)};width:${share(found.high - found.low)}`,
        title: `Four of five measured runs: ${found.band_text}`,
      }),
      el("span", { class: "limit", style: `left:${share(found.total)}` }),
    ),
    el("span", { class: "value" }, found.total_text),
    el("span", { class: "share" }, ""),
  );
}
