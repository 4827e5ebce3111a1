"""What ninja runs: ``child.py JOB RESULT FOLDER`` builds one job into the cache folder.

Started by path, in a fresh interpreter: it loads this folder alone as a package, so that neither
torch nor the rest of the pack is imported.
"""

import importlib.util
import json
import sys
from pathlib import Path


def _load_package(name: str) -> None:
    folder = Path(__file__).resolve().parent
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    sys.modules[name] = importlib.util.module_from_spec(spec)


def main(job_path: Path, result_path: Path, folder: Path) -> int:
    from sageattention3_jit import cache, compile

    job = compile.Job.from_json(job_path.read_text(encoding="utf-8"))
    try:
        with cache.building(folder, job.key):
            if cache.find(job.key) is None:
                cache.publish(folder, job.key, compile.compile_job(job))
    except Exception as error:  # everything is the parent's to report, in its own words
        result_path.write_text(json.dumps(f"{error}"), encoding="utf-8")
        return 1
    result_path.write_text(json.dumps(None), encoding="utf-8")
    return 0


if __name__ == "__main__":
    # Python puts this folder first, but its module names are not meant for the top level. One that
    # is embedded in another program has something else in that place.
    folder = Path(__file__).resolve().parent
    sys.path[:] = [path for path in sys.path if not path or Path(path).resolve() != folder]
    _load_package("sageattention3_jit")
    sys.exit(main(*map(Path, sys.argv[1:])))
