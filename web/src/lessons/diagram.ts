// SPDX-License-Identifier: Apache-2.0
// Places with tiles, and arrows between tiles over all of it.

import type { DiagramFigure, Place, Tile } from "../document";
import { drawn, el, svg } from "../dom";
import { legend, tint } from "../figures/legend";

// The numbers of a matrix, in lines or in one.
const NUMBERS = /^[-\d.\s]*\d\s+-?[-\d.\s]*$/;

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
      class: `tile ${one.state}${NUMBERS.test(one.label) ? " matrix" : ""}`,
      "data-tile": one.id,
      "data-origin": one.origin || undefined,
      title: `${kinds[one.kind]}: ${one.words}`,
      style:
        `grid-row:${one.row + 1}/span ${one.rows};grid-column:${one.column + 1}/span ${one.columns};` +
        `--fill:${tint(one.kind)}`,
    },
    one.label,
    el("span", { class: "unseen" }, ` ${one.words}`),
  );
}

// Places on the board, whatever glides over it now.
function draw(board: HTMLElement, arrows: SVGElement, found: DiagramFigure): void {
  const tiles = new Map([...board.querySelectorAll<HTMLElement>("[data-tile]")].map((one) => [one.dataset.tile!, one]));
  arrows.setAttribute("viewBox", `0 0 ${board.clientWidth} ${board.clientHeight}`);
  arrows.replaceChildren(
    svg("defs", {}, svg("marker", { id: "head", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto-start-reverse" }, svg("path", { d: "M0 0L8 4L0 8z" }))),
  );
  for (const move of found.moves) {
    const [source, target] = [tiles.get(move.source), tiles.get(move.target)];
    if (!source || !target) continue;
    const [[x1, y1], [x2, y2]] = [middle(source), middle(target)];
    const [dx, dy] = [Math.abs(x2 - x1), Math.abs(y2 - y1)];
    // Between neighbours of a row an arrow goes over them: straight on it would be hidden.
    const lift = Math.max(dx > dy ? source.offsetHeight + 8 : 0, Math.min(60, Math.hypot(dx, dy) / 4));
    const bend: Point = [(x1 + x2) / 2, (y1 + y2) / 2 - lift];
    const [from, to] = [edge(source, bend), edge(target, bend)];
    const line = svg("path", { class: "arrow", d: `M${from.join(" ")}Q${bend.join(" ")} ${to.join(" ")}`, "marker-end": "url(#head)" });
    line.append(svg("title", {}, move.words));
    arrows.append(line);
  }
}

type Point = [number, number];

// The board is what offsets are measured from.
const middle = (one: HTMLElement): Point => [one.offsetLeft + one.offsetWidth / 2, one.offsetTop + one.offsetHeight / 2];

// Where the way from the middle of a tile to a point leaves it, so that no arrow hides a number.
function edge(one: HTMLElement, to: Point): Point {
  const [x, y] = middle(one);
  const [dx, dy] = [to[0] - x, to[1] - y];
  const part = Math.min(1, one.offsetWidth / 2 / Math.abs(dx), one.offsetHeight / 2 / Math.abs(dy));
  return [x + dx * part, y + dy * part];
}
