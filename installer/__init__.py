"""What ``install.py`` does, in parts; only the standard library, since nothing else is there yet.

``into_comfyui`` installs, ``doctor`` looks and says, ``uninstall`` takes the kernels away,
``environment`` makes the place that demo and tests work in. What needs torch runs in a process of
its own (``probe``), because a broken torch may take its process along.

``install.py`` and the tests load this folder as a package by its path: Pythons that are embedded in
another program (ComfyUI's portable build for Windows) have no folder of the script on their path.
"""
