"""What `install.py build` shows, and what it builds for."""

import sys

import pytest
import torch
from sageattention3.kernels.jit import archs, cache, cli
from sageattention3.kernels.jit.build import Progress


@pytest.fixture
def kernels(saxpy, monkeypatch):
    """Two kernels in place of the pack's."""
    variants = [saxpy(1), saxpy(2)]
    monkeypatch.setattr(cli, "registered", lambda: variants)
    return variants


def gpus(monkeypatch, *capabilities):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(capabilities))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capabilities[index])


def test_in_a_log_there_is_a_line_for_each_kernel(kernels, capsys):
    assert cli.main(["--brief", "--arch", "sm_90"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["2", "[0/2]", "[1/2]", "[2/2]"]


def test_on_a_terminal_there_is_one_line_that_fills_up(monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    screen = cli._Screen()
    for done in range(4):
        screen.show(Progress(done, 3, 1.0, "a kernel of a long name " * 10))
    screen.close()
    drawn = capsys.readouterr().out
    assert drawn.count("\n") == 1
    assert [line.count("#") for line in drawn.split("\r")[1:]] == [0, 10, 20, 30]
    assert len({len(line.rstrip("\n")) for line in drawn.split("\r")[1:]}) == 1


def test_only_this_machines_gpus_are_built_for(kernels, monkeypatch):
    """QA-39."""
    gpus(monkeypatch, (8, 6), (8, 6))
    assert cli.main(["--brief"]) == 0
    assert len(cache.entries()) == 2


def test_an_old_gpu_does_not_keep_a_new_one_from_its_kernels(kernels, monkeypatch, capsys):
    gpus(monkeypatch, (7, 5), (8, 9))
    assert cli.main(["--brief"]) == 0
    assert len(cache.entries()) == 2
    gpus(monkeypatch, (7, 5))
    assert cli.main(["--brief"]) == 1
    assert "7.5 is not supported" in capsys.readouterr().err


def test_supported_is_what_has_a_target():
    supported = [sm for sm in range(50, 140) if archs.is_supported(sm)]
    assert supported[0] == 80
    for sm in supported:
        assert archs.target(sm, (13, 5))
