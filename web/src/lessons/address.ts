// SPDX-License-Identifier: Apache-2.0
// Which lesson, with which values at which step: all of it is in the address.

import type { Lesson } from "../document";

export interface Shown {
  lesson: Lesson;
  // The place of each control's value.
  values: number[];
  step: number;
}

export const INDEX = "#lessons";
export const isLesson = (hash: string) => hash === INDEX || hash.startsWith("#lesson=");

export function startOf(lesson: Lesson): Shown {
  return { lesson, values: lesson.controls.map((one) => one.start), step: 0 };
}

export function shownOf(hash: string, lessons: Lesson[]): Shown | null {
  const given = new URLSearchParams(hash.replace(/^#/, ""));
  const lesson = lessons.find((one) => one.id === given.get("lesson"));
  if (!lesson) return null;
  const found = startOf(lesson);
  lesson.controls.forEach((control, place) => {
    const value = control.values.indexOf(given.get(control.name) ?? "");
    if (value >= 0) found.values[place] = value;
  });
  const step = Number(given.get("step") ?? 1) - 1;
  const last = sceneOf(found).frames.length - 1;
  found.step = Number.isInteger(step) ? Math.max(0, Math.min(last, step)) : 0;
  return found;
}

export function hashOfShown(shown: Shown): string {
  const values = shown.lesson.controls.map((one, place) => [one.name, one.values[shown.values[place]!]!]);
  return `#${new URLSearchParams([["lesson", shown.lesson.id], ...values, ["step", String(shown.step + 1)]])}`;
}

// Scenes are in the order of the product of values, the last control's changing fastest.
export function sceneOf(shown: Shown) {
  const place = shown.lesson.controls.reduce((sum, one, at) => sum * one.values.length + shown.values[at]!, 0);
  return shown.lesson.scenes[place]!;
}
