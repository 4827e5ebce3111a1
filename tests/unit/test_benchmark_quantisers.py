"""What docs/kernel-notes-int8.md quotes of benchmarks/quantisers.py."""

import json
import re

import pytest
from sageattention3.demo.pack import ROOT


@pytest.mark.parametrize(("shape", "tokens"), [("4k, D128", 4096), ("16k, D128", 16384)])
def test_the_table_in_the_docs_is_that_of_the_result(shape, tokens):
    path = ROOT / "benchmarks" / "results" / "quantisers_h200.json"
    result = json.loads(path.read_text("utf-8"))
    [row] = [row for row in result["rows"] if (row["shape"], row["quantiser"]) == (shape, "int8")]
    rates = [round(100 * row[kind] / result["copy"]) for kind in ("asked", "needed")]
    document = (ROOT / "docs" / "kernel-notes-int8.md").read_text("utf-8")
    [line] = re.findall(rf"^\| B2 H24 S{tokens} D128 \|(.*)$", document, re.MULTILINE)
    quoted = [int(x) for x in re.findall(r"\d+", line)]
    assert quoted == [round(row["milliseconds"] * 1e3), *rates]
