// Places with tiles, and arrows between tiles over all of it.

import type { DiagramFigure, Place, Tile } from "../document";
import { drawn, el, svg } from "../dom";
import { legend, tint } from "../figures/legend";

export function diagram(host: HTMLElement, found: DiagramFigure): HTMLElement {
  const used = new Set(found.places.flatMap((one) => one.tiles.map((tile) => tile.kind)));
  const groups = [...new Set(found.places.map((one) => one.group))];
  const board = el("div", { class: "board" });
  for (const group of groups) {
    const cards = found.places.filter((one) => one.group === group).map((one) => card(one, found.kinds));
    board.append(
      group
        ? el("div", { class: "places-of" }, el("p", { class: "group" }, group), el("div", { class: "places" }, ...cards))
        : el("div", { class: "places" }, ...cards),
    );
  }
  const arrows = svg("svg", { class: "arrows", "aria-hidden": "true" });
  board.append(arrows);
  host.append(legend(found.kinds.flatMap((name, kind) => (used.has(kind) ? [{ name, fill: tint(kind) }] : []))), board);
  if (found.moves.length) drawn(host, () => draw(board, arrows, found));
  return host;
}

function card(place: Place, kinds: string[]): HTMLElement {
  return el(
    "div",
    { class: "place" },
    el("p", { class: "place-label" }, place.label),
    el("div", { class: "tiles" }, ...place.tiles.map((one) => tile(one, kinds))),
    place.note ? el("p", { class: "place-note" }, place.note) : null,
  );
}

function tile(one: Tile, kinds: string[]): HTMLElement {
  return el(
    "span",
    {
      class: `tile ${one.state}`,
      "data-tile": one.id,
      title: `${kinds[one.kind]}: ${one.words}`,
      style:
        `grid-row:${one.row + 1}/span ${one.rows};grid-column:${one.column + 1}/span ${one.columns};` +
        `--fill:${tint(one.kind)}`,
    },
    one.label,
    el("span", { class: "unseen" }, ` ${one.words}`),
  );
}

function draw(board: HTMLElement, arrows: SVGElement, found: DiagramFigure): void {
  const frame = board.getBoundingClientRect();
  const tiles = new Map([...board.querySelectorAll<HTMLElement>("[data-tile]")].map((one) => [one.dataset.tile!, one]));
  arrows.setAttribute("viewBox", `0 0 ${frame.width} ${frame.height}`);
  arrows.replaceChildren(
    svg("defs", {}, svg("marker", { id: "head", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto-start-reverse" }, svg("path", { d: "M0 0L8 4L0 8z" }))),
  );
  for (const move of found.moves) {
    const ends = [tiles.get(move.source), tiles.get(move.target)].map((one) => one?.getBoundingClientRect());
    if (!ends[0] || !ends[1]) continue;
    const centers = [centerOf(ends[0]), centerOf(ends[1])] as const;
    const lift = Math.min(60, Math.hypot(centers[1].x - centers[0].x, centers[1].y - centers[0].y) / 4);
    // An arrow leaves and arrives at the edges of its tiles, so that what is written on them is seen.
    const over = { x: (centers[0].x + centers[1].x) / 2, y: (centers[0].y + centers[1].y) / 2 - lift };
    const [from, to] = [edge(ends[0], over), edge(ends[1], over)];
    const [x1, y1, x2, y2] = [from.x - frame.left, from.y - frame.top, to.x - frame.left, to.y - frame.top];
    const line = svg("path", { class: "arrow", d: `M${x1} ${y1}Q${over.x - frame.left} ${over.y - frame.top} ${x2} ${y2}`, "marker-end": "url(#head)" });
    line.append(svg("title", {}, move.words));
    arrows.append(line);
  }
}

interface Point {
  x: number;
  y: number;
}

const centerOf = (one: DOMRect): Point => ({ x: one.left + one.width / 2, y: one.top + one.height / 2 });

// Where the line from the center of a rectangle to a point outside of it crosses its edge.
function edge(one: DOMRect, toward: Point): Point {
  const center = centerOf(one);
  const [dx, dy] = [toward.x - center.x, toward.y - center.y];
  const share = Math.min(one.width / 2 / Math.abs(dx || Number.MIN_VALUE), one.height / 2 / Math.abs(dy || Number.MIN_VALUE), 1);
  return { x: center.x + dx * share, y: center.y + dy * share };
}
