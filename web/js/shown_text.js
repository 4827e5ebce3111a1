// Shows the text of a node's answer on the node itself; pictures are the frontend's own preview.
// Nodes of custom packs show no text by default.

import { app } from "../../../scripts/app.js";
import { ComfyWidgets } from "../../../scripts/widgets.js";

const WIDGET = "report_text";
const MEASURE = "Run the workflow to see what each layer loses, and what max_error makes of that.";
const PLACEHOLDERS = {
  SageAttention3Report: "Run the workflow to see what ran in which precision, and why.",
  SageAttention3Compare: "Run the workflow to see how far the result is from the reference.",
  SageAttention3Calibrate: MEASURE,
  SageAttention3CalibrateGuider: MEASURE,
  SageAttention3LoadProfile: MEASURE,
  SageAttention3Benchmark: "Run the workflow to see which preset is fastest on this GPU.",
};

function addTextWidget(node, placeholder) {
  const { widget } = ComfyWidgets.STRING(node, WIDGET, ["STRING", { multiline: true }], app);
  widget.serialize = false; // neither saved with the workflow ...
  widget.options.serialize = false; // ... nor sent with the prompt
  widget.element.readOnly = true;
  widget.element.placeholder = placeholder;
  widget.element.style.whiteSpace = "pre"; // some texts are aligned tables
  return widget;
}

app.registerExtension({
  name: "SageAttention3.ShownText",
  beforeRegisterNodeDef(nodeType, nodeData) {
    const placeholder = PLACEHOLDERS[nodeData.name];
    if (!placeholder) return;

    const { onNodeCreated, onExecuted } = nodeType.prototype;
    nodeType.prototype.onNodeCreated = function (...args) {
      onNodeCreated?.apply(this, args);
      addTextWidget(this, placeholder);
    };
    nodeType.prototype.onExecuted = function (output) {
      onExecuted?.call(this, output);
      const widget = this.widgets.find(({ name }) => name === WIDGET);
      widget.value = (output.text ?? []).join("\n");
    };
  },
});
