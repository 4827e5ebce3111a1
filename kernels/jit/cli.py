"""``python install.py build``: builds every kernel ahead of time; needs no GPU."""

import argparse
import json
import shutil
import sys
from pathlib import Path

from . import archs, cache, sass
from .build import Progress, build
from .compile import describe_job
from .errors import JitError
from .nvrtc import find_nvrtc
from .report import Row, make_report
from .variants import registered

_BAR = 30  # characters


def main(arguments: list[str]) -> int:
    """Build as ``arguments`` say; answer the exit status: 0 if every kernel is as it should be."""
    options = _parse(arguments)
    screen = _Screen()
    try:
        nvrtc = find_nvrtc()
        sms = options.arch or _local_gpus() or list(archs.SHIPPED)
        wanted = [(v, sm) for sm in sms for v in registered() if v.is_built_ahead(sm)]
        targets = ", ".join(archs.target(sm, nvrtc.version) for sm in sms)
        print(f"{len(wanted)} kernels for {targets}, NVRTC {'{}.{}'.format(*nvrtc.version)}")
        built = build(wanted, screen.show)
        served = [(v, sm) for sm in sms for v in registered() if v.serves(sm)]
        cache.prune(cache.writable_folder(), {describe_job(*one, nvrtc).key for one in served})
    except JitError as error:
        print(f"build failed: {error}", file=sys.stderr)
        return 1
    finally:
        screen.close()
    if options.brief:
        return 0
    rows = make_report(built)
    _print_table(rows)
    if options.report:
        _write(options.report, rows, nvrtc.version)
    faulty = [row for row in rows if row.faults]
    for row in faulty:
        print(f"{row.kernel} for {row.arch}: {'; '.join(row.faults)}", file=sys.stderr)
    return 1 if faulty else 0


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="install.py build", description=__doc__)
    parser.add_argument(
        "--arch",
        type=_capabilities,
        help="GPU architectures, e.g. sm_89,sm_120a; default: this machine's GPUs, else all",
    )
    parser.add_argument("--report", type=Path, help="write resources and instruction counts here")
    parser.add_argument("--brief", action="store_true", help="build only, without the table")
    return parser.parse_args(arguments)


def _capabilities(text: str) -> list[int]:
    try:
        return [archs.parse(name) for name in text.split(",")]
    except archs.UnsupportedArchError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _local_gpus() -> list[int]:
    import torch

    if not torch.cuda.is_available():
        return []
    capabilities = map(torch.cuda.get_device_capability, range(torch.cuda.device_count()))
    sms = sorted({major * 10 + minor for major, minor in capabilities})
    # An old GPU beside a new one must not keep the new one from its kernels; alone, it is refused.
    return [sm for sm in sms if archs.is_supported(sm)] or sms


class _Screen:
    """A bar on a terminal; elsewhere one line per event, for log files and ComfyUI's console."""

    def __init__(self):
        self._live = sys.stdout.isatty()
        self._drawn = False

    def show(self, state: Progress) -> None:
        text = f"[{state.done}/{state.total}] {state.seconds:5.1f} s  {state.latest}"
        if not self._live:
            print(text, flush=True)
            return
        filled = _BAR * state.done // state.total
        width = shutil.get_terminal_size().columns - 1
        line = f"[{'#' * filled}{'.' * (_BAR - filled)}] {text}"
        print(f"\r{line[:width]:<{width}}", end="", flush=True)
        self._drawn = True

    def close(self) -> None:
        if self._drawn:
            print()


def _print_table(rows: list[Row]) -> None:
    print(
        f"{'regs':>5}{'spill':>6}{'shared':>8}{'instr':>7}{'tensor':>7}{'mufu':>6}{'s':>7}  kernel"
    )
    for row in rows:
        total, tensor, mufu = (
            row.instructions.get(key, "-") for key in ("total", "tensor", "mufu")
        )
        print(
            f"{row.registers:5}{max(row.spill_stores, row.spill_loads):6}"
            f"{row.static_shared + row.dynamic_shared:8}{total:>7}{tensor:>7}{mufu:>6}"
            f"{row.seconds:7.2f}  {row.kernel} for {row.arch}"
        )
    if not sass.find_nvdisasm():
        print("no instruction counts: install the package nvidia-cuda-nvdisasm to get them")


def _write(path: Path, rows: list[Row], version: archs.Version) -> None:
    report = {"nvrtc": "{}.{}".format(*version), "kernels": [row.as_json() for row in rows]}
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
