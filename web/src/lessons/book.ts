// SPDX-License-Identifier: Apache-2.0
// Lessons: a list of them, or the one that the address names.

import type { Lesson, LessonBook } from "../document";
import { el } from "../dom";
import { hashOfShown, INDEX, shownOf, startOf } from "./address";
import { lessonPage } from "./player";

export function book(host: HTMLElement, lessons: Lesson[], hash: string): void {
  const shown = shownOf(hash, lessons);
  host.replaceChildren(...(shown ? lessonPage(shown, lessons) : index(lessons)));
}

function index(lessons: Lesson[]): Node[] {
  const topics = [...new Set(lessons.map((one) => one.topic))];
  return [
    el("header", {}, el("h1", {}, "Figures"), el("p", { class: "summary" }, "Each is walked through step by step. What is drawn comes from the engine: its formulas, its schedules, its recorded runs.")),
    el(
      "main",
      { class: "lessons" },
      ...topics.map((topic) =>
        el(
          "section",
          {},
          el("h2", {}, topic),
          el(
            "ul",
            {},
            ...lessons
              .filter((one) => one.topic === topic)
              .map((one) => el("li", {}, el("a", { href: hashOfShown(startOf(one)) }, one.title), `: ${one.summary}`)),
          ),
        ),
      ),
    ),
  ];
}

// The explorer and the lessons are parts of one page, told apart by the address.
export function tabs(): HTMLElement {
  return el(
    "nav",
    { class: "tabs", "aria-label": "This page" },
    el("ul", {}, el("li", {}, el("a", { href: "#" }, "Explorer")), el("li", {}, el("a", { href: INDEX }, "Figures"))),
  );
}

// The lessons, as the page has them beside its document: JSON, gzip, base64. They are unpacked once.
let found: Promise<Lesson[]> | null = null;

export function unpacked(): Promise<Lesson[]> {
  found ??= unpack(document.getElementById("echelon-book")?.textContent ?? "");
  return found;
}

async function unpack(text: string): Promise<Lesson[]> {
  const packed = Uint8Array.from(atob(text), (one) => one.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return (JSON.parse(await new Response(stream).text()) as LessonBook).lessons;
}
