// SPDX-License-Identifier: Apache-2.0
import type { Section } from "../document";
import { el } from "../dom";
import { bars } from "./bars";
import { heat } from "./heat";
import { lines } from "./lines";
import { mesh } from "./mesh";
import { schedule } from "./schedule";
import { waterfall } from "./waterfall";

export type Figure = NonNullable<Section["figure"]>;

export function figure(found: Figure, title: string, summary: string): HTMLElement {
  const host = el("figure", { class: found.kind, "aria-label": title, "aria-describedby": summary });
  switch (found.kind) {
    case "mesh":
      mesh(host, found);
      break;
    case "bars":
      bars(host, found);
      break;
    case "waterfall":
      waterfall(host, found);
      break;
    case "schedule":
      schedule(host, found);
      break;
    case "lines":
      lines(host, found);
      break;
    case "heat":
      heat(host, found);
      break;
  }
  return host;
}
