"""Help pages and translations say the same as the nodes."""

import json
import re
import urllib.request

import pytest
from sageattention3 import NODE_CLASS_MAPPINGS, WEB_DIRECTORY
from sageattention3.demo.graph import inputs_of
from sageattention3.demo.pack import ROOT

LANGUAGES = ("en", "zh")
DOCS = ROOT / WEB_DIRECTORY / "docs"

pytestmark = pytest.mark.server


@pytest.fixture(params=NODE_CLASS_MAPPINGS)
def node(request):
    return request.param


def translation(language, file="nodeDefs"):
    return json.loads((ROOT / "locales" / language / f"{file}.json").read_text("utf-8"))


def test_english_is_the_nodes_own_words(node, object_info):
    info = object_info[node]
    own = {
        "display_name": info["display_name"],
        "description": info["description"],
        "inputs": {
            name: {"name": name} | ({"tooltip": opts["tooltip"]} if "tooltip" in opts else {})
            for name, (_, opts) in inputs_of(info).items()
        },
        "outputs": {
            str(slot): {"name": name, "tooltip": tooltip}
            for slot, (name, tooltip) in enumerate(
                zip(info["output_name"], info["output_tooltips"], strict=True)
            )
        },
    }
    assert translation("en")[node] == own


@pytest.mark.parametrize("language", [code for code in LANGUAGES if code != "en"])
def test_a_translation_has_every_text_that_english_has(language):
    assert shape(translation(language)) == shape(translation("en"))
    assert shape(translation(language, "main")) == shape(translation("en", "main"))


def shape(texts):
    """The keys, with every text replaced by whether it says anything."""
    if isinstance(texts, dict):
        return {key: shape(value) for key, value in texts.items()}
    return bool(texts.strip())


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_translation_keeps_the_words_that_widgets_understand(language):
    english = translation("en")
    for node, texts in translation(language).items():
        for name, text in texts["inputs"].items():
            words = choices_in(english[node]["inputs"][name].get("tooltip", ""))
            assert words <= choices_in(text.get("tooltip", "")), (node, name)


CHOICES = ("balanced", "quality", "speed", "custom", "int8", "fp4", "int8_fp4", "fp16", "same")


def choices_in(text):
    """The menu values that a tooltip explains: those before a colon."""
    words = set(re.findall(r"[a-z0-9_]+(?=:)", text.replace("：", ":")))
    return words & set(CHOICES)


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_category_has_a_name(language, object_info):
    categories = {object_info[node]["category"] for node in NODE_CLASS_MAPPINGS}
    assert categories == set(translation(language, "main")["nodeCategories"])


def test_the_help_page_names_every_widget(node, object_info):
    english = (DOCS / f"{node}.md").read_text("utf-8")
    chinese = (DOCS / node / "zh.md").read_text("utf-8")
    if node == "SageAttention3LoadDiffusionModel":
        assert "SageAttention3 Patch" in english  # its widgets are described there
        return
    labels = translation("zh")[node]["inputs"]
    for name in inputs_of(object_info[node]):
        assert f"**{name}**" in english
        assert f"**{labels[name]['name']}**" in chinese


def test_the_server_offers_the_translations_and_the_help_pages(node, object_info, server):
    translations = fetch(server, "/api/i18n")
    for language in LANGUAGES:
        texts = json.loads(translations)[language]
        assert texts["nodeDefs"][node] == translation(language)[node]
    base = f"/extensions/{object_info[node]['python_module'].removeprefix('custom_nodes.')}/docs"
    for path in (f"{node}.md", f"{node}/zh.md"):
        assert fetch(server, f"{base}/{path}") == (DOCS / path).read_bytes()


def fetch(server, path):
    with urllib.request.urlopen(server.url + path) as answer:
        return answer.read()
