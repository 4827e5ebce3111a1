"""The first minutes of somebody new, by mouse and keyboard in ComfyUI's real frontend."""

import json
from pathlib import Path

import pytest
from sageattention3.demo.frontend import run_script
from sageattention3.demo.graph import PATCH_NODE
from sageattention3.demo.pack import ROOT

PICTURES = ROOT / "output" / "browser"  # kept, to look at
TEMPLATES = sorted((ROOT / "workflows").glob("*.json"))
TEMPLATE = ROOT / "workflows" / "flux_dev_sageattention3.json"

pytestmark = [pytest.mark.browser, pytest.mark.server, pytest.mark.slow]


@pytest.fixture(scope="module")
def steps(server):
    PICTURES.mkdir(parents=True, exist_ok=True)
    job = {
        "first": PATCH_NODE,
        "template": TEMPLATE.stem.replace("_", " "),
        "pictures": str(PICTURES),
    }
    return run_script(Path(__file__).with_name("first_steps.mjs"), server.url, job)


def test_the_search_for_sage_finds_our_nodes_first(steps, object_info):
    names = [text.splitlines()[0].strip() for text in steps["found"]]
    names = [name for name in names if "(demo)" not in name]  # no creator has those
    ours = [i["display_name"] for i in object_info.values() if i["category"] == "SageAttention3"]
    assert len(ours) >= 3
    assert set(names[: len(ours)]) == set(ours)
    assert names[0] == "SageAttention3 Patch"


def test_the_help_page_opens_and_is_ours(steps):
    page = (ROOT / "web" / "docs" / f"{PATCH_NODE}.md").read_text("utf-8")
    titles = [line.strip("# ") for line in page.splitlines() if line.startswith("#")]
    assert all(title in steps["help"] for title in titles)


def test_the_template_browser_shows_every_workflow_with_its_picture(steps):
    assert steps["pictures"] == [480] * len(TEMPLATES)


def test_a_click_on_a_template_opens_the_shipped_workflow(steps):
    nodes = json.loads(TEMPLATE.read_text("utf-8"))["nodes"]
    assert sorted(steps["opened"]) == sorted(node["type"] for node in nodes)
    assert steps["errors"] == []
