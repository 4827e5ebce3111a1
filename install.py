#!/usr/bin/env python3
"""Installer of the pack, its doctor, its kernel build, and the two commands of its README.

    python install.py            install the pack into the ComfyUI that it lies in, or whose folder
                                 --comfyui FOLDER names: what it lacks (never torch), its kernels
    python install.py doctor     what there is, what works and why not, on one screen that is safe
                                 to paste; --json for programs
    python install.py uninstall  remove the kernels built for this user
    python install.py build      build kernels ahead of time; needs no GPU. --arch sm_89,sm_120a
                                 names GPUs, --report FILE.json keeps resources and instructions
    python install.py demo       run the shipped workflows on tiny models in a real ComfyUI
    python install.py test       run every test that needs no GPU; --no-browser leaves the frontend
                                 out, further options go to pytest

demo and test work in ``.venv`` and ``.host`` beside this file and touch nothing else; so does build
where the Python that runs it has no PyTorch. All may be interrupted at any point and started again;
what is done is not done twice.
"""

import argparse
import contextlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

OLDEST_PYTHON = (3, 10)
if sys.version_info < OLDEST_PYTHON:  # the parts below do not even parse there
    sys.exit(
        "SageAttention3 needs Python {}.{} or newer; this is {}.".format(
            *OLDEST_PYTHON, sys.version.split()[0]
        )
    )


def _load_parts() -> None:
    """Make ``installer/`` importable under a name that nothing else has."""
    name, folder = "sageattention3_installer", Path(os.path.abspath(__file__)).parent / "installer"
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    sys.modules[name] = importlib.util.module_from_spec(spec)


_load_parts()
from sageattention3_installer import (  # noqa: E402
    doctor,
    environment,
    into_comfyui,
    probe,
    uninstall,
)
from sageattention3_installer.place import ROOT, run_tool  # noqa: E402
from sageattention3_installer.screen import SetupError  # noqa: E402


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):  # not those of every program around us
            stream.reconfigure(errors="replace")  # consoles know few letters, folders have many
    if arguments[:1] == ["probe"]:  # started by the doctor
        probe.probe(arguments[1], Path(arguments[2]))
        return 0
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in ("-h", "--help")):
        arguments = ["install", *arguments]
    parsed, options = _parse(arguments)
    try:
        return _run(parsed, options)
    except SetupError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nStopped. Start the same command again to go on.", file=sys.stderr)
        return 130


def _parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="install.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="install.py [install | doctor | uninstall | build | demo | test] [options]",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="")
    for name in ("install", "doctor"):
        command = commands.add_parser(name)
        command.add_argument("--comfyui", type=Path, metavar="FOLDER")
        if name == "doctor":
            command.add_argument("--json", action="store_true")
    for name in ("uninstall", "build", "demo", "test"):
        commands.add_parser(name, add_help=False)
    parsed, options = parser.parse_known_args(arguments)
    if options and parsed.command not in ("build", "test"):
        parser.error(f"{parsed.command} does not know {' '.join(options)}")
    return parsed, options


def _run(parsed: argparse.Namespace, options: list[str]) -> int:
    if parsed.command == "install":
        return into_comfyui.install(parsed.comfyui)
    if parsed.command == "doctor":
        return doctor.doctor(parsed.json, parsed.comfyui)
    if parsed.command == "uninstall":
        return uninstall.uninstall()
    if parsed.command == "build" and importlib.util.find_spec("torch"):
        return run_tool(sys.executable, "build", *options)
    if parsed.command == "test" and not (ROOT / "tests").is_dir():
        raise SetupError("The tests are not part of a release: clone the repository for them.")
    environment.make_environment()
    if parsed.command == "test":
        return test(options)
    return run_tool(environment.PYTHON, parsed.command, *options)


def test(options: list[str]) -> int:
    """Lint, format check and the whole test suite; pytest's own closing line comes last.

    ``--no-browser`` among the options leaves the frontend out; the others go to pytest.
    """
    python = environment.PYTHON
    browser = "--no-browser" not in options
    options = [option for option in options if option != "--no-browser"]
    if run_tool(python, "prepare", *(["--browser"] if browser else [])):
        return 1
    for check in (["check"], ["format", "--check"]):
        command = [python, "-m", "ruff", *check, ROOT]
        if subprocess.run(command, cwd=ROOT, check=False).returncode:
            return 1
    workers = str(min(4, os.cpu_count() or 1))
    command = [python, "-m", "pytest", "-n", workers, "--dist", "loadgroup"]
    if not browser:
        command += ["-m", "not gpu and not browser"]
    # One thread of torch per worker: more would wait for each other on busy cores most of the time.
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    command += options
    if not any((ROOT / option.partition("::")[0]).exists() for option in options):
        command.append("tests")
    return subprocess.run(command, cwd=ROOT, env=variables, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
