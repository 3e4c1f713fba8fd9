// SPDX-License-Identifier: Apache-2.0
// The lists of a schedule as tiles that a pointer or the keyboard moves; every place on the way is shown at once.

import type { Action, ScheduleVerdict } from "../compiled/formulas.js";
import { drawn, el, svg } from "../dom";
import { moved, numRanks, placeOf, tileAt, within, word } from "./built";
import type { Built, Place, Tile } from "./built";
import { arrowHead, circleArrows } from "./circle";

// Of a tile with the gap behind it, as schedules.css has them.
const GAP = 4;
const WIDE = 46 + GAP;
const HIGH = 30 + GAP;
const FAR = 5; // from where a pointer drags
const EDGE = 32; // of the window of the lists, where dragging scrolls
const SCROLL = 8; // pixels of a frame

const KINDS = { F: "forward", B: "input gradient", W: "weight gradient", BW: "backward" };

export interface Host {
  built(): Built;
  // Show what is not settled yet.
  preview(next: Built): void;
  // What was before can come back from here on.
  settle(before: Built): void;
  say(text: string): void;
}

export interface Board {
  element: HTMLElement;
  show(built: Built, verdict: ScheduleVerdict): void;
  chosen(): Tile | null;
  choose(tile: Tile | null): void;
  // Put the chosen tile somewhere else, as one step that can be undone.
  shift(by: Partial<Place>): void;
}

interface Drag {
  readonly tile: Tile;
  readonly before: Built;
  readonly id: number;
  readonly from: { x: number; y: number };
  at: { x: number; y: number };
  moves: boolean;
}

export function told(built: Built, tile: Tile): string {
  const at = placeOf(built, tile);
  const what = `${word(tile)}, ${KINDS[tile.kind]} of microbatch ${tile.microbatch} on stage ${tile.stage}`;
  if (!at || at.list === numRanks(built)) return `${what}: set aside`;
  return `${what}: place ${at.place + 1} of ${built.lists[at.list]!.length} on rank ${at.list}`;
}

export function board(host: Host): Board {
  const elements = new WeakMap<Tile, HTMLElement>();
  const tiles = new WeakMap<Element, Tile>();
  const arrows = svg("svg", { class: "circle", "aria-hidden": "true", width: 1, height: 1 });
  const content = el("div", { class: "content" });
  const element = el("div", { class: "tiles" }, content);
  let lists: HTMLElement[] = [];
  let current: Tile | null = null;
  let lifted: Built | null = null;
  let drag: Drag | null = null;
  let last: { built: Built; verdict: ScheduleVerdict } | null = null;

  const option = (tile: Tile): HTMLElement => {
    const found = elements.get(tile);
    if (found) return found;
    const made = el("li", { role: "option", class: `tile ${tile.kind}`, tabindex: -1 }, word(tile));
    elements.set(tile, made);
    tiles.set(made, tile);
    return made;
  };

  const show = (built: Built, verdict: ScheduleVerdict) => {
    last = { built, verdict };
    if (!current || !placeOf(built, current)) current = built.lists.flat()[0] ?? null;
    if (lists.length !== built.lists.length) {
      lists = built.lists.map((_, list) => listOf(list, numRanks(built)));
      content.replaceChildren(...lists.map(rowOf), arrows);
    }
    const focused = content.contains(document.activeElement);
    built.lists.forEach((list, place) => settleList(lists[place]!, list.map(option)));
    mark(built, verdict);
    if (focused && current) option(current).focus({ preventScroll: drag !== null });
    draw();
  };

  // Which tiles problems name, which one is chosen, which the circle goes through.
  const mark = (built: Built, verdict: ScheduleVerdict) => {
    const named = new Set(verdict.problems.flatMap((one) => one.message.match(/\b(F|BW|B|W)\d+\.\d+\b/g) ?? []));
    const stuck = new Set(verdict.circle.map((one) => `${one.rank} ${one.action}`));
    const awaited = new Set(verdict.circle.map((one) => `${one.awaited_rank} ${one.awaited_action}`));
    built.lists.forEach((list, rank) => {
      for (const tile of list) {
        const made = option(tile);
        const of = `${rank} ${word(tile)}`;
        made.classList.toggle("named", !verdict.circle.length && named.has(word(tile)));
        made.classList.toggle("stuck", stuck.has(of));
        made.classList.toggle("awaited", awaited.has(of));
        made.classList.toggle("lifted", tile === current && (lifted !== null || drag?.moves === true));
        made.setAttribute("aria-selected", String(tile === current));
        made.tabIndex = tile === current ? 0 : -1;
      }
    });
  };

  const draw = () => {
    if (!last) return;
    const { built, verdict } = last;
    const boxOf = (rank: number, action: Action) => {
      const tile = built.lists[rank]?.find((one) => word(one) === String(action));
      if (!tile) return null;
      const made = option(tile);
      return { left: made.offsetLeft, top: made.offsetTop, width: made.offsetWidth, height: made.offsetHeight };
    };
    arrows.replaceChildren(arrowHead(), ...circleArrows(verdict.circle, boxOf));
  };
  drawn(element, draw);

  const choose = (tile: Tile | null) => {
    current = tile;
    if (last) mark(last.built, last.verdict);
  };

  const focus = (tile: Tile) => {
    choose(tile);
    option(tile).focus();
    host.say(told(host.built(), tile));
  };

  // Move the chosen tile, and say where it is.
  const put = (to: Place) => {
    const built = host.built();
    const from = current && placeOf(built, current);
    if (!current || !from) return;
    const next = moved(built, from, within(built, from, to));
    if (next === built) return;
    host.preview(next);
    host.say(told(next, current));
  };

  const shift = (by: Partial<Place>) => {
    const before = host.built();
    const from = current && placeOf(before, current);
    if (!from) return;
    put({ list: from.list + (by.list ?? 0), place: from.place + (by.place ?? 0) });
    host.settle(before);
  };

  const drop = () => {
    const before = lifted;
    lifted = null;
    if (before) host.settle(before);
    if (current) host.say(`Put down: ${told(host.built(), current)}`);
    choose(current);
  };

  const back = (before: Built) => {
    lifted = null;
    host.preview(before);
    if (current) host.say(`Put back: ${told(before, current)}`);
  };

  const keyed = (event: KeyboardEvent) => {
    const at = current && placeOf(host.built(), current);
    if (!current || !at || event.ctrlKey || event.metaKey || event.altKey) return;
    const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (event.key === "Enter" || event.key === " ") {
      if (lifted) drop();
      else {
        lifted = host.built();
        choose(current);
        host.say(`Picked up: ${told(lifted, current)}. Arrow keys move it, Enter puts it down, Escape back.`);
      }
    } else if (event.key === "Escape" && (lifted ?? drag)) {
      const before = lifted ?? drag!.before;
      drag = null;
      back(before);
    } else if (event.key === "Delete" || event.key === "Backspace") {
      const aside = { list: numRanks(host.built()), place: host.built().lists.at(-1)!.length };
      if (lifted) put(aside);
      else shift({ list: aside.list - at.list, place: aside.place - at.place });
    } else if (step && lifted) put({ list: at.list + step[0]!, place: at.place + step[1]! });
    else {
      const next = neighbor(host.built(), at, event.key, step);
      if (!next) return;
      focus(next);
    }
    event.preventDefault();
  };
  content.addEventListener("keydown", keyed);
  content.addEventListener("focusout", (event) => {
    if (lifted && event.relatedTarget instanceof Node && !content.contains(event.relatedTarget)) drop();
  });

  const follow = () => {
    if (!drag?.moves) return;
    const found = placeUnder(lists, drag.at.x, drag.at.y);
    put(found);
  };

  const roll = () => {
    if (!drag) return;
    const edge = element.getBoundingClientRect();
    const speed = drag.at.x > edge.right - EDGE ? SCROLL : drag.at.x < edge.left + EDGE ? -SCROLL : 0;
    const before = element.scrollLeft;
    if (drag.moves) element.scrollLeft += speed;
    if (element.scrollLeft !== before) follow();
    requestAnimationFrame(roll);
  };

  content.addEventListener("pointerdown", (event) => {
    const tile = event.target instanceof Element ? tiles.get(event.target) : undefined;
    if (!tile || event.button !== 0 || drag) return;
    if (lifted) drop();
    event.preventDefault();
    focus(tile);
    content.setPointerCapture(event.pointerId);
    const at = { x: event.clientX, y: event.clientY };
    drag = { tile, before: host.built(), id: event.pointerId, from: at, at, moves: false };
    requestAnimationFrame(roll);
  });
  content.addEventListener("pointermove", (event) => {
    if (!drag || event.pointerId !== drag.id) return;
    drag.at = { x: event.clientX, y: event.clientY };
    drag.moves ||= Math.hypot(drag.at.x - drag.from.x, drag.at.y - drag.from.y) > FAR;
    follow();
  });
  const end = (event: PointerEvent, keeps: boolean) => {
    if (!drag || event.pointerId !== drag.id) return;
    const { before, tile } = drag;
    drag = null;
    if (keeps) {
      host.settle(before);
      choose(tile);
      option(tile).focus();
    } else back(before);
  };
  content.addEventListener("pointerup", (event) => end(event, true));
  content.addEventListener("pointercancel", (event) => end(event, false));

  return { element, show, chosen: () => current, choose, shift };
}

function listOf(list: number, ranks: number): HTMLElement {
  const name = list < ranks ? `rank ${list}` : "set aside";
  const kind = list < ranks ? "list" : "list aside";
  return el("ul", { role: "listbox", class: kind, "aria-label": name, "aria-orientation": "horizontal" });
}

function rowOf(list: HTMLElement): HTMLElement {
  return el("div", { class: "lane" }, el("span", { class: "name", "aria-hidden": "true" }, list.getAttribute("aria-label")), list);
}

function settleList(list: HTMLElement, wanted: HTMLElement[]): void {
  wanted.forEach((one, place) => {
    if (list.children[place] !== one) list.insertBefore(one, list.children[place] ?? null);
  });
  while (list.children.length > wanted.length) list.lastElementChild!.remove();
}

// The tile to which a key goes from a place, if it goes anywhere.
function neighbor(built: Built, at: Place, key: string, step: number[] | undefined): Tile | undefined {
  if (key === "Home") return tileAt(built, { list: at.list, place: 0 });
  if (key === "End") return built.lists[at.list]!.at(-1);
  if (!step) return undefined;
  if (step[1]) return tileAt(built, { list: at.list, place: at.place + step[1] });
  for (let list = at.list + step[0]!; list >= 0 && list < built.lists.length; list += step[0]!) {
    const found = built.lists[list]!;
    if (found.length) return found[Math.min(at.place, found.length - 1)];
  }
  return undefined;
}

// The place under a pointer: of the list that is nearest, by the width of tiles.
function placeUnder(lists: HTMLElement[], x: number, y: number): Place {
  const away = (one: DOMRect) => Math.max(one.top - y, y - one.bottom, 0);
  const boxes = lists.map((one) => one.getBoundingClientRect());
  const list = boxes.reduce((best, one, place) => (away(one) < away(boxes[best]!) ? place : best), 0);
  const box = boxes[list]!;
  const column = Math.floor((x - box.left) / WIDE);
  if (list < lists.length - 1) return { list, place: column };
  const columns = Math.max(1, Math.floor((box.width + GAP) / WIDE));
  const row = Math.max(0, Math.floor((y - box.top) / HIGH));
  return { list, place: row * columns + Math.max(0, Math.min(columns - 1, column)) };
}
