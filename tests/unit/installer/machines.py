"""Reports of machines that a test has not got."""

import copy
from typing import Any

_HEALTHY: dict[str, Any] = {
    "pack": {"version": "0.1.0", "nodes": ["SageAttention3Patch"]},
    "python": {"version": "3.12.9", "kind": "embedded", "system": "Windows AMD64"},
    "comfyui": {"found": True, "version": "0.3.75", "flags": [], "other_packs": [], "copies": []},
    "packages": {"cuda-bindings": "12.9.4", "ninja": "1.13.0"},
    "missing": [],
    "torch": {
        "version": "2.9.1+cu128",
        "cuda": "12.8",
        "rocm": None,
        "no_gpu": None,
        "gpus": [
            {
                "device": "cuda:0",
                "name": "NVIDIA GeForce RTX 4090",
                "capability": "8.9",
                "gib": 24.0,
            }
        ],
    },
    "nvidia": [{"name": "NVIDIA GeForce RTX 4090", "driver": "580.88"}],
    "nvrtc": {"version": "12.8", "of_package": True},
    "cache": {"kernels": 24, "mib": 2.1},
    "backends": [
        {
            "device": "cuda:0",
            "precision": "fp4",
            "backend": "sm120_fp4",
            "native": True,
            "usable": False,
            "reason": "sm120_fp4 needs an NVIDIA GPU of compute capability 12.0 to 12.1",
        },
        {
            "device": "cuda:0",
            "precision": "int8",
            "backend": "sm80_int8",
            "native": True,
            "usable": True,
            "reason": "",
        },
    ],
    "other_attention": {},
}


def machine(**changes: Any) -> dict[str, Any]:
    """A healthy machine's report but for ``changes``: ``torch__cuda=None`` reaches within."""
    report = copy.deepcopy(_HEALTHY)
    for path, value in changes.items():
        *folders, name = path.split("__")
        place = report
        for folder in folders:
            place = place[folder]
        place[name] = value
    return report


def refused(reason: str) -> list[dict]:
    """The backends of a machine whose INT8 kernel was refused."""
    rows = copy.deepcopy(_HEALTHY["backends"])
    rows[1] |= {"usable": False, "reason": f"sm80_int8 {reason}"}
    return rows
