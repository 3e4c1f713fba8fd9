import "./styles.css";
import type { PageDocument } from "./document";
import { el } from "./dom";
import { explorer } from "./explorer/explorer";
import type { ExplorerDocument } from "./explorer/state";
import { page } from "./page";

const SCHEMA = 1;

function start(): void {
  const root = document.getElementById("page");
  const data = document.getElementById("echelon-data");
  if (!root) return;
  root.replaceChildren(...shown(data?.textContent ?? null));
}

function shown(text: string | null): Node[] {
  if (text === null) return [el("p", {}, "This page has no document: it was not written by Echelon.")];
  const found = JSON.parse(text) as PageDocument | ExplorerDocument;
  if (found.schema !== SCHEMA) {
    return [el("p", {}, `This page reads documents of schema ${SCHEMA}, and has one of schema ${found.schema}.`)];
  }
  return found.kind === "explorer" ? explorer(found) : page(found);
}

start();
