// Opens a workflow in ComfyUI's real frontend, headless, and says what it saw.
// stdin: one JSON job (see frontend.py); stdout: one JSON answer.

import { readFileSync } from "node:fs";
import { mkdtemp, rm } from "node:fs/promises";
import { createRequire } from "node:module";
import { tmpdir } from "node:os";
import { join } from "node:path";

const job = JSON.parse(readFileSync(0, "utf8"));
const { chromium } = createRequire(join(job.modules, "any.js"))("playwright-core");

// First-run dialogs and overlays would cover the graph.
const SETTINGS = {
  "Comfy.TutorialCompleted": true,
  "Comfy.Minimap.Visible": false,
  "Comfy.Graph.CanvasInfo": false,
  "Comfy.VueNodes.Enabled": false,
  "Comfy.Workflow.ShowMissingModelsWarning": false,
  "Comfy.Locale": job.locale,
};

async function openFrontend(context) {
  for (const [key, value] of Object.entries(SETTINGS)) {
    const body = JSON.stringify(value);
    await fetch(`${job.url}/api/settings/${key}`, { method: "POST", body });
  }
  const page = context.pages()[0] ?? (await context.newPage());
  page.on("pageerror", (error) => answer.errors.push(String(error)));
  await page.goto(job.url, { waitUntil: "domcontentloaded" });
  await page.waitForFunction(
    (types) => window.app?.graph && types.every((t) => window.LiteGraph?.registered_node_types[t]),
    job.workflow.nodes.map((node) => node.type).filter((type) => !type.endsWith("Note")),
  );
  return page;
}

// Scales the canvas so that the whole graph stands free of the side bar and the top bar; answers
// with the graph's rectangle in page pixels.
function fitGraph({ side, top: above }) {
  const { graph, canvas } = window.app;
  const boxes = [...graph._nodes, ...graph._groups].map((item) => [...item.boundingRect]);
  const left = Math.min(...boxes.map((b) => b[0]));
  const top = Math.min(...boxes.map((b) => b[1]));
  const width = Math.max(...boxes.map((b) => b[0] + b[2])) - left;
  const height = Math.max(...boxes.map((b) => b[1] + b[3])) - top;
  const room = [window.innerWidth - 2 * side, window.innerHeight - above - side];
  const scale = Math.min(room[0] / width, room[1] / height, 1);
  canvas.ds.scale = scale;
  canvas.ds.offset = [side / scale - left, above / scale - top];
  canvas.setDirty(true, true);
  return { x: side, y: above, width: width * scale, height: height * scale };
}

function describeNodes() {
  return window.app.graph._nodes.map((node) => ({
    id: node.id,
    type: node.type,
    title: node.getTitle(),
    bounds: [...node.boundingRect],
    widgets: Object.fromEntries(
      (node.widgets ?? []).map((widget) => [widget.name, widget.label ?? widget.name]),
    ),
    texts: (node.widgets ?? []).map((widget) => widget.value).filter((v) => typeof v === "string"),
    images: (node.imgs ?? []).map((image) => [image.naturalWidth, image.naturalHeight]),
  }));
}

async function shoot(page, path) {
  const graph = await page.evaluate(fitGraph, { side: 90, top: 130 });
  await page.waitForTimeout(1000); // the canvas redraws on its own clock
  const pad = 12;
  const clip = {
    x: graph.x - pad,
    y: graph.y - pad,
    width: graph.width + 2 * pad,
    height: graph.height + 2 * pad,
  };
  await page.screenshot({ path, clip: job.crop ? clip : undefined });
}

async function history() {
  return await (await fetch(`${job.url}/history`)).json();
}

// Presses the Run button as a user would and waits for the server's verdict.
async function run(page) {
  const before = Object.keys(await history()).length;
  await page.getByTestId("queue-button").getByRole("button").first().click();
  for (;;) {
    const entries = Object.values(await history());
    if (entries.length > before) return entries.at(-1).status;
    await page.waitForTimeout(200);
  }
}

const answer = { errors: [], nodes: [], prompt: null, status: null };
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
  const page = await openFrontend(context);
  await page.evaluate((workflow) => window.app.loadGraphData(workflow), job.workflow);
  await page.waitForFunction((n) => window.app.graph._nodes.length === n, job.workflow.nodes.length);
  answer.prompt = await page.evaluate(async () => (await window.app.graphToPrompt()).output);
  if (job.loaded_png) await shoot(page, job.loaded_png);
  if (job.run) {
    answer.status = await run(page);
    await page.waitForTimeout(1500); // previews load
    if (job.done_png) await shoot(page, job.done_png);
  }
  answer.nodes = await page.evaluate(describeNodes);
} finally {
  await context.close();
  await rm(profile, { recursive: true, force: true });
}
console.log(JSON.stringify(answer));
