// SPDX-License-Identifier: Apache-2.0
// The lessons, as the page has them beside its document: JSON, gzip, base64. They are unpacked once.

import type { Lesson, LessonBook } from "../document";

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
