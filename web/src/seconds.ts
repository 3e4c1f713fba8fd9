// SPDX-License-Identifier: Apache-2.0
// Seconds as words, with the digits that a scale of `span` seconds needs.

const UNITS: [number, string][] = [
  [1, "s"],
  [1e3, "ms"],
  [1e6, "us"],
  [1e9, "ns"],
];

export function secondsText(seconds: number, span = seconds): string {
  const [scale, unit] = UNITS.find(([one]) => Math.abs(span) * one >= 1) ?? [1, "s"];
  const value = seconds * scale;
  const digits = Math.max(0, 4 - Math.max(1, Math.floor(Math.log10(Math.abs(span * scale) || 1)) + 1));
  return `${value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits })} ${unit}`;
}
