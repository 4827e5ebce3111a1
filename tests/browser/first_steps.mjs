// What somebody new does by hand: searches for the node, reads its help, opens a template.

import { job, withFrontend } from "../../demo/page.mjs";

async function search(page, words) {
  await page.waitForFunction(() => window.app.graph._nodes.length > 0); // the first graph is up
  const empty = { x: 1700, y: 1000 };
  await page.mouse.dblclick(empty.x, empty.y);
  const field = page.getByRole("combobox").last();
  await field.pressSequentially(words, { delay: 30 });
  await page.getByRole("option").first().waitFor();
  await page.waitForTimeout(1000); // the list settles
  const options = await page.getByRole("option").allInnerTexts();
  return options.filter((text) => text.trim());
}

async function readHelp(page) {
  await page.evaluate(() => window.app.canvas.selectNode(window.app.graph._nodes.at(-1)));
  await page.getByTestId("info-button").click();
  const help = page.locator(".node-help-content");
  await help.getByRole("table").first().waitFor();
  return await help.innerText();
}

async function openTemplate(page, words, shot) {
  await page.getByRole("button", { name: "Templates" }).first().click();
  const card = page.getByText(words, { exact: true });
  await card.waitFor();
  await page.waitForTimeout(1500); // thumbnails load
  const pictures = await page
    .getByRole("dialog")
    .locator("img")
    .evaluateAll((images) => images.map((image) => image.naturalWidth));
  await page.screenshot({ path: shot });
  await card.click();
  await page.waitForFunction(() =>
    window.app.graph._nodes.some((node) => node.type === "SageAttention3Report"),
  );
  return pictures;
}

const nodes = (page) => page.evaluate(() => window.app.graph._nodes.map((node) => node.type));

await withFrontend(async (page) => {
  const answer = { errors: [] };
  page.on("pageerror", (error) => answer.errors.push(String(error)));
  answer.found = await search(page, "sage");
  await page.screenshot({ path: `${job.pictures}/search.png` });
  await page.keyboard.press("Enter");
  await page.waitForFunction((type) => window.app.graph._nodes.at(-1).type === type, job.first);
  answer.help = await readHelp(page);
  await page.screenshot({ path: `${job.pictures}/help.png` });
  answer.pictures = await openTemplate(page, job.template, `${job.pictures}/templates.png`);
  answer.opened = await nodes(page);
  return answer;
});
