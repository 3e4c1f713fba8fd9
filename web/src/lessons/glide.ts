// SPDX-License-Identifier: Apache-2.0
// A tile that is in two frames glides from where it was, a copy from what it is a copy of; nothing
// moves where the system says so.

const GLIDE_MS = 600;

export function tilesOf(host: HTMLElement): Map<string, DOMRect> {
  return new Map([...host.querySelectorAll<HTMLElement>("[data-tile]")].map((one) => [one.dataset.tile!, one.getBoundingClientRect()]));
}

export function glide(host: HTMLElement, before: Map<string, DOMRect>): void {
  if (!before.size || matchMedia("(prefers-reduced-motion: reduce)").matches) return;
  for (const one of host.querySelectorAll<HTMLElement>("[data-tile]")) {
    const was = before.get(one.dataset.origin ?? "") ?? before.get(one.dataset.tile!);
    if (!was) continue;
    const now = one.getBoundingClientRect();
    const [x, y] = [was.left - now.left, was.top - now.top];
    if (x || y) one.animate([{ transform: `translate(${x}px, ${y}px)` }, { transform: "none" }], { duration: GLIDE_MS, easing: "ease-in-out" });
  }
}
