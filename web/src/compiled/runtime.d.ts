export function mapped(value: unknown): unknown;

export function mappedLater(records: unknown[]): unknown[];
