// Shows the text of a SageAttention3 Report on the node itself; the picture is the frontend's own
// preview. Nodes of custom packs show no text by default.

import { app } from "../../../scripts/app.js";
import { ComfyWidgets } from "../../../scripts/widgets.js";

const WIDGET = "report_text";

function addTextWidget(node) {
  const { widget } = ComfyWidgets.STRING(node, WIDGET, ["STRING", { multiline: true }], app);
  widget.serialize = false; // neither saved with the workflow ...
  widget.options.serialize = false; // ... nor sent with the prompt
  widget.element.readOnly = true;
  widget.element.placeholder = "Run the workflow to see what ran in which precision, and why.";
  widget.element.style.whiteSpace = "pre"; // the report is an aligned table
  return widget;
}

app.registerExtension({
  name: "SageAttention3.Report",
  beforeRegisterNodeDef(nodeType, nodeData) {
    if (nodeData.name !== "SageAttention3Report") return;

    const { onNodeCreated, onExecuted } = nodeType.prototype;
    nodeType.prototype.onNodeCreated = function (...args) {
      onNodeCreated?.apply(this, args);
      addTextWidget(this);
    };
    nodeType.prototype.onExecuted = function (output) {
      onExecuted?.call(this, output);
      const widget = this.widgets.find(({ name }) => name === WIDGET);
      widget.value = (output.text ?? []).join("\n");
    };
  },
});
