"""The documents: links lead somewhere, answers are two clicks away, the README is short."""

import re
from pathlib import Path

import pytest
from sageattention3.demo.pack import ROOT

PAGES = sorted(
    path for pattern in ("*.md", "docs/*.md", "web/docs/**/*.md") for path in ROOT.glob(pattern)
)
INDEX = ROOT / "docs" / "README.md"
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
FENCED = re.compile(r"^```.*?^```", re.M | re.S)

# The questions of docs/README.md, in its order: a new answer belongs there, a lost one fails here.
THEMES = [
    *("Qwen-Image", "Wan", "long videos", "short or odd", "Head sizes", "masks", "flicker"),
    *("steps or layers", "Builds that fail", "Triton", "slower", "switch it off", "torch.compile"),
    *("GPU is not served", "Training"),
]


def text_of(page: Path) -> str:
    return FENCED.sub("", page.read_text("utf-8"))


def links_of(page: Path) -> list[tuple[Path, str]]:
    """(file, anchor) of each link to a file of the project."""
    found = []
    # The frontend looks for what a help page names from the folder of all of them.
    help_pages = [folder for folder in page.parents if folder.parts[-2:] == ("web", "docs")]
    base = help_pages[0] if help_pages else page.parent
    for target in LINK.findall(text_of(page)):
        if not re.match(r"[a-z]+:", target):
            path, _, anchor = target.partition("#")
            found.append(((base / path).resolve() if path else page, anchor))
    return found


def anchors_of(page: Path) -> dict[str, str]:
    """Anchor of each heading, as the usual renderers make them -> the text under it."""
    parts = re.split(r"^#+ +(.+)$", text_of(page), flags=re.M)[1:]
    names = [re.sub(r"[^\w\- ]", "", title).strip().lower() for title in parts[::2]]
    return dict(zip([name.replace(" ", "-") for name in names], parts[1::2], strict=True))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page):
    for file, anchor in links_of(page):
        assert file.exists(), file
        assert not anchor or anchor in anchors_of(file), f"{file.name}#{anchor}"


def test_every_document_is_linked_from_the_index_and_that_from_the_readme():
    linked = {file for file, _ in links_of(INDEX)}
    documents = {page for page in PAGES if page.parent in (INDEX.parent, ROOT)}
    assert documents - linked == {INDEX, ROOT / "README.md"}
    assert INDEX in {file for file, _ in links_of(ROOT / "README.md")}


@pytest.mark.parametrize(("number", "theme"), enumerate(THEMES))
def test_what_people_ask_has_an_answer_two_clicks_from_the_readme(number, theme):
    rows = re.findall(r"^\| (.+?) \| (\[.+) \|$", text_of(INDEX), re.M)
    assert len(rows) == len(THEMES)
    question, answer = rows[number]
    assert theme in question
    path, _, anchor = LINK.search(answer)[1].partition("#")
    assert len(anchors_of((INDEX.parent / path).resolve())[anchor].split()) > 20, "an answer"


def test_the_readme_is_two_screens():
    text = (ROOT / "README.md").read_text("utf-8")
    lines = text.splitlines()
    assert len(lines) <= 80
    assert max(len(line) for line in lines if not line.startswith(("|", "!"))) <= 110
