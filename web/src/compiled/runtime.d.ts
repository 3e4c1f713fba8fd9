export function mapped(value: unknown): unknown;
