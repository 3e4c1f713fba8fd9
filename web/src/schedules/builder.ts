// SPDX-License-Identifier: Apache-2.0
// "Build a schedule": from one of the engine's, or from nothing, by moving actions. What is said of it after
// each move is said by the engine's own checker and simulator, which are compiled into the page.

import "./schedules.css";
import { lengths_of, schedule_default_stages, schedule_names, schedule_start, schedule_text, schedule_verdict } from "../compiled/formulas.js";
import type { Problem } from "../compiled/formulas.js";
import { el } from "../dom";
import { board, told } from "./board";
import { builtFrom, placeOf, sameTiles, scheduleOf, splitOrFused, tileAt, word } from "./built";
import type { Built } from "./built";
import { builtOf, MOST_MICROBATCHES, MOST_RANKS, MOST_VIRTUAL, PLAIN, secondsOf, textOf, textOfHash, withBuilt } from "./link";
import type { Times } from "./link";
import { results, verdictText } from "./results";

const START = { name: "1f1b", ranks: 4, virtual: 1, microbatches: 8 };
const LENGTHS = ["F, seconds", "B, seconds", "W, seconds", "message, seconds"];

export function scheduleBuilder(): HTMLElement {
  const linked = linkedState();
  let built = linked?.built ?? builtFrom(schedule_start(START.name, START.ranks, START.virtual, START.microbatches).schedule!, false);
  let times: Times = linked?.times ?? PLAIN;
  const past: Built[] = [];
  const future: Built[] = [];
  const verdict = el("p", { class: "verdict", id: "built-verdict", role: "status" });
  const said = el("p", { class: "said", id: "built-said", "aria-live": "polite" }, "Choose an action: drag it, or pick it up by Enter.");
  const faults = el("ul", { class: "faults", id: "built-faults", "aria-label": "Rules that the schedule breaks" });
  const outcome = el("div", { id: "built-outcome" });
  const text = el("pre", { id: "built-file", tabindex: 0, "aria-label": "The schedule file" });
  const limits = timesForm((found) => {
    times = found;
    show(built);
    keep();
  });

  const show = (next: Built) => {
    built = next;
    const schedule = scheduleOf(built);
    const found = schedule_verdict(schedule, lengths_of(...times.lengths), times.limit);
    tiles.show(built, found);
    verdict.className = `verdict ${found.problems.length ? "bad" : "good"}`;
    verdict.textContent = verdictText(found);
    faults.replaceChildren(...found.problems.map(fault));
    faults.hidden = found.problems.length === 0;
    outcome.replaceChildren(...results(built, found));
    text.textContent = schedule_text(schedule);
    settleButtons();
  };
  const keep = () => history.replaceState(null, "", withBuilt(location.hash, textOf(built, times)));
  const settle = (before: Built) => {
    if (before === built) return;
    // What was moved and came back is as it was.
    if (sameTiles(before, built)) return show(before);
    past.push(before);
    future.length = 0;
    keep();
    settleButtons();
  };
  const say = (words: string) => (said.textContent = words);
  const tiles = board({ built: () => built, preview: show, settle, say });

  const travel = (from: Built[], to: Built[], words: string) => {
    const found = from.pop();
    if (!found) return say(`Nothing to ${words}.`);
    to.push(built);
    show(found);
    keep();
    say(`${words}: done. ${verdict.textContent}`);
  };
  const undo = () => travel(past, future, "Undo");
  const redo = () => travel(future, past, "Redo");
  const replace = (next: Built, words: string) => {
    const before = built;
    show(next);
    settle(before);
    say(words);
  };
  const split = () => {
    const chosen = tiles.chosen();
    const at = chosen && placeOf(built, chosen);
    const next = at ? splitOrFused(built, at) : built;
    if (!chosen || !at || next === built) return say("F has no parts: choose a BW, a B or a W.");
    replace(next, "");
    const now = tileAt(next, at) ?? tileAt(next, { ...at, place: at.place - 1 });
    tiles.choose(now ?? null);
    say(chosen.kind === "BW" ? `${word(chosen)} is B and W now.` : `B and W are one action now${now ? `: ${told(next, now)}` : ""}.`);
  };
  const aside = () => {
    const at = tiles.chosen() && placeOf(built, tiles.chosen()!);
    if (at) tiles.shift({ list: built.lists.length - 1 - at.list, place: built.lists.at(-1)!.length - at.place });
  };
  const buttons = {
    earlier: button("Move earlier", () => tiles.shift({ place: -1 })),
    later: button("Move later", () => tiles.shift({ place: 1 })),
    up: button("To the rank above", () => tiles.shift({ list: -1 })),
    down: button("To the rank below", () => tiles.shift({ list: 1 })),
    split: button("Split or fuse", split),
    aside: button("Set aside", aside),
    undo: button("Undo", undo),
    redo: button("Redo", redo),
  };
  const settleButtons = () => {
    buttons.undo.setAttribute("aria-disabled", String(past.length === 0));
    buttons.redo.setAttribute("aria-disabled", String(future.length === 0));
  };

  const section = el(
    "section",
    { id: "build", class: "build", "aria-labelledby": "build-title" },
    el("h2", { id: "build-title" }, "Build a schedule"),
    el(
      "p",
      { class: "summary" },
      "Start from a schedule of the engine and move its actions. Each place is checked and timed at once, by the code that ",
      "checks schedule files. Drag an action by mouse or finger, or by keys: arrows choose, Enter picks up, arrows move, Enter puts ",
      "down, Escape puts back, Delete sets aside, Ctrl+Z undoes.",
    ),
    startForm((next, words) => replace(next, words)),
    limits.form,
    el("div", { class: "controls" }, ...Object.values(buttons)),
    tiles.element,
    said,
    verdict,
    faults,
    outcome,
    fileOf(text),
  );
  section.addEventListener("keydown", (event) => {
    if (!(event.ctrlKey || event.metaKey) || event.target instanceof HTMLInputElement) return;
    if (event.key.toLowerCase() === "z") (event.shiftKey ? redo : undo)();
    else if (event.key.toLowerCase() === "y") redo();
    else return;
    event.preventDefault();
  });
  addEventListener("hashchange", () => {
    const found = linkedState();
    if (!found || textOf(found.built, found.times) === textOf(built, times)) return;
    times = found.times;
    limits.put(times);
    replace(found.built, "The link's schedule is shown.");
  });
  limits.put(times);
  show(built);
  return section;
}

function linkedState(): { built: Built; times: Times } | null {
  const text = textOfHash(location.hash);
  return text === null ? null : builtOf(text);
}

function fault(one: Problem): Node {
  const works = one.suggestions.length ? ` Works here: ${one.suggestions.join(", ")}.` : "";
  return el("li", {}, el("code", {}, one.rule), `: ${one.message}.${works}`);
}

function button(text: string, act: () => void): HTMLButtonElement {
  const made = el("button", { type: "button" }, text);
  made.addEventListener("click", act);
  return made;
}

function labeled(name: string, label: string, made: HTMLElement): HTMLElement {
  made.id = `built-${name}`;
  return el("div", {}, el("label", { for: made.id }, label), made);
}

function count(value: number, most: number): HTMLInputElement {
  return el("input", { type: "number", min: 1, max: most, step: 1, value });
}

function form(label: string, ...rows: Node[]): HTMLFormElement {
  const made = el("form", { "aria-label": label }, ...rows);
  made.addEventListener("submit", (event) => event.preventDefault());
  return made;
}

function startForm(start: (next: Built, words: string) => void): HTMLElement {
  const name = el("select", {}, ...schedule_names().map((one) => el("option", { value: one }, one)));
  const ranks = count(START.ranks, MOST_RANKS);
  const virtual = count(START.virtual, MOST_VIRTUAL);
  const microbatches = count(START.microbatches, MOST_MICROBATCHES);
  const wrong = el("ul", { class: "faults", "aria-label": "Why it can't start so" });
  name.value = START.name;
  wrong.hidden = true;
  const told = (...rows: Node[]) => {
    wrong.replaceChildren(...rows);
    wrong.hidden = rows.length === 0;
  };
  const begin = (empty: boolean) => {
    const numbers = [ranks, virtual, microbatches].map((one) => {
      const right = /^\d+$/.test(one.value.trim()) && Number(one.value) >= 1 && Number(one.value) <= Number(one.max);
      one.setAttribute("aria-invalid", String(!right));
      return right ? Number(one.value) : null;
    });
    const [p, v, m] = numbers;
    if (p == null || v == null || m == null) {
      return told(el("li", {}, `whole numbers, of ranks to ${MOST_RANKS}, of stages on each to ${MOST_VIRTUAL}, of microbatches to ${MOST_MICROBATCHES}`));
    }
    const { problems, schedule } = schedule_start(name.value, p, v, m);
    told(...problems.map(fault));
    if (schedule) start(builtFrom(schedule, empty), `${schedule.name} with ${p} ranks and ${m} microbatches${empty ? ", all set aside" : ""}.`);
  };
  name.addEventListener("change", () => (virtual.value = String(schedule_default_stages(name.value))));
  const made = form(
    "Where to start",
    labeled("schedule", "schedule", name),
    labeled("ranks", "ranks", ranks),
    labeled("virtual", "stages of a rank", virtual),
    labeled("microbatches", "microbatches", microbatches),
    button("Start from it", () => begin(false)),
    button("Start empty", () => begin(true)),
  );
  return el("div", {}, made, el("div", { id: "built-start-faults", role: "status" }, wrong));
}

function timesForm(set: (times: Times) => void): { form: HTMLElement; put: (times: Times) => void } {
  const lengths = LENGTHS.map(() => el("input", { type: "text", inputmode: "decimal" }));
  const limit = el("input", { type: "text", inputmode: "numeric", placeholder: "no limit" });
  const read = () => {
    const found = lengths.map((one) => secondsOf(one.value, 0));
    const wholes = /^\d{0,4}$/.test(limit.value.trim());
    lengths.forEach((one, place) => one.setAttribute("aria-invalid", String(found[place] === null)));
    limit.setAttribute("aria-invalid", String(!wholes));
    const [f, b, w, message] = found;
    if (f == null || b == null || w == null || message == null || !wholes) return;
    set({ lengths: [f, b, w, message], limit: limit.value.trim() === "" ? null : Number(limit.value) });
  };
  for (const one of [...lengths, limit]) one.addEventListener("input", read);
  const put = (times: Times) => {
    lengths.forEach((one, place) => (one.value = String(times.lengths[place])));
    limit.value = times.limit === null ? "" : String(times.limit);
  };
  const names = ["forward", "input", "weight", "transfer"];
  const rows = lengths.map((one, place) => labeled(names[place]!, LENGTHS[place]!, one));
  return { form: form("How long actions take", ...rows, labeled("limit", "most in flight on a rank", limit)), put };
}

function fileOf(text: HTMLElement): HTMLElement {
  const said = el("span", { role: "status" });
  const details = el("details", {}, el("summary", {}, "The schedule file"), text);
  const copy = button("Copy schedule file", () => {
    const copied = () => (said.textContent = " copied: save it as built.json");
    // A page that is a file may not have the clipboard: what is selected can be copied by keys.
    const refused = () => {
      details.open = true;
      getSelection()?.selectAllChildren(text);
      said.textContent = " selected: copy it by the keyboard, and save it as built.json";
    };
    (navigator.clipboard?.writeText(text.textContent ?? "") ?? Promise.reject()).then(copied, refused);
  });
  return el(
    "div",
    { id: "built-copy" },
    el("p", {}, copy, said),
    el("p", { class: "note" }, 'echelon schedule check built.json proves it; a run has it by pipeline.schedule = "file" and pipeline.file = "built.json".'),
    details,
  );
}
