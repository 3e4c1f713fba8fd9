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

type Drawers = { [K in Figure["kind"]]: (host: HTMLElement, found: Extract<Figure, { kind: K }>) => void };

const DRAWN_BY: Drawers = { mesh, bars, waterfall, schedule, lines, heat };

export function figure(found: Figure, title: string, summary: string): HTMLElement {
  const host = el("figure", { class: found.kind, "aria-label": title, "aria-describedby": summary });
  (DRAWN_BY[found.kind] as (host: HTMLElement, found: Figure) => void)(host, found);
  return host;
}
