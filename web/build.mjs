// Writes the page into the package; `node build.mjs FOLDER` writes it elsewhere, for a comparison.
import { copyFileSync, mkdirSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const here = dirname(fileURLToPath(import.meta.url));
const out = process.argv[2] ?? join(here, "..", "kvrag", "server", "page");

mkdirSync(out, { recursive: true });
await build({
  absWorkingDir: here,
  entryPoints: { app: "src/main.ts" },
  outdir: out,
  bundle: true,
  minify: true,
  format: "esm",
  target: "es2022",
  legalComments: "none",
});
await build({
  absWorkingDir: here,
  entryPoints: ["src/app.css"],
  outdir: out,
  bundle: true,
  minify: true,
  target: "es2022",
});
copyFileSync(join(here, "src", "index.html"), join(out, "index.html"));
