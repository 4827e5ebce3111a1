"""The tools behind install.py: ``prepare [--browser]``, ``demo`` and ``build [options]``.

``pictures`` draws those of the help pages anew, ``train`` makes the demo's video model anew and
``capture`` the attention inputs of it that tests use.
"""

import argparse
import importlib
import importlib.util
import sys
from pathlib import Path

INTERRUPTED = 130  # as shells report Ctrl-C


def main() -> int:
    parser = argparse.ArgumentParser(prog="demo")
    commands = parser.add_subparsers(dest="command", required=True)
    prepare = commands.add_parser("prepare", help="unpack the ComfyUI host")
    prepare.add_argument("--browser", action="store_true", help="and get a browser and its driver")
    commands.add_parser("demo", help="run the shipped workflows on tiny models")
    commands.add_parser("build", help="build the kernels; options as in kernels/jit/cli.py")
    commands.add_parser("pictures", help="draw the pictures of the help pages")
    commands.add_parser("capture", help="write the video model's attention inputs for tests")
    commands.add_parser("train", help="train the demo's video model; options as in demo/train.py")
    arguments, options = parser.parse_known_args()
    if options and arguments.command not in ("build", "train"):
        parser.error(f"unknown: {' '.join(options)}")

    folder = Path(__file__).resolve().parent
    # Python puts this folder first, where its modules would shadow ComfyUI's of the same names; one
    # that is embedded in another program does not.
    sys.path[:] = [path for path in sys.path if not path or Path(path).resolve() != folder]
    spec = importlib.util.spec_from_file_location("sageattention3_loader", folder / "pack.py")
    loader = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loader)
    loader.load_pack()

    if arguments.command == "build":
        return importlib.import_module("sageattention3.kernels.jit.cli").main(options)
    host = importlib.import_module("sageattention3.demo.host")
    importlib.import_module("sageattention3.demo.parent").die_with_parent()
    try:
        if arguments.command == "train":
            return importlib.import_module("sageattention3.demo.train").main(options)
        host.prepare()
        if arguments.command == "demo":
            return importlib.import_module("sageattention3.demo.run").main()
        if arguments.command == "pictures":
            return importlib.import_module("sageattention3.demo.pictures").main()
        if arguments.command == "capture":
            return importlib.import_module("sageattention3.demo.capture").main()
        if arguments.browser:
            importlib.import_module("sageattention3.demo.browser").prepare()
    except host.HostError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED  # install.py says what to do
    return 0


if __name__ == "__main__":
    sys.exit(main())
