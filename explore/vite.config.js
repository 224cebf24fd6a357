// Builds the page into the Python package: three files with fixed names, the same bytes for the same sources.
import { readFileSync } from "node:fs";
import { svelte } from "@sveltejs/vite-plugin-svelte";
import { defineConfig } from "vite";

const parts = ["svelte", "d3-scale", "d3-shape", "d3-array", "d3-format", "d3-interpolate", "d3-color", "d3-path"];

// The licences of what the bundle contains ask to go with it.
const licences = {
  name: "licences",
  generateBundle() {
    const texts = parts.map((name) => {
      const folder = `node_modules/${name}`;
      const file = ["LICENSE", "LICENSE.md"].map((one) => `${folder}/${one}`);
      for (const path of file) {
        try {
          return `${name}\n\n${readFileSync(path, "utf8").trim()}\n`;
        } catch {}
      }
      throw new Error(`${name} has no licence file`);
    });
    this.emitFile({ type: "asset", fileName: "licences.txt", source: texts.join("\n----\n\n") });
  },
};

export default defineConfig({
  base: "./",
  plugins: [svelte({ compilerOptions: { runes: true } }), licences],
  build: {
    outDir: "../src/everyformer/explore/page",
    emptyOutDir: true,
    modulePreload: false,
    rollupOptions: {
      output: { entryFileNames: "page.js", assetFileNames: "page.[ext]", codeSplitting: false },
    },
  },
});
