// A strip of the model's layers on the patching nodes, one cell each, to click: it only edits the
// text of fp16_layers, so the graph stays plain data. The first run fills it, since the server knows
// the layers; where the frontend has no such widgets the text stays the way to name them.

import { app } from "../../../scripts/app.js";

const NODES = ["SageAttention3Patch", "SageAttention3LoadDiffusionModel"];
const TEXT = "fp16_layers";
const CELL = { width: 12, height: 14, gap: 2 };
const LABEL_WIDTH = 56;
const LINE = 16; // of the words below
const SIDE = 10; // the frontend's own margin around a widget
// Those of the report's heat strip; measured errors go from the first to the second.
const FP16 = "#d0d0d0";
const PRECISIONS = { int8: "#56b4e9", int8_fp4: "#009e73", fp4: "#e69f00" };
const ERRORS = [
  [255, 247, 188],
  [213, 94, 0],
];

// --- the text ------------------------------------------------------------------------------------

const partsOf = (text) => text.split(/[,;\n\r]/).map((part) => part.trim()).filter(Boolean);

// The layers that `text` names, and its parts that name layers in another way than by their ids.
// `known` is a text and what the server made of it.
function readSelection(text, known, ids) {
  if (text.trim() === known.text.trim()) return { chosen: new Set(known.chosen), others: [] };
  const parts = partsOf(text);
  return {
    chosen: new Set(parts.filter((part) => ids.includes(part))),
    others: parts.filter((part) => !ids.includes(part)),
  };
}

function toggle({ chosen, others }, id, ids) {
  const next = new Set(chosen);
  if (!next.delete(id)) next.add(id);
  return [...others, ...ids.filter((each) => next.has(each))].join(", ");
}

// --- the strip -----------------------------------------------------------------------------------

function errorColour(error, worst) {
  const share = worst > 0 ? Math.sqrt(error / worst) : 0; // most errors are far below the worst
  const mix = ERRORS[0].map((low, i) => Math.round(low + share * (ERRORS[1][i] - low)));
  return `rgb(${mix.join(",")})`;
}

let strips = 0;

class LayerStrip {
  constructor(node) {
    this.node = node;
    this.text = node.widgets.find(({ name }) => name === TEXT);
    this.stacks = new Map();
    this.element = document.createElement("div");
    Object.assign(this.element.style, {
      overflow: "hidden",
      font: "11px sans-serif",
      color: "var(--input-text, #ddd)",
      userSelect: "none",
    });
    const { callback } = this.text;
    this.text.callback = (...args) => {
      callback?.apply(this.text, args);
      if (this.known) this.draw();
    };
    // There from the start, if hidden: Nodes 2.0 overlooks widgets that come later. By a name of its
    // own: in another workflow's node of the same id, Nodes 2.0 keeps the element of that name.
    strips += 1;
    this.widget = node.addDOMWidget(`layers ${strips}`, "sageattention3_layers", this.element, {
      serialize: false, // not sent with the prompt ...
      getMinHeight: () => this.height(),
      getMaxHeight: () => this.height(),
    });
    this.widget.serialize = false; // ... nor saved with the workflow
    this.widget.hidden = true;
  }

  get linked() {
    return this.node.inputs?.some(({ widget, link }) => widget?.name === TEXT && link != null);
  }

  show({ fp16_layers: text, measured, layers }) {
    this.measured = measured; // the precision of the errors
    const chosen = layers.filter(({ kept }) => kept === TEXT).map(({ id }) => id);
    this.known = { text, chosen };
    this.ids = layers.map(({ id }) => id);
    this.worst = Math.max(...layers.map(({ error }) => error ?? 0));
    this.stacks = new Map();
    for (const layer of layers) {
      this.stacks.set(layer.stack, [...(this.stacks.get(layer.stack) ?? []), layer]);
    }
    this.widget.hidden = false;
    this.draw();
    const [width, height] = this.node.size;
    const [, least] = this.node.computeSize();
    this.node.setSize([width, Math.max(height, least)]);
  }

  height() {
    if (this.widget.hidden) return 0;
    const room = this.node.size[0] - 2 * SIDE - LABEL_WIDTH;
    const columns = Math.max(1, Math.floor(room / (CELL.width + CELL.gap)));
    const lines = [...this.stacks.values()].map((row) => Math.ceil(row.length / columns));
    const cells = lines.reduce((sum, count) => sum + count * (CELL.height + CELL.gap), 0);
    return cells + LINE + 2 * SIDE;
  }

  draw() {
    const selection = readSelection(this.text.value, this.known, this.ids);
    const rows = [...this.stacks].map(([stack, layers]) => {
      const row = document.createElement("div");
      Object.assign(row.style, { display: "flex" });
      const label = document.createElement("div");
      label.textContent = stack;
      Object.assign(label.style, { flex: `0 0 ${LABEL_WIDTH}px`, overflow: "hidden" });
      const cells = document.createElement("div");
      Object.assign(cells.style, { display: "flex", flexWrap: "wrap" });
      cells.append(...layers.map((layer) => this.cell(layer, selection)));
      row.append(label, cells);
      return row;
    });
    const words = document.createElement("div");
    words.textContent = this.words(selection);
    Object.assign(words.style, { whiteSpace: "nowrap", lineHeight: `${LINE}px`, opacity: 0.7 });
    this.element.replaceChildren(...rows, words);
  }

  words({ others }) {
    if (this.linked) return `${TEXT} comes from a link`;
    if (others.length) return `run to see: ${others.join(", ")}`;
    return "click a layer to keep it in fp16";
  }

  cell({ id, kept, precision, error }, selection) {
    const cell = document.createElement("div");
    const chosen = selection.chosen.has(id);
    const byOther = kept && kept !== TEXT ? kept : "";
    const inFp16 = chosen || byOther;
    const measured = error === undefined ? "" : `; ${this.measured} error ${error.toPrecision(2)}`;
    const why = chosen ? `fp16 by ${TEXT}` : byOther ? `fp16 by ${byOther}` : precision;
    cell.title = `${id}: ${why}${measured}`;
    cell.dataset.layer = id;
    cell.dataset.fp16 = inFp16 ? "yes" : "no";
    Object.assign(cell.style, {
      width: `${CELL.width}px`,
      height: `${CELL.height}px`,
      margin: `0 ${CELL.gap}px ${CELL.gap}px 0`,
      boxSizing: "border-box",
      borderRadius: "2px",
      cursor: this.linked ? "default" : "pointer",
      background: inFp16 ? FP16 : (PRECISIONS[precision] ?? FP16),
      border: chosen ? "2px solid #ffffff" : "none",
    });
    if (error !== undefined) {
      // What is kept in fp16 shows its error in the lower half only.
      const colour = errorColour(error, this.worst);
      cell.style.background = inFp16 ? `linear-gradient(${FP16} 50%, ${colour} 50%)` : colour;
    }
    cell.addEventListener("click", () => {
      if (this.linked) return;
      this.text.value = toggle(readSelection(this.text.value, this.known, this.ids), id, this.ids);
      this.text.callback(this.text.value);
      app.graph.setDirtyCanvas(true, true);
    });
    return cell;
  }
}

app.registerExtension({
  name: "SageAttention3.LayerStrip",
  beforeRegisterNodeDef(nodeType, nodeData) {
    if (!NODES.includes(nodeData.name)) return;

    const { onNodeCreated, onExecuted } = nodeType.prototype;
    nodeType.prototype.onNodeCreated = function (...args) {
      onNodeCreated?.apply(this, args);
      if (this.addDOMWidget) this.layerStrip = new LayerStrip(this);
    };
    nodeType.prototype.onExecuted = function (output) {
      onExecuted?.call(this, output);
      const [shown] = output?.layers ?? [];
      if (shown) this.layerStrip?.show(shown);
    };
  },
});
