"""pyproject.toml as ComfyUI and its registry read it."""

import pytest
from sageattention3.demo import host
from sageattention3.demo.pack import ROOT

pytestmark = pytest.mark.host


@pytest.fixture(scope="module")
def configuration():
    host.import_comfy()
    from comfy_config.config_parser import extract_node_configuration

    return extract_node_configuration(str(ROOT))


def test_the_registry_finds_what_it_shows_and_what_it_matches_with(configuration):
    project, comfy = configuration.project, configuration.tool_comfy
    assert comfy.display_name == "SageAttention3"
    assert project.name == "sageattention3"
    assert len(project.description) > 20
    assert project.license.file == "LICENSE"
    assert project.supported_comfyui_version == ">=0.3.60"
    assert "OS Independent" in project.supported_os
    assert "GPU :: NVIDIA CUDA" in project.supported_accelerators
    assert project.requires_python == ">=3.10"


def test_the_pack_is_served_by_its_web_directory_alone(configuration):
    """Named here as well, its scripts would be loaded twice."""
    assert not configuration.tool_comfy.web
