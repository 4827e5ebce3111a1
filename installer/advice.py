"""From the facts of a report to sentences: what is wrong or worth knowing, and the next step."""

from collections.abc import Iterator
from typing import NamedTuple

from . import comfyui
from .packages import BINDINGS

PROBLEM = "problem"  # the nodes do not load, or not in this ComfyUI
NOTE = "note"  # they do, with less than could be had
READY = "ready"

OLDEST_CAPABILITY = (8, 0)
OLDEST_CUDA = (12, 8)


class Advice(NamedTuple):
    level: str
    code: str  # stable, for scripts and for searching
    text: str


def advise(report: dict) -> list[Advice]:
    """The sentences for ``report`` (see doctor.py), gravest first; never none."""
    found = list(_all(report))
    order = (PROBLEM, READY, NOTE)
    return sorted(found, key=lambda advice: order.index(advice.level))


def _all(report: dict) -> Iterator[Advice]:
    yield from _about_host(report["comfyui"])
    torch = report["torch"]
    if "error" in torch:
        yield _no_torch(torch["error"], report["comfyui"]["found"])
        return
    pack = report["pack"]
    if "error" in pack and report["missing"]:
        names = ", ".join(report["missing"])
        yield Advice(
            PROBLEM,
            "pack-broken",
            f"The nodes cannot load: {pack['error']}. Missing: {names}. Run `install.py` with "
            "ComfyUI's Python while online.",
        )
        return
    if "error" in pack:
        yield Advice(PROBLEM, "pack-broken", f"The nodes cannot load: {pack['error']}")
        return
    if report["missing"]:
        yield Advice(
            NOTE,
            "packages-missing",
            f"Missing packages: {', '.join(report['missing'])}. The nodes load, but what needs "
            "them (pictures, or the fast kernels) is left out. Run `install.py` with ComfyUI's "
            "Python while online.",
        )
    if torch["gpus"]:
        yield from _about_kernels(report)
    else:
        yield _no_gpu(torch, report["nvidia"])


def _about_host(host: dict) -> Iterator[Advice]:
    if not host["found"]:
        yield Advice(
            NOTE,
            "comfyui-not-found",
            "The pack lies in no ComfyUI. Put its folder into ComfyUI's custom_nodes, or run "
            "`install.py --comfyui FOLDER`, which links it there.",
        )
        return
    if host["version"] and comfyui.is_too_old(host["version"]):
        oldest = ".".join(map(str, comfyui.OLDEST))
        yield Advice(
            PROBLEM,
            "comfyui-old",
            f"ComfyUI {host['version']} has no attention overrides. Update it to {oldest} or "
            "newer.",
        )
    if host["copies"]:
        yield Advice(
            PROBLEM,
            "two-copies",
            f"Another copy of this pack is in custom_nodes: {', '.join(host['copies'])}. Only one "
            "of them can load: remove the other.",
        )
    for row in host["flags"]:
        yield Advice(NOTE, "flag", f"{row['flag']} in {row['where']}: {row['means']}.")
    if host["other_packs"]:
        yield Advice(
            NOTE,
            "other-overrides",
            f"These also change ComfyUI's attention: {', '.join(host['other_packs'])}. Where one "
            "of their patches comes after SageAttention3 Patch in the graph, it may switch that "
            "off; the report node says so.",
        )


def without_torch(in_comfyui: bool) -> Advice:
    """in_comfyui: whether the pack lies in one, whose Python was looked for in vain."""
    where = (
        "Start" if in_comfyui else "Put the pack's folder into ComfyUI's custom_nodes, then start"
    )
    return Advice(
        PROBLEM,
        "torch-missing",
        f"This Python has no torch, so it is not ComfyUI's. {where} install.py with the Python "
        "that starts ComfyUI. Portable build: ..\\..\\..\\python_embeded\\python.exe install.py. "
        "Desktop and installations by hand: the python in .venv or venv.",
    )


def _no_torch(error: str, in_comfyui: bool) -> Advice:
    if error.startswith("ModuleNotFoundError: No module named 'torch'"):
        return without_torch(in_comfyui)
    return Advice(
        PROBLEM,
        "torch-broken",
        f"torch does not load here, so ComfyUI cannot start either: {error}",
    )


def _no_gpu(torch: dict, nvidia: list[dict]) -> Advice:
    """Why nothing is built, where everything else is in order."""
    rest = "The nodes load, and all attention stays with ComfyUI."
    gpu = nvidia[0]["name"] if nvidia else None
    if torch["rocm"]:
        return Advice(
            NOTE,
            "amd",
            f"torch {torch['version']} is for AMD GPUs; the kernels are for NVIDIA's. {rest} "
            "There is nothing to install.",
        )
    if not torch["cuda"] and gpu:
        return Advice(
            NOTE,
            "torch-without-cuda",
            f"torch {torch['version']} is built without CUDA, so ComfyUI does not use the {gpu}. "
            f"{rest} Install a torch for CUDA as ComfyUI's README says, then run this again.",
        )
    if not torch["cuda"]:
        return Advice(
            NOTE,
            "torch-without-cuda",
            f"torch {torch['version']} is built without CUDA, and no NVIDIA GPU was found. {rest} "
            "With *emulation* on, the Patch shows the picture quality of every precision, slowly.",
        )
    if "too old" in (torch["no_gpu"] or ""):
        driver = f" {nvidia[0]['driver']}" if nvidia else ""
        return Advice(
            NOTE,
            "driver-old",
            f"The NVIDIA driver{driver} is too old for torch {torch['version']} (CUDA "
            f"{torch['cuda']}), so ComfyUI cannot use the GPU. {rest} Update the driver and run "
            "this again.",
        )
    seen = f"although the driver sees the {gpu}" if gpu else "and no NVIDIA driver answers"
    return Advice(
        NOTE,
        "no-gpu",
        f"torch finds no GPU here ({torch['no_gpu'] or 'none is visible'}), {seen}. {rest} "
        "Kernels are built by themselves when one is there.",
    )


def _about_kernels(report: dict) -> Iterator[Advice]:
    torch, nvrtc = report["torch"], report["nvrtc"]
    rows = report["backends"]
    if isinstance(rows, dict):
        yield Advice(NOTE, "kernels-broken", f"The kernels could not be asked: {rows['error']}")
        return
    if "error" in nvrtc and _version(torch["cuda"]) < OLDEST_CUDA:
        oldest = ".".join(map(str, OLDEST_CUDA))
        yield Advice(
            NOTE,
            "nvrtc-old",
            f"torch {torch['version']} brings the compiler of CUDA {torch['cuda']}; the kernels "
            f"need {oldest} or newer. Until then all attention stays with ComfyUI. Update torch to "
            f"a build for CUDA {oldest} or newer, as ComfyUI's README says.",
        )
        return
    if "error" in nvrtc and BINDINGS not in report["missing"]:
        yield Advice(
            NOTE, "nvrtc-missing", f"No kernel can be built: {nvrtc['error'].partition(': ')[2]}"
        )
        return
    for gpu in torch["gpus"]:
        native = [row for row in rows if row["device"] == gpu["device"] and row["native"]]
        usable = [row["precision"] for row in native if row["usable"]]
        if usable:
            yield Advice(
                READY,
                "ready",
                f"{gpu['name']}: {', '.join(usable)} runs natively and has proved itself.",
            )
        elif _version(gpu["capability"]) < OLDEST_CAPABILITY:
            yield Advice(
                NOTE,
                "gpu-old",
                f"{gpu['name']} has compute capability {gpu['capability']}; the kernels need 8.0 "
                "(RTX 30 series) or newer. All its attention stays with ComfyUI.",
            )
        for row in native:
            if "failed its self-test" in row["reason"] or "could not be built" in row["reason"]:
                yield Advice(
                    NOTE,
                    "kernel-refused",
                    f"{gpu['name']}: {row['reason']}. {row['precision']} is left to the next best. "
                    "Update the driver; if it stays, please report it with this page.",
                )


def _version(text: str) -> tuple[int, int]:
    major, minor = text.split(".")[:2]
    return int(major), int(minor)
