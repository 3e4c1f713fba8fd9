// SPDX-License-Identifier: Apache-2.0
// Elements from plain values: text is always text, never HTML.

type Child = Node | string | null | undefined;
type Attributes = Record<string, string | number | boolean | undefined>;

export function el<K extends keyof HTMLElementTagNameMap>(
  tag: K,
  attributes: Attributes = {},
  ...children: Child[]
): HTMLElementTagNameMap[K] {
  const made = document.createElement(tag);
  set(made, attributes);
  for (const child of children) if (child != null) made.append(child);
  return made;
}

const SVG = "http://www.w3.org/2000/svg";

export function svg<K extends keyof SVGElementTagNameMap>(
  tag: K,
  attributes: Attributes = {},
  ...children: Child[]
): SVGElementTagNameMap[K] {
  const made = document.createElementNS(SVG, tag);
  set(made, attributes);
  for (const child of children) if (child != null) made.append(child);
  return made;
}

function set(made: Element, attributes: Attributes): void {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === false) continue;
    made.setAttribute(name, value === true ? "" : String(value));
  }
}

// What is drawn by width, with how it is drawn again; what has left the page is forgotten.
const live = new Map<HTMLElement, { again: (anew: boolean) => void; forget: () => void }>();

function redraw(anew: boolean): void {
  for (const one of live.values()) one.again(anew);
}

// Figures follow what the system says of colors.
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => redraw(true));
addEventListener("beforeprint", () => redraw(false));

// Draw again whenever the width of the host changes; the first time at once.
export function drawn(host: HTMLElement, draw: (width: number) => void): void {
  for (const one of [...live.values()]) one.forget();
  let last = -1;
  let there = false;
  const again = (anew: boolean) => {
    there ||= host.isConnected;
    const width = Math.floor(host.clientWidth);
    if (width > 0 && (anew || width !== last)) {
      last = width;
      draw(width);
    }
  };
  const observer = new ResizeObserver(() => again(false));
  observer.observe(host);
  const forget = () => {
    if (!there || host.isConnected) return;
    observer.disconnect();
    live.delete(host);
  };
  live.set(host, { again, forget });
}

export function color(name: string): string {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}
