"""Loads the pack before any test module imports ``sageattention3.*``; the shared server."""

import importlib.util
from pathlib import Path

import pytest
from hypothesis import settings

# An example may take as long as a busy machine needs: timing never decides a test.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

_spec = importlib.util.spec_from_file_location(
    "sageattention3_loader", Path(__file__).resolve().parent.parent / "demo" / "pack.py"
)
_loader = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_loader)
_loader.load_pack()


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items):
    """Keep all that shares the server in one worker: a second server would only share the CPU."""
    for item in items:
        if "server" in item.fixturenames:
            item.add_marker(pytest.mark.xdist_group("server"))


@pytest.fixture(scope="session")
def server():
    """A ComfyUI server with the pack, shared by every test that asks for it."""
    from sageattention3.demo import host
    from sageattention3.demo.server import Server

    with Server(host.ROOT / "output" / "tests" / "server.log") as running:
        yield running


@pytest.fixture(scope="session")
def object_info(server):
    """The nodes of that server."""
    return server.object_info()
