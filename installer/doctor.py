"""The whole picture on one screen, or as JSON; safe to paste into a bug report.

The JSON has these keys, each with facts or ``{"error": words}``: pack, python, comfyui, packages,
missing, torch, nvidia, nvrtc, cache, backends, other_attention, and advice, a list of level
(problem, ready, note), code and text.
"""

import json
import re
import textwrap
from pathlib import Path

from . import advice, comfyui, machine, packages, probe
from .place import ROOT
from .privacy import clean
from .screen import stage

_WIDTH = 100
_UNKNOWN = {"error": "not reached"}


def doctor(as_json: bool = False, chosen: Path | None = None) -> int:
    """Print what there is; 1 if the nodes cannot load, else 0."""
    if as_json:
        report = examine(chosen)
        print(json.dumps(report, indent=1))
    else:
        with stage("SageAttention3: looking at this machine, and trying every kernel once"):
            report = examine(chosen)
        print_screen(report)
    return exit_status(report)


def exit_status(report: dict) -> int:
    return int(any(row["level"] == advice.PROBLEM for row in report["advice"]))


def examine(chosen: Path | None = None) -> dict:
    """The report. Builds the kernels that an everyday call needs, if they are not there yet."""
    root = comfyui.find(chosen)
    facts = probe.ask(probe.KERNELS)
    died = {"error": facts["died"]} if "died" in facts else _UNKNOWN
    torch = facts.get("torch", died)
    names = [packages.name_of(line) for line in packages.read_requirements(torch.get("cuda") or "")]
    report = {
        "pack": {"version": pack_version(), **facts.get("pack", died)},
        "python": machine.describe_python(),
        "comfyui": _describe(root),
        "packages": {name: packages.installed_version(name) for name in names},
        "missing": [packages.name_of(x) for x in packages.find_missing(torch.get("cuda") or "")],
        "torch": torch,
        "nvidia": machine.nvidia_gpus(),
        "nvrtc": facts.get("nvrtc", died),
        "cache": facts.get("cache", died),
        "backends": facts.get("backends", died),
        "other_attention": {
            name: version
            for name in comfyui.ATTENTION_PACKAGES
            if (version := packages.installed_version(name))
        },
    }
    report["advice"] = [row._asdict() for row in advice.advise(report)]
    return clean(report, root)


def pack_version() -> str:
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    return re.search(r'^version = "([^"]+)"', text, re.MULTILINE)[1]


def print_screen(report: dict) -> None:
    """At most a screen of facts, then the advice."""
    for title, text in _lines(report):
        _print_wrapped(f"  {title:<10}", text)
    print()
    marks = {advice.PROBLEM: "!!", advice.READY: "ok", advice.NOTE: "--"}
    for row in report["advice"]:
        _print_wrapped(f"  {marks[row['level']]} ", row["text"])


def _lines(report: dict):
    """(title, text) of each fact."""
    python, host, torch = report["python"], report["comfyui"], report["torch"]
    yield "pack", report["pack"]["version"]
    yield "ComfyUI", (host["version"] or "found, version unknown") if host["found"] else "not found"
    yield "Python", f"{python['version']}, {python['kind']}, {python['system']}"
    if "error" in torch:
        yield "torch", torch["error"]
        return
    made_for = (torch["cuda"] and f"CUDA {torch['cuda']}") or (
        torch["rocm"] and f"ROCm {torch['rocm']}"
    )
    yield "torch", f"{torch['version']}, for {made_for or 'the CPU alone'}"
    for gpu in torch["gpus"]:
        yield (
            gpu["device"],
            f"{gpu['name']}, {gpu['gib']} GiB, compute capability {gpu['capability']}",
        )
    drivers = sorted({gpu["driver"] for gpu in report["nvidia"]})
    yield "driver", ", ".join(drivers) or "no answer from NVIDIA's"
    nvrtc, cache = report["nvrtc"], report["cache"]
    place = "a package of this Python" if nvrtc.get("of_package") else "the system's or torch's own"
    if torch["cuda"]:  # nothing is built without
        yield "NVRTC", nvrtc.get("error") or f"{nvrtc['version']}, {place}"
    yield "kernels", cache.get("error") or f"{cache['kernels']} built, {cache['mib']} MiB"
    yield (
        "packages",
        f"missing: {', '.join(report['missing'])}" if report["missing"] else "all there",
    )
    if report["other_attention"]:
        others = [f"{name} {version}" for name, version in report["other_attention"].items()]
        yield "attention", f"also installed: {', '.join(others)}"
    yield from _backend_lines(report["backends"])


def _backend_lines(rows: list[dict] | dict):
    if isinstance(rows, dict):
        yield "backends", rows["error"]
        return
    for row in rows:
        verdict = "usable" if row["usable"] else row["reason"].removeprefix(f"{row['backend']} ")
        kind = "" if row["native"] else ", emulation"
        yield row["device"], f"{row['precision']:<9} {row['backend']}{kind}: {verdict}"


def _describe(root: Path | None) -> dict:
    if root is None:
        return {"found": False}
    other_packs, copies = comfyui.find_other_packs(root)
    return {
        "found": True,
        "version": comfyui.find_version(root),
        "flags": comfyui.find_flags(root),
        "other_packs": other_packs,
        "copies": copies,
    }


def _print_wrapped(head: str, text: str) -> None:
    hang = " " * len(head)
    print(textwrap.fill(text, _WIDTH, initial_indent=head, subsequent_indent=hang))
