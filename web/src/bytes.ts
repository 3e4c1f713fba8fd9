// SPDX-License-Identifier: Apache-2.0
// Bytes held as texts, and ticks of an axis at round numbers of the unit that suits its largest.

import { format } from "d3-format";
import { ticks } from "d3-array";

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

export interface BytesTicks {
  ticks: number[];
  unit: string;
  format: (bytes: number) => string;
}

function unitPower(largest: number): number {
  let power = 0;
  while (largest / 1024 ** power >= 1024 && power < UNITS.length - 1) power++;
  return power;
}

export function bytesText(bytes: number): string {
  const power = unitPower(bytes);
  return `${(bytes / 1024 ** power).toFixed(power ? 2 : 0)} ${UNITS[power]}`;
}

export function bytesTicks([low, high]: [number, number]): BytesTicks {
  const power = unitPower(high);
  const size = 1024 ** power;
  const round = ticks(low / size, high / size, 5);
  const step = (round[1] ?? 1) - (round[0] ?? 0);
  const digits = Math.max(0, Math.ceil(-Math.log10(step || 1) - 1e-9));
  const text = format(`.${digits}f`);
  return { ticks: round.map((one) => one * size), unit: UNITS[power]!, format: (bytes) => text(bytes / size) };
}
