"""What the person at the keyboard sees while something takes its time, or goes wrong."""

import contextlib
import sys
import threading
import time

HEARTBEAT_SECONDS = 30


class SetupError(Exception):
    """What is wrong and what to do, in words for the person at the keyboard."""


@contextlib.contextmanager
def stage(title: str):
    """A line that shows the time while the stage lasts: live on a terminal, else now and then."""
    started, live, over = time.monotonic(), sys.stdout.isatty(), threading.Event()

    def show(end: str) -> None:
        print(f"{title} {time.monotonic() - started:4.0f} s", end=end, flush=True)

    def tick() -> None:
        while not over.wait(1.0 if live else HEARTBEAT_SECONDS):
            show("\r" if live else "\n")

    ticker = threading.Thread(target=tick, daemon=True)
    ticker.start()
    try:
        yield
    finally:
        over.set()
        ticker.join()
        show("\n")
