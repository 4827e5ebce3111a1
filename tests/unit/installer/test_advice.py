"""What the doctor says of machines in every kind of trouble."""

import pytest
from sageattention3.installer.advice import advise

from .machines import machine, refused

OLD_DRIVER = (
    "RuntimeError: The NVIDIA driver on your system is too old (found version 11040). Please update"
)
NO_DRIVER = "RuntimeError: Found no NVIDIA driver on your system."
NO_GPU = {"torch__gpus": []}
FLAG = {"flag": "--use-sage-attention", "where": "run_nvidia_gpu.bat", "means": "that"}

# code, level, words that the sentence must hold, what the machine is like
TROUBLES = [
    ("ready", "ready", ["RTX 4090", "int8"], {}),
    (
        "torch-missing",
        "problem",
        ["no torch", "python_embeded"],
        {"torch": {"error": "ModuleNotFoundError: No module named 'torch'"}},
    ),
    (
        "torch-broken",
        "problem",
        ["libcudart"],
        {"torch": {"error": "ImportError: libcudart.so.12: cannot open"}},
    ),
    (
        "torch-without-cuda",
        "note",
        ["without CUDA", "RTX 4090", "Install a torch for CUDA"],
        {**NO_GPU, "torch__cuda": None},
    ),
    (
        "torch-without-cuda",
        "note",
        ["no NVIDIA GPU was found", "*emulation*"],
        {**NO_GPU, "torch__cuda": None, "nvidia": []},
    ),
    (
        "amd",
        "note",
        ["AMD", "nothing to install"],
        {**NO_GPU, "torch__cuda": None, "torch__rocm": "6.4", "nvidia": []},
    ),
    (
        "driver-old",
        "note",
        ["580.88", "CUDA 12.8", "Update the driver"],
        {**NO_GPU, "torch__no_gpu": OLD_DRIVER},
    ),
    (
        "no-gpu",
        "note",
        ["no NVIDIA driver answers", "by themselves"],
        {**NO_GPU, "torch__no_gpu": NO_DRIVER, "nvidia": []},
    ),
    (
        "no-gpu",
        "note",
        ["although the driver sees"],
        {**NO_GPU, "torch__no_gpu": "RuntimeError: x"},
    ),
    (
        "nvrtc-old",
        "note",
        ["CUDA 12.1", "12.8 or newer", "Update torch"],
        {"torch__cuda": "12.1", "nvrtc": {"error": "NvrtcError: NVRTC 12.1 is too old"}},
    ),
    (
        "nvrtc-missing",
        "note",
        ["no NVRTC was found: do this"],
        {"nvrtc": {"error": "NvrtcError: no NVRTC was found: do this"}},
    ),
    (
        "packages-missing",
        "note",
        ["ninja", "while online"],
        {"missing": ["ninja"]},
    ),
    (
        "pack-broken",
        "problem",
        ["safetensors", "Run `install.py`"],
        {"missing": ["safetensors"], "pack": {"error": "ModuleNotFoundError: No module named ..."}},
    ),
    ("pack-broken", "problem", ["ImportError: x"], {"pack": {"error": "ImportError: x"}}),
    (
        "gpu-old",
        "note",
        ["7.5", "8.0"],
        {
            "torch__gpus": [
                {"device": "cuda:0", "name": "RTX 2080", "capability": "7.5", "gib": 8}
            ],
            "backends": refused("needs an NVIDIA GPU of compute capability 8.0 to 12.1"),
        },
    ),
    (
        "kernel-refused",
        "note",
        ["failed its self-test", "Update the driver"],
        {"backends": refused("failed its self-test (plain call): it answers with NaN")},
    ),
    (
        "kernel-refused",
        "note",
        ["could not be built"],
        {"backends": refused("could not be built: no folder can hold built kernels")},
    ),
    ("kernels-broken", "note", ["RuntimeError: x"], {"backends": {"error": "RuntimeError: x"}}),
    ("comfyui-not-found", "note", ["--comfyui"], {"comfyui": {"found": False}}),
    ("comfyui-old", "problem", ["0.3.59", "0.3.60"], {"comfyui__version": "0.3.59"}),
    ("two-copies", "problem", ["Sage3-old", "remove"], {"comfyui__copies": ["Sage3-old"]}),
    ("flag", "note", ["--use-sage-attention", "run_nvidia_gpu.bat"], {"comfyui__flags": [FLAG]}),
    ("other-overrides", "note", ["KJNodes"], {"comfyui__other_packs": ["ComfyUI-KJNodes"]}),
]


@pytest.mark.parametrize(
    ("code", "level", "words", "changes"), TROUBLES, ids=[row[0] for row in TROUBLES]
)
def test_each_trouble_has_a_sentence_that_says_what_and_what_next(code, level, words, changes):
    advice = advise(machine(**changes))
    [found] = [row for row in advice if row.code == code]
    assert found.level == level
    for word in words:
        assert word in found.text
    if code != "ready" and level == "problem":
        assert advice[0] == found, "the gravest comes first"


@pytest.mark.parametrize("changes", [row[3] for row in TROUBLES], ids=[row[0] for row in TROUBLES])
def test_no_machine_is_left_without_advice_or_with_a_sentence_without_an_end(changes):
    advice = advise(machine(**changes))
    assert advice
    assert all(not row.text.endswith((":", ",", " ")) for row in advice)


def test_a_healthy_machine_hears_one_sentence():
    assert [row.code for row in advise(machine())] == ["ready"]


def test_an_old_gpu_beside_a_new_one_is_named_and_the_new_one_is_ready():
    report = machine()
    old = {"device": "cuda:1", "name": "RTX 2080", "capability": "7.5", "gib": 8.0}
    report["torch"]["gpus"].append(old)
    rows = refused("needs an NVIDIA GPU of compute capability 8.0 to 12.1")
    report["backends"] += [{**row, "device": "cuda:1"} for row in rows]
    assert {row.code for row in advise(report)} == {"ready", "gpu-old"}


@pytest.mark.parametrize("version", ["0.3.60", "0.4.0", "0.10.1", "1.0.0"])
def test_hosts_from_the_oldest_supported_on_are_not_complained_about(version):
    assert [row.code for row in advise(machine(comfyui__version=version))] == ["ready"]
