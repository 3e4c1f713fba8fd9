// SPDX-License-Identifier: Apache-2.0
import "./styles.css";
import type { PageDocument } from "./document";
import { el } from "./dom";
import { explorer } from "./explorer/explorer";
import type { ExplorerDocument } from "./explorer/state";
import { isLesson } from "./lessons/address";
import { book, tabs, unpacked } from "./lessons/book";
import { page } from "./page";

const SCHEMA = 1;

function start(): void {
  const root = document.getElementById("page");
  const data = document.getElementById("echelon-data");
  if (!root) return;
  root.replaceChildren(...shown(data?.textContent ?? null));
  if (data?.dataset.live) follow(root, data.dataset.live, data.textContent ?? "");
}

const ASK_MS = 3000;

// Ask for newer documents, and draw again where one differs; what was unfolded stays so.
function follow(root: HTMLElement, address: string, first: string): void {
  let last = first;
  const again = async () => {
    try {
      const answer = await fetch(address, { cache: "no-store" });
      const text = answer.ok ? await answer.text() : last;
      if (text !== last) {
        const open = [...root.querySelectorAll("details")].map((one) => one.open);
        root.replaceChildren(...shown(text));
        root.querySelectorAll("details").forEach((one, place) => (one.open = open[place] ?? false));
        last = text;
      }
    } catch {
      // Whoever served it has ended: the last state stays.
    }
    setTimeout(again, ASK_MS);
  };
  setTimeout(again, ASK_MS);
}

function shown(text: string | null): Node[] {
  if (text === null) return [el("p", {}, "This page has no document: it was not written by Echelon.")];
  const found = JSON.parse(text) as PageDocument | ExplorerDocument;
  if (found.schema !== SCHEMA) {
    return [el("p", {}, `This page reads documents of schema ${SCHEMA}, and has one of schema ${found.schema}.`)];
  }
  return found.kind === "explorer" ? explorerAndLessons(found) : page(found);
}

// Two parts of one page; the address says which is seen.
function explorerAndLessons(found: ExplorerDocument): Node[] {
  const controls = el("div", {}, ...explorer(found));
  const lessons = el("div", {});
  const nav = tabs();
  const links = nav.querySelectorAll("a");
  const turn = () => {
    const learns = isLesson(location.hash);
    controls.hidden = learns;
    lessons.hidden = !learns;
    if (!learns) lessons.replaceChildren();
    else void unpacked().then((all) => isLesson(location.hash) && book(lessons, all, location.hash));
    links.forEach((link, place) => {
      if ((place === 1) === learns) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    });
  };
  // Back to the explorer as it was: its controls write the address without a word.
  links[1]!.addEventListener("click", () => {
    if (!isLesson(location.hash)) links[0]!.href = location.hash || "#";
  });
  addEventListener("hashchange", () => {
    turn();
    scrollTo(0, 0);
  });
  turn();
  return [nav, controls, lessons];
}

start();
