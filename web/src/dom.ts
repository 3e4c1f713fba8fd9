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

// Draw again whenever the width of the host changes; the first time at once.
export function drawn(host: HTMLElement, draw: (width: number) => void): void {
  let last = -1;
  const again = () => {
    const width = Math.floor(host.clientWidth);
    if (width > 0 && width !== last) {
      last = width;
      draw(width);
    }
  };
  new ResizeObserver(again).observe(host);
  // Figures follow what the system says of colors.
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    last = -1;
    again();
  });
  addEventListener("beforeprint", again);
}

export function color(name: string): string {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}
