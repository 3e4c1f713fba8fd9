// SPDX-License-Identifier: Apache-2.0
export function mapped(value: unknown): unknown;

export function mappedLater(records: unknown[]): unknown[];
