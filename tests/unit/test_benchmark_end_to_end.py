"""What docs/results.md quotes of benchmarks/end_to_end.py's committed result."""

import json
import re

import pytest
from sageattention3.benchmarks.full_size import WORKLOADS
from sageattention3.demo.pack import ROOT

GIB = 1 << 30


@pytest.fixture(scope="module")
def result():
    path = ROOT / "benchmarks" / "results" / "end_to_end_h200.json"
    return json.loads(path.read_text("utf-8"))


@pytest.fixture(scope="module")
def section():
    page = (ROOT / "docs" / "results.md").read_text("utf-8")
    return re.search(r"^## End to end$.*?(?=^## |\Z)", page, re.M | re.S)[0]


def rows_of(section, title):
    """Rows of the table under ``title``, without its head."""
    table = re.search(rf"^### {title}$.*?^\|[-| ]+\|$\n(.*?)(?:\n\n|\Z)", section, re.M | re.S)[1]
    return table.strip().splitlines()


def measured(row):
    host, ours = row["variants"]["host"], row["variants"]["balanced"]
    cells = (
        row["name"],
        f"{row['tokens']:,}",
        f"{host['seconds']:.3f}",
        f"{ours['seconds']:.3f}",
        f"{ours['step_time']:.2f}",
        f"{row['bar']:.2f}" if row["bar"] else "",
        f"{host['attention_share']:.0%}",
        f"{row['least_step_time']:.2f}",
        f"{host['peak_bytes'] / GIB:.1f} + {(ours['peak_bytes'] - host['peak_bytes']) / GIB:.2f}",
        f"{ours['latent_error']:.4f}",
    )
    return f"| {' | '.join(cells)} |".replace("|  |", "| |")


def parts(row):
    host = row["variants"]["host"]
    kinds = host["kernel_seconds"]
    total = sum(kinds.values())
    shares = [kinds[kind] / total for kind in ("attention", "matrix products", list(kinds)[-1])]
    rate = row["linear_flops"] / kinds["matrix products"] / 1e12
    cells = (row["name"], *(f"{share:.0%}" for share in shares), f"{rate:.0f}")
    return f"| {' | '.join(cells)} |"


def projected(result, name):
    gains = [f"{row['speedup']:.2f}x" for row in result["projection"][name]]
    return f"| {' | '.join((name, *gains))} |"


def test_the_committed_result_has_every_workload_and_says_where_it_comes_from(result):
    assert [row["name"] for row in result["workloads"]] == [w.name for w in WORKLOADS]
    assert [row["bar"] for row in result["workloads"]] == [w.bar for w in WORKLOADS]
    assert re.fullmatch(r"[0-9a-f]{7,40}", result["commit"])
    assert {"machine", "torch", "cuda", "date"} <= set(result)


def test_the_tables_are_those_of_the_result(result, section):
    assert rows_of(section, "Measured") == [measured(row) for row in result["workloads"]]
    assert rows_of(section, "Where the time goes") == [parts(row) for row in result["workloads"]]
    assert rows_of(section, "Projection") == [
        projected(result, row["name"]) for row in result["workloads"]
    ]


def test_pythons_time_is_that_of_the_result(result, section):
    quoted = re.search(r"takes ([\d.]+) us with the host's attention and ([\d.]+) us", section)
    taken = result["enqueue_microseconds"]
    assert quoted.groups() == (f"{taken['host']:.0f}", f"{taken['balanced']:.0f}")
