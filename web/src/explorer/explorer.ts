// SPDX-License-Identifier: Apache-2.0
// The explorer: controls, and what they come to by compiled formulas, at once.

import { broken_rules, controls_of_record, guide_ways, predict, run_text } from "../compiled/formulas.js";
import type { Controls, Prediction, Table } from "../compiled/formulas.js";
import { mapped, mappedLater } from "../compiled/runtime.js";
import { el } from "../dom";
import { isLesson } from "../lessons/address";
import { scheduleBuilder } from "../schedules/builder";
import { withBuilt } from "../schedules/link";
import { brokenList } from "./broken";
import { controlsOf, form, input, put, settle, textOf } from "./controls";
import type { Input } from "./controls";
import { bytesText } from "../bytes";
import { countText, secondsText, shareText } from "./figures";
import { guidesSection } from "./guides";
import { changed, slowly, ways } from "./near";
import type { Change } from "./near";
import { microbatches, nearPlans, neighboursSection } from "./neighbours";
import { runSection } from "./run";
import { resultParts } from "./results";
import { effective, hashOf, stateOfHash, valueOf } from "./state";
import type { ClusterRecord, Control, ExplorerDocument, State } from "./state";

// What formulas are asked of a state: the records of its model and cluster, and its controls.
interface Asked {
  controls: Controls;
  model: Table;
  cluster: Table;
  record: ClusterRecord;
}

export function explorer(found: ExplorerDocument): Node[] {
  const controls = controlsOf(found.tables);
  const ask = asker(found, controls);
  const inputs = new Map<string, Input>(controls.map((one) => [one.name, input(one)]));
  const wrong = new Map<string, string>();
  let state = stateOfHash(location.hash, controls, found.start);
  let turn = 0;

  const choose = (change: Change) => {
    state = changed(state, change);
    wrong.clear();
    history.replaceState(null, "", hashOf(state));
    for (const control of controls) put(inputs.get(control.name)!, control, state);
    update();
    inputs.get(change[0]![0])?.focus();
  };
  const verdict = el("p", { class: "verdict", id: "verdict", role: "status" });
  const facts = el("dl", { class: "facts" });
  const broken = brokenList(controls, choose);
  const results = resultParts();
  const near = neighboursSection(controls, choose);
  const guides = guidesSection();
  const run = runSection();
  const main = el("main", { id: "content" }, results.made, near.made, guides.made);

  const update = () => {
    turn += 1;
    const now = turn;
    for (const control of controls) settle(inputs.get(control.name)!, control, state, found.tables);
    const asked = ask.of(state);
    const rules = wrong.size ? [] : ask.broken(asked);
    broken.show([...wrong.values()], rules);
    const bad = wrong.size + rules.length;
    run.show(bad ? "" : run_text(asked.controls, asked.model, asked.cluster));
    main.hidden = bad > 0;
    broken.made.removeAttribute("aria-busy");
    main.removeAttribute("aria-busy");
    if (bad) {
      verdict.className = "verdict bad";
      verdict.textContent = `These settings make no plan: ${bad === 1 ? "one rule is" : `${bad} rules are`} broken.`;
      facts.replaceChildren();
      if (!wrong.size) offer(now);
      return;
    }
    const predicted = ask.predict(asked);
    say(verdict, facts, predicted, asked);
    results.show(predicted, asked.record);
    later(now, asked, predicted);
  };
  const offer = (now: number) => {
    const before = ask.rules(state);
    const devices = ask.of(state).record.devices;
    broken.made.setAttribute("aria-busy", "true");
    slowly(ways(state, before, controls, devices, ask.rules), () => turn !== now, (found) => {
      broken.offer(found);
      broken.made.removeAttribute("aria-busy");
    });
  };
  // What somebody reads after the numbers may come after them.
  const later = (now: number, asked: Asked, predicted: Prediction) => {
    main.setAttribute("aria-busy", "true");
    const memory = asked.record.memory_bytes;
    const planOf = (one: State) => {
      const other = ask.of(one);
      return ask.broken(other).length ? null : ask.predict(other);
    };
    slowly(
      (function* () {
        results.mesh(asked.controls, asked.record, asked.cluster);
        yield;
        guides.show(guide_ways(ask.tables, asked.controls, asked.model, asked.cluster));
        yield;
        const plans = yield* nearPlans(state, controls, found.tables, memory, planOf);
        return { plans, sizes: yield* microbatches(state, memory, planOf) };
      })(),
      () => turn !== now,
      ({ plans, sizes }) => {
        near.show(plans, sizes, predicted, predicted.bytes_held <= memory);
        main.removeAttribute("aria-busy");
      },
    );
  };
  for (const control of controls) {
    const made = inputs.get(control.name)!;
    put(made, control, state);
    made.addEventListener(made instanceof HTMLSelectElement ? "change" : "input", () => {
      const read = valueOf(control, textOf(made));
      made.setAttribute("aria-invalid", String("why" in read));
      if ("why" in read) {
        wrong.set(control.name, read.why);
      } else {
        wrong.delete(control.name);
        state = { ...state, [control.name]: read.value };
        history.replaceState(null, "", withBuilt(hashOf(state)));
      }
      update();
    });
  }
  addEventListener("hashchange", () => {
    if (isLesson(location.hash)) return;
    state = stateOfHash(location.hash, controls, found.start);
    wrong.clear();
    for (const control of controls) put(inputs.get(control.name)!, control, state);
    update();
  });
  update();
  return [
    el("a", { class: "skip", href: "#content" }, "Skip to the content"),
    el("header", {}, el("h1", {}, "Explorer"), verdict, broken.made, facts),
    form(controls, inputs),
    main,
    run.made,
    afterPaint(scheduleBuilder),
    foot(found),
  ];
}

// What stands below the fold is made once the first frame has been painted.
function afterPaint(make: () => HTMLElement): HTMLElement {
  const place = el("div", { class: "later", "aria-busy": "true" });
  requestAnimationFrame(() => setTimeout(() => place.replaceWith(make())));
  return place;
}

function asker(found: ExplorerDocument, controls: Control[]) {
  const tables: Table = new Map(
    Object.entries(found.tables).map(([name, one]) => [name, Array.isArray(one) ? mappedLater(one) : mapped(one)]),
  );
  const place = <T extends { name: string }>(rows: T[]) => new Map(rows.map((one, at) => [one.name, at]));
  const [models, clusters] = [place(found.tables.models), place(found.tables.clusters)];
  const of = (state: State): Asked => {
    const { model, cluster, ...rest } = effective(state, controls, found.tables);
    const at = clusters.get(String(cluster))!;
    return {
      controls: controls_of_record(new Map(Object.entries(rest))),
      model: (tables.get("models") as Table[])[models.get(String(model))!]!,
      cluster: (tables.get("clusters") as Table[])[at]!,
      record: found.tables.clusters[at]!,
    };
  };
  const broken = (one: Asked) => broken_rules(one.controls, one.model, one.cluster);
  return {
    tables,
    of,
    broken,
    rules: (state: State) => broken(of(state)).map((one) => one.rule),
    predict: (one: Asked) => predict(tables, one.controls, one.model, one.cluster),
  };
}

function say(verdict: HTMLElement, facts: HTMLElement, found: Prediction, asked: Asked): void {
  const { record: cluster, controls } = asked;
  const fits = found.bytes_held <= cluster.memory_bytes;
  const of = cluster.memory_bytes > 0 ? ` of ${bytesText(cluster.memory_bytes)}` : "";
  verdict.className = `verdict ${fits ? "good" : "bad"}`;
  verdict.textContent = `The plan ${fits ? "fits" : "does not fit"}: its fullest rank holds ${bytesText(found.bytes_held)}${of}, and a step takes ${secondsText(found.step_s)}.`;
  const rows: [string, string, number][] = [
    ["step", secondsText(found.step_s), found.step_s],
    ["tokens/s of a device", countText(Math.round(found.tokens_per_s_per_device)), found.tokens_per_s_per_device],
    ["MFU (full attention)", shareText(found.mfu), found.mfu],
    ["memory of the fullest rank", bytesText(found.bytes_held), found.bytes_held],
    ["ranks", countText(controls.ranks), controls.ranks],
  ];
  facts.replaceChildren(
    ...rows.map(([name, value, exact]) =>
      el("div", {}, el("dt", {}, name), el("dd", {}, el("strong", { "data-number": exact }, value))),
    ),
  );
}

function foot(found: ExplorerDocument): Node {
  return el(
    "footer",
    {},
    el(
      "p",
      {},
      `${found.made_by}. Numbers are closed forms, as a search compares plans by; echelon plan times a pipeline `,
      "event by event and counts what a rank holds. What these forms do not see has no control: buckets, units and ",
      "prefetch of ZeRO, offload to NVMe, how gradients of microbatches add up, stages by hand, capacity of experts, ",
      "asynchronous servers. Local SGD, kernels and padded rows are left to a run file, too. ",
      "This file loads nothing and sends nothing.",
    ),
  );
}
