// Opens workflows in ComfyUI's real frontend, headless, and says what it saw.
// stdin: one JSON job (see frontend.py); stdout: one JSON answer per visit, in a list.

import { job, withFrontend } from "./page.mjs";

async function loadWorkflow(page, workflow) {
  await page.evaluate((graph) => window.app.loadGraphData(graph), workflow);
  await waitForNodes(page, workflow.nodes.length);
}

// Replaces the graph by one made from an API prompt, in the places and frames of the workflow.
async function loadPrompt(page, prompt, workflow) {
  await page.evaluate(
    ([output, { nodes, groups }]) => {
      const { app, LiteGraph } = window;
      app.loadApiJson(output, "run");
      for (const { id, pos, size } of nodes) {
        const node = app.graph.getNodeById(id);
        if (node) Object.assign(node, { pos, size });
      }
      for (const frame of groups) {
        const group = new LiteGraph.LGraphGroup();
        group.configure(frame);
        app.graph.add(group);
      }
    },
    [prompt, workflow],
  );
  await waitForNodes(page, Object.keys(prompt).length);
}

async function waitForNodes(page, count) {
  await page.waitForFunction((n) => window.app.graph._nodes.length === n, count);
}

const ROOM = { side: 90, top: 150 }; // of the side bar and the top bar, in pixels

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

async function shoot(page, path) {
  const graph = await page.evaluate(fitGraph, ROOM);
  await page.waitForTimeout(1000); // the canvas redraws on its own clock
  if (job.crop_pad === null) return await page.screenshot({ path });
  const { x, y, width, height } = graph;
  const pad = job.crop_pad;
  const clip = { x: x - pad, y: y - pad, width: width + 2 * pad, height: height + 2 * pad };
  await page.screenshot({ path, clip });
}

// Presses the Run button as a user would and waits for the server's verdict.
async function run(page) {
  const history = async () => Object.values(await (await fetch(`${job.url}/history`)).json());
  const before = (await history()).length;
  await page.getByTestId("queue-button").getByRole("button").first().click();
  const end = Date.now() + job.timeout_s * 1000;
  while (Date.now() < end) {
    const entries = await history();
    if (entries.length > before) return entries.at(-1).status;
    await page.waitForTimeout(200);
  }
  throw new Error("the run did not end in time, or the server refused the prompt");
}

function describeNodes() {
  return window.app.graph._nodes.map((node) => ({
    id: node.id,
    type: node.type,
    title: node.getTitle(),
    bounds: [...node.boundingRect],
    widgets: Object.fromEntries((node.widgets ?? []).map(({ name, value }) => [name, value])),
    images: (node.imgs ?? []).map((image) => [image.naturalWidth, image.naturalHeight]),
  }));
}

const promptOf = (page) =>
  page.evaluate(async () => (await window.app.graphToPrompt()).output);

function drawWithVue(page, enabled) {
  return page.evaluate(
    (value) => window.app.extensionManager.setting.set("Comfy.VueNodes.Enabled", value),
    enabled,
  );
}

async function visit(page, stop) {
  const { workflow, run: prompt, loaded_png, done_png, clicks, look_at, vue_nodes } = stop;
  const answer = { errors: [], status: null, clicked_prompt: null, seen: [] };
  const note = (error) => answer.errors.push(String(error));
  page.on("pageerror", note);
  await drawWithVue(page, vue_nodes);
  await loadWorkflow(page, workflow);
  answer.prompt = await promptOf(page);
  if (loaded_png) await shoot(page, loaded_png);
  if (prompt) {
    await loadPrompt(page, prompt, workflow);
    answer.status = await run(page);
    await page.waitForTimeout(1500); // previews load
  }
  if (clicks.length) {
    await page.evaluate(fitGraph, ROOM);
    await page.waitForTimeout(500); // widgets follow the canvas
    for (const selector of clicks) await page.locator(selector).click();
    answer.clicked_prompt = await promptOf(page);
  }
  if (look_at) {
    answer.seen = await page
      .locator(look_at)
      .evaluateAll((elements) => elements.map((element) => ({ ...element.dataset })));
  }
  if (done_png) await shoot(page, done_png);
  answer.nodes = await page.evaluate(describeNodes);
  page.off("pageerror", note);
  return answer;
}

await withFrontend(async (page) => {
  const answers = [];
  for (const stop of job.visits) answers.push(await visit(page, stop));
  return answers;
});
