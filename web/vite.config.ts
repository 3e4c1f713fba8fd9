// SPDX-License-Identifier: Apache-2.0
import { defineConfig } from "vite";
import { viteSingleFile } from "vite-plugin-singlefile";

// One file, without an outside address, straight into the Python package.
export default defineConfig({
  plugins: [viteSingleFile({ removeViteModuleLoader: true })],
  build: {
    target: "es2022",
    outDir: "build",
    emptyOutDir: true,
    reportCompressedSize: false,
  },
});
