// SPDX-License-Identifier: Apache-2.0
import { el } from "../dom";

const TINTS = 12;

// The palette is that of Okabe and Ito, which people with any kind of color vision tell apart.
export function tint(place: number): string {
  return `var(--k${place % TINTS})`;
}

export interface Entry {
  name: string;
  fill: string;
}

export function legend(entries: Entry[]): HTMLElement {
  return el(
    "ul",
    { class: "legend" },
    ...entries.map((entry) =>
      el("li", {}, el("span", { class: "swatch", style: `background:${entry.fill}` }), entry.name),
    ),
  );
}
