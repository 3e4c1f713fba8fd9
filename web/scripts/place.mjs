// SPDX-License-Identifier: Apache-2.0
// Put the built page where the Python package has it, with the place for its document.
import { readFileSync, writeFileSync } from "node:fs";

const built = readFileSync("build/index.html", "utf8");
if (built.split("<!--echelon:data-->").length !== 2) throw new Error("no place for the document");
writeFileSync("../src/echelon/page/page.html", built.trimEnd() + "\n");
