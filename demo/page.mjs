// ComfyUI's real frontend in headless Chromium, for scripts that do something in it.
// stdin: one JSON job (see frontend.py); stdout: JSON of what the script answers.

import { readFileSync } from "node:fs";
import { mkdtemp, rm } from "node:fs/promises";
import { createRequire } from "node:module";
import { tmpdir } from "node:os";
import { join } from "node:path";

// First-run dialogs and overlays would cover the graph.
const SETTINGS = {
  "Comfy.TutorialCompleted": true,
  "Comfy.Minimap.Visible": false,
  "Comfy.Graph.CanvasInfo": false,
  "Comfy.VueNodes.Enabled": false,
  "Comfy.Workflow.ShowMissingModelsWarning": false,
};

export const job = JSON.parse(readFileSync(0, "utf8"));

// Prints what `action(page)` answers, the page being the frontend with all nodes known.
export async function withFrontend(action) {
  const { chromium } = createRequire(join(job.modules, "any.js"))("playwright-core");
  const profile = await mkdtemp(join(tmpdir(), "frontend-"));
  const context = await chromium.launchPersistentContext(profile, {
    executablePath: job.chromium,
    viewport: { width: job.viewport[0], height: job.viewport[1] },
    args: [
      "--no-sandbox",
      "--disable-gpu",
      "--no-first-run",
      "--disable-background-networking",
      "--disable-component-update",
      "--disable-sync",
    ],
  });
  context.setDefaultTimeout(job.timeout_s * 1000);
  try {
    console.log(JSON.stringify(await action(await openFrontend(context))));
  } finally {
    await context.close();
    await rm(profile, { recursive: true, force: true });
  }
}

async function openFrontend(context) {
  for (const [key, value] of Object.entries(SETTINGS)) {
    const body = JSON.stringify(value);
    await fetch(`${job.url}/api/settings/${key}`, { method: "POST", body });
  }
  const page = context.pages()[0] ?? (await context.newPage());
  await page.goto(job.url, { waitUntil: "domcontentloaded" });
  await page.waitForFunction(
    (type) => window.app?.graph && window.LiteGraph?.registered_node_types[type],
    job.wait_for_node,
  );
  return page;
}
