"""A real ComfyUI server in its own process, and the few HTTP calls that demo and tests make."""

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import host
from .parent import die_with_parent

START_SECONDS = 180
STOP_SECONDS = 15
# The history entry of a prompt appears shortly after the message that it has finished.
HISTORY_SECONDS = 10
FINAL = ("execution_success", "execution_error", "execution_interrupted")
LOG_TAIL = 30  # lines shown when the server dies

# torch's threads would spin while they wait for one another: on two busy cores that made attention
# over 280 tokens take 1,680 ms in place of 22.
WAIT_ASLEEP = {"OMP_WAIT_POLICY": "PASSIVE"}

Progress = Callable[[str, int, int], None]  # node id, steps done, steps in all


class ServerError(host.HostError):
    """The server did not start or is gone; the message holds the end of its log."""


class PromptError(RuntimeError):
    """The server refused a prompt, or a node of it failed; the message is that of the node.

    node: class of the failing node, empty if the prompt as a whole was refused.
    """

    def __init__(self, message: str, node: str = "") -> None:
        super().__init__(message)
        self.node = node


class Server:
    """``with Server(log) as server: server.run(prompt)``.

    The server listens on a free port of this machine alone, on the CPU unless ``gpu``.
    """

    def __init__(self, log: Path, *, gpu: bool = False) -> None:
        self.log = log
        self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._gpu = gpu
        self._process: subprocess.Popen | None = None

    def __enter__(self) -> "Server":
        host.require()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command(),
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **WAIT_ASLEEP},
                preexec_fn=die_with_parent if os.name == "posix" else None,
            )
        try:
            self._wait_until_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def object_info(self) -> dict[str, Any]:
        """Every node the server knows: class -> inputs, outputs, names."""
        return self._get("/object_info")

    def run(self, prompt: dict[str, Any], on_progress: Progress | None = None) -> dict[str, Any]:
        """Run an API prompt to its end and return its history entry.

        Raises PromptError if it was refused or a node failed, ServerError if the server died.
        """
        return asyncio.run(self._run(prompt, on_progress or (lambda *_: None)))

    def interrupt(self) -> None:
        """Stop the running prompt, as the frontend's button does."""
        self.post("/interrupt", {})

    def post(self, path: str, body: Any) -> Any:
        """POST JSON; the answer's JSON, None if it is empty."""
        request = urllib.request.Request(
            self.url + path,
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
            method="POST",
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    def view(self, file: dict[str, str]) -> bytes:
        """The bytes of an output file as nodes name it: filename, subfolder, type."""
        from urllib.parse import urlencode

        with urllib.request.urlopen(f"{self.url}/view?{urlencode(file)}", timeout=30) as answer:
            return answer.read()

    def _command(self) -> list[str]:
        command = [sys.executable, str(host.COMFY / "main.py")]
        command += ["--listen", "127.0.0.1", "--port", str(self.port)]
        command += ["--base-directory", str(host.BASE), "--database-url", "sqlite:///:memory:"]
        command += ["--disable-auto-launch", "--disable-api-nodes", "--use-pytorch-cross-attention"]
        return command if self._gpu else [*command, "--cpu"]

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise ServerError(f"the ComfyUI server did not start\n{self._log_tail()}")
            with contextlib.suppress(OSError):
                self._get("/system_stats")
                return
            time.sleep(0.2)
        raise ServerError(f"the ComfyUI server gave no answer in {START_SECONDS} s")

    async def _run(self, prompt: dict[str, Any], on_progress: Progress) -> dict[str, Any]:
        import aiohttp

        client = uuid.uuid4().hex
        # Progress may carry preview pictures: no limit on a message's size.
        async with (
            aiohttp.ClientSession() as session,
            session.ws_connect(f"{self.url}/ws?clientId={client}", max_msg_size=0) as socket_,
        ):
            prompt_id = self._queue(prompt, client)
            async for message in socket_:
                if message.type is not aiohttp.WSMsgType.TEXT:
                    continue
                event = json.loads(message.data)
                data = event.get("data", {})
                if event["type"] == "progress":
                    on_progress(str(data["node"]), data["value"], data["max"])
                if event["type"] in FINAL and data.get("prompt_id") == prompt_id:
                    return _checked(await self._history(prompt_id))
        raise ServerError(f"the ComfyUI server is gone\n{self._log_tail()}")

    def _queue(self, prompt: dict[str, Any], client: str) -> str:
        try:
            return self.post("/prompt", {"prompt": prompt, "client_id": client})["prompt_id"]
        except urllib.error.HTTPError as error:
            raise _refusal(json.loads(error.read())) from None

    async def _history(self, prompt_id: str) -> dict[str, Any]:
        deadline = time.monotonic() + HISTORY_SECONDS
        while time.monotonic() < deadline:
            entry = self._get(f"/history/{prompt_id}").get(prompt_id)
            if entry:
                return entry
            await asyncio.sleep(0.05)
        raise ServerError(f"the server lists no history for the prompt\n{self._log_tail()}")

    def _get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=30) as answer:
            return json.loads(answer.read())

    def _log_tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join([f"(the end of {self.log})", *lines[-LOG_TAIL:]])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _checked(entry: dict[str, Any]) -> dict[str, Any]:
    for kind, data in entry["status"]["messages"]:
        if kind == "execution_error":
            raise PromptError(data["exception_message"].strip(), data["node_type"])
        if kind == "execution_interrupted":
            raise PromptError("interrupted", data.get("node_type", ""))
    return entry


def _refusal(answer: dict[str, Any]) -> PromptError:
    """What the server holds against a prompt: the first node's first complaint, or its own."""
    for node in answer.get("node_errors", {}).values():
        for error in node["errors"]:
            return PromptError(f"{error['message']}: {error['details']}", node["class_type"])
    error = answer["error"]
    return PromptError(f"{error['message']}: {error['details']}")
