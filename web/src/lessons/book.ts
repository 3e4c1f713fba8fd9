// SPDX-License-Identifier: Apache-2.0
// Lessons: a list of them, or the one that the address names.

import type { Lesson } from "../document";
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
