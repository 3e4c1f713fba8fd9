// SPDX-License-Identifier: Apache-2.0
// One lesson: its controls, its steps (by hand, by keys, or played), what is drawn and said of each.

import type { Correction, Fact, Frame, Lesson } from "../document";
import { el } from "../dom";
import { dataTable } from "../table";
import { hashOfShown, INDEX, sceneOf, type Shown, startOf } from "./address";
import { lessonFigure } from "./figure";

const STEP_MS = 1800;

interface Parts {
  caption: HTMLElement;
  figures: HTMLElement;
  facts: HTMLElement;
  table: HTMLElement;
  slider: HTMLInputElement;
  steps: HTMLElement;
  play: HTMLButtonElement;
  player: HTMLElement;
}

export function lessonPage(first: Shown, lessons: Lesson[]): Node[] {
  const lesson = first.lesson;
  let shown = first;
  let timer = 0;
  const parts: Parts = {
    caption: el("p", { class: "caption", id: "lesson-caption", "aria-live": "polite" }),
    figures: el("div", { class: "lesson-figures" }),
    facts: el("dl", { class: "facts" }),
    table: el("div", {}),
    slider: el("input", { type: "range", min: 1, step: 1, "aria-label": "step" }),
    steps: el("span", { class: "steps" }),
    play: el("button", { type: "button" }, "Play"),
    player: el("div", { class: "player", role: "group", "aria-label": "Steps" }),
  };
  const go = (to: Partial<Shown>) => {
    shown = { ...shown, ...to };
    shown.step = Math.max(0, Math.min(sceneOf(shown).frames.length - 1, shown.step));
    history.replaceState(null, "", hashOfShown(shown));
    show(parts, shown);
  };
  const stop = () => {
    clearTimeout(timer);
    timer = 0;
    parts.play.textContent = "Play";
  };
  const tick = () => {
    const last = sceneOf(shown).frames.length - 1;
    if (!parts.player.isConnected || shown.step >= last) return stop();
    go({ step: shown.step + 1 });
    timer = window.setTimeout(tick, STEP_MS);
  };
  const button = (text: string, label: string, act: () => void) => {
    const made = el("button", { type: "button", "aria-label": label }, text);
    made.addEventListener("click", act);
    return made;
  };
  const by = (steps: number) => () => {
    stop();
    go({ step: shown.step + steps });
  };
  parts.play.addEventListener("click", () => {
    if (timer) return stop();
    if (shown.step >= sceneOf(shown).frames.length - 1) go({ step: 0 });
    parts.play.textContent = "Pause";
    timer = window.setTimeout(tick, STEP_MS);
  });
  parts.slider.addEventListener("input", () => {
    stop();
    go({ step: Number(parts.slider.value) - 1 });
  });
  parts.player.append(button("<", "Previous step", by(-1)), parts.play, button(">", "Next step", by(1)), parts.slider, parts.steps);
  const controls = lesson.controls.map((control, place) => {
    const made = el(
      "select",
      { id: `lesson-${control.name}`, name: control.name },
      ...control.values.map((value) => el("option", { value }, value)),
    );
    made.value = control.values[shown.values[place]!]!;
    made.addEventListener("change", () => {
      stop();
      go({ values: shown.values.map((value, at) => (at === place ? control.values.indexOf(made.value) : value)) });
    });
    return el("div", {}, el("label", { for: made.id }, control.label), made);
  });
  const form = el("form", { class: "explorer", "aria-label": "Controls of the figure" }, ...controls);
  form.addEventListener("submit", (event) => event.preventDefault());
  show(parts, shown);
  return [
    el("header", {}, el("p", { class: "subject" }, lesson.topic), el("h1", { id: "lesson-title" }, lesson.title), el("p", { class: "summary" }, lesson.summary)),
    el(
      "main",
      { class: "lesson", "data-lesson": lesson.id },
      controls.length ? form : null,
      parts.player,
      parts.caption,
      parts.figures,
      parts.facts,
      parts.table,
      corrected(lesson.corrections),
      ...lesson.commands.map((command) => el("pre", { tabindex: 0 }, el("code", {}, command))),
      el("p", { class: "note" }, `Where the numbers come from: ${lesson.source}.`),
      neighbours(lesson, lessons),
    ),
  ];
}

function show(parts: Parts, shown: Shown): void {
  const scene = sceneOf(shown);
  const frame = scene.frames[shown.step]!;
  const many = scene.frames.length;
  const before = tilesOf(parts.figures);
  parts.caption.textContent = frame.caption;
  parts.figures.replaceChildren(...frame.figures.map((one) => lessonFigure(one, shown.lesson.title, parts.caption.id)));
  glide(parts.figures, before);
  parts.facts.replaceChildren(...frame.facts.map(fact));
  parts.facts.hidden = frame.facts.length === 0;
  parts.slider.max = String(many);
  parts.slider.value = String(shown.step + 1);
  parts.slider.setAttribute("aria-valuetext", `step ${shown.step + 1} of ${many}`);
  parts.steps.textContent = `step ${shown.step + 1} of ${many}`;
  parts.player.hidden = many === 1;
  const open = parts.table.querySelector("details")?.open ?? false;
  // A lesson that draws nothing is its table.
  const bare = scene.frames.every((one) => !one.figures.length);
  parts.table.classList.toggle("bare", bare);
  const shownTable = scene.table && (bare ? dataTable(scene.table, shown.lesson.title) : folded(scene.table, shown.lesson.title, open));
  parts.table.replaceChildren(shownTable ?? "", moves(frame) ?? "");
}

function folded(table: NonNullable<Shown["lesson"]["scenes"][0]["table"]>, title: string, open: boolean): Node {
  return el("details", { open }, el("summary", {}, "The numbers as a table"), dataTable(table, title));
}

// Arrows in words: what a picture of them can't tell.
function moves(frame: Frame): Node | null {
  const found = frame.figures.flatMap((one) => (one.kind === "diagram" ? one.moves.map((move) => move.words) : []));
  if (!found.length) return null;
  return el("details", {}, el("summary", {}, `What moves in this step (${found.length})`), el("ul", {}, ...found.map((one) => el("li", {}, one))));
}

function fact(one: Fact): Node {
  return el("div", {}, el("dt", {}, one.name), el("dd", {}, el("strong", {}, one.value), one.note ? el("span", {}, one.note) : null));
}

function corrected(found: Correction[]): Node | null {
  if (!found.length) return null;
  return el(
    "section",
    { "aria-labelledby": "lesson-corrections" },
    el("h2", { id: "lesson-corrections" }, "What published guides say"),
    el("ul", {}, ...found.map((one) => el("li", {}, el("code", {}, one.id), ` says: ${one.said}. What holds: ${one.holds}`))),
  );
}

function neighbours(lesson: Lesson, lessons: Lesson[]): Node {
  const at = lessons.indexOf(lesson);
  const link = (one: Lesson | undefined, text: string) =>
    one ? el("a", { href: hashOfShown(startOf(one)) }, `${text}: ${one.title}`) : null;
  return el("nav", { class: "neighbours", "aria-label": "Other figures" }, link(lessons[at - 1], "Before"), el("a", { href: INDEX }, "All figures"), link(lessons[at + 1], "Next"));
}

// A tile that is in two frames glides from where it was, a copy from what it is a copy of; nothing
// moves where the system says so.
const GLIDE_MS = 600;

function tilesOf(host: HTMLElement): Map<string, DOMRect> {
  return new Map([...host.querySelectorAll<HTMLElement>("[data-tile]")].map((one) => [one.dataset.tile!, one.getBoundingClientRect()]));
}

function glide(host: HTMLElement, before: Map<string, DOMRect>): void {
  if (!before.size || matchMedia("(prefers-reduced-motion: reduce)").matches) return;
  for (const one of host.querySelectorAll<HTMLElement>("[data-tile]")) {
    const was = before.get(one.dataset.origin ?? "") ?? before.get(one.dataset.tile!);
    if (!was) continue;
    const now = one.getBoundingClientRect();
    const [x, y] = [was.left - now.left, was.top - now.top];
    if (x || y) one.animate([{ transform: `translate(${x}px, ${y}px)` }, { transform: "none" }], { duration: GLIDE_MS, easing: "ease-in-out" });
  }
}
