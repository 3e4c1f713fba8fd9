// Ticks of an axis of bytes, at round numbers of the unit that suits its largest.

import { format } from "d3-format";
import { ticks } from "d3-array";

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

export interface BytesTicks {
  ticks: number[];
  unit: string;
  format: (bytes: number) => string;
}

export function bytesTicks([low, high]: [number, number]): BytesTicks {
  let power = 0;
  while (high / 1024 ** power >= 1024 && power < UNITS.length - 1) power++;
  const size = 1024 ** power;
  const round = ticks(low / size, high / size, 5);
  const step = (round[1] ?? 1) - (round[0] ?? 0);
  const digits = Math.max(0, Math.ceil(-Math.log10(step || 1) - 1e-9));
  const text = format(`.${digits}f`);
  return { ticks: round.map((one) => one * size), unit: UNITS[power]!, format: (bytes) => text(bytes / size) };
}
