"""Python launchers, one per kernel family; each declares its ``VARIANTS`` for the build."""
