// SPDX-License-Identifier: Apache-2.0
// The circle of a deadlock as arrows over the tiles: from what cannot start to what it waits for, and
// from there along its rank to what it stands behind.

import type { Action, BlockedRank } from "../compiled/formulas.js";
import { svg } from "../dom";

interface Box {
  left: number;
  top: number;
  width: number;
  height: number;
}

export type BoxOf = (rank: number, action: Action) => Box | null;

const same = (left: Action, right: Action) => String(left) === String(right);

export function circleArrows(circle: readonly BlockedRank[], boxOf: BoxOf): SVGElement[] {
  return circle.flatMap((wait, place) => {
    const following = circle[(place + 1) % circle.length]!;
    const [from, to] = [boxOf(wait.rank, wait.action), boxOf(wait.awaited_rank, wait.awaited_action)];
    if (!from || !to) return [];
    const told = `rank ${wait.rank} ${wait.action} waits for ${wait.awaited_action} on rank ${wait.awaited_rank}`;
    const arrows = [arrow("wait", between(from, to), told)];
    const head = boxOf(following.rank, following.action);
    if (head && !same(wait.awaited_action, following.action)) {
      const stands = `${wait.awaited_action} stands behind ${following.action} on rank ${following.rank}`;
      arrows.push(arrow("behind", along(to, head), stands));
    }
    return arrows;
  });
}

function arrow(kind: string, path: string, told: string): SVGElement {
  return svg("path", { class: kind, d: path, "marker-end": "url(#circle-head)", "data-told": told });
}

// From edge to edge: down or up where lists differ, over the tiles where they do not.
function between(from: Box, to: Box): string {
  const [x, y] = [from.left + from.width / 2, to.left + to.width / 2];
  if (from.top === to.top) return over(x, y, from.top);
  const down = from.top < to.top;
  const start = down ? from.top + from.height : from.top;
  const end = down ? to.top - 3 : to.top + to.height + 3;
  const middle = (start + end) / 2;
  return `M${x} ${start}C${x} ${middle} ${y} ${middle} ${y} ${end}`;
}

function along(from: Box, to: Box): string {
  return over(from.left + from.width / 2 - 6, to.left + to.width / 2 + 6, from.top);
}

const over = (x: number, y: number, top: number) => `M${x} ${top}Q${(x + y) / 2} ${top - 16} ${y} ${top - 2}`;

export function arrowHead(): SVGElement {
  return svg(
    "defs",
    {},
    svg(
      "marker",
      { id: "circle-head", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 10, markerHeight: 10, markerUnits: "userSpaceOnUse", orient: "auto" },
      svg("path", { d: "M0 0L8 4L0 8z", class: "head" }),
    ),
  );
}
