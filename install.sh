#!/bin/sh
# Installs the pack into ComfyUI: double-click, or `sh install.sh [ComfyUI's folder]`.
# Any Python will do here: install.py finds ComfyUI's own.

here=$(dirname "$0")
[ $# -gt 0 ] && set -- --comfyui "$1"

for python in \
    "$here/../../.venv/bin/python" "$here/../../venv/bin/python" \
    "$here/../../../.venv/bin/python" "$here/../../../venv/bin/python" \
    "$VIRTUAL_ENV/bin/python" "$CONDA_PREFIX/bin/python" python3 python
do
    if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
        "$python" "$here/install.py" "$@"
        status=$?
        break
    fi
done

if [ -z "$status" ]; then
    echo "No Python 3.10 or newer was found. Start install.py with the one that starts ComfyUI." >&2
    status=1
fi
if [ -t 0 ] && [ -t 1 ]; then  # a window opened by a double-click would close at once
    printf 'Press Enter to close. '
    read -r _
fi
exit "$status"
