"""What docs/how-it-works.md quotes of the forecast's benchmark, and that its sums are right."""

import json
import re
from statistics import median

from sageattention3.demo.pack import ROOT

RESULT = json.loads((ROOT / "benchmarks" / "results" / "forecast.json").read_text("utf-8"))
DOC = " ".join((ROOT / "docs" / "how-it-works.md").read_text("utf-8").split())


def ratios(steps):
    rows = [row for row in RESULT["rows"] if row["steps"] == steps]
    assert len({row["family"] for row in rows}) == 16
    return [row["measured"] / row["forecast"] for row in rows]


def test_the_summary_is_that_of_the_rows():
    for name, found in RESULT["measured over forecast"].items():
        all_ratios = ratios(int(name.split()[0]))
        assert abs(found["median"] - median(all_ratios)) < 0.01
        assert abs(found["largest"] - max(all_ratios)) < 0.01


def test_the_ratios_in_the_docs_are_those_of_the_result():
    four, twelve = (RESULT["measured over forecast"][f"{steps} steps"] for steps in (4, 12))
    [quoted] = re.findall(
        r"at most ([\d.]+) times the forecast with 4 steps \(median ([\d.]+)\) and ([\d.]+) times "
        r"with 12 \(median ([\d.]+)\)",
        DOC,
    )
    figures = [four["largest"], four["median"], twelve["largest"], twelve["median"]]
    assert [float(figure) for figure in quoted] == figures
