// SPDX-License-Identifier: Apache-2.0
// A report: the verdict, its facts, then one part after the other.

import type { Fact, PageDocument, Section } from "./document";
import { el } from "./dom";
import { figure } from "./figures/figure";
import { dataTable } from "./table";

export function page(found: PageDocument): Node[] {
  const parts = found.sections;
  return [
    el("a", { class: "skip", href: "#content" }, "Skip to the content"),
    el(
      "header",
      {},
      el("p", { class: "subject" }, found.subject),
      el("h1", {}, found.title),
      el("p", { class: found.good ? "verdict good" : "verdict bad", id: "verdict" }, found.verdict),
      found.facts.length ? el("dl", { class: "facts" }, ...found.facts.map(fact)) : null,
    ),
    parts.length > 1
      ? el(
          "nav",
          { "aria-label": "Parts of this page" },
          el("ul", {}, ...parts.map((one) => el("li", {}, el("a", { href: `#${one.id}` }, one.title)))),
        )
      : null,
    el("main", { id: "content" }, ...parts.map(section)),
    el("footer", {}, el("p", {}, `${found.made_by}. This file loads nothing and sends nothing.`)),
  ].filter((one) => one !== null);
}

function fact(one: Fact): Node {
  return el(
    "div",
    {},
    el("dt", {}, one.name),
    el("dd", {}, el("strong", {}, one.value), one.note ? el("span", {}, one.note) : null),
  );
}

function section(one: Section): Node {
  const title = `${one.id}-title`;
  const summary = `${one.id}-summary`;
  return el(
    "section",
    { id: one.id, "aria-labelledby": title },
    el("h2", { id: title }, one.title),
    el("p", { class: "summary", id: summary }, one.summary),
    one.figure ? figure(one.figure, one.title, summary) : null,
    ...one.notes.map((note) => el("p", { class: "note" }, note)),
    one.table ? tableOf(one) : null,
    ...one.commands.map((command) => el("pre", { tabindex: 0 }, el("code", {}, command))),
  );
}

function tableOf(one: Section): Node {
  const made = dataTable(one.table!, one.title);
  if (!one.figure) return made;
  return el("details", {}, el("summary", {}, "The numbers as a table"), made);
}
