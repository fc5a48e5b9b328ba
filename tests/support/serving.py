"""A real server of a small memory on a free port, in a thread of the tests' process or in one of
its own.
"""

import asyncio
import json
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx2
import uvicorn

from memstore import MemoryStore, load_model
from memstore.model.model_api import ModelAPI
from memstore.serve.access import Keys
from memstore.serve.app import configured
from memstore.serve.service import Service
from memstore.serve.settings import ServeSettings
from memstore.serve.worker import Worker
from support.commands import start
from support.diary import DIARY


@contextmanager
def busy(worker: Worker) -> Iterator[None]:
    """Keep the model's thread in one step."""
    begun, go = threading.Event(), threading.Event()
    step = worker.run(lambda: begun.set() or go.wait(300))
    thread = threading.Thread(target=asyncio.run, args=(step,))
    thread.start()
    assert begun.wait(60)
    try:
        yield
    finally:
        go.set()
        thread.join()


class Served:
    """A running server: its address, and the memory it serves."""

    def __init__(self, service: Service, url: str) -> None:
        self.service, self.url = service, url

    def client(self, **options: Any) -> httpx2.Client:
        """A plain HTTP client, connected to the server."""
        return httpx2.Client(base_url=self.url, timeout=300, verify=False, **options)

    def openai(self, key: str = "none") -> Any:
        """OpenAI's client, connected to the server. It loads no certificates: that takes longer
        than an answer.
        """
        import openai

        plain = openai.DefaultHttpxClient(verify=False)
        address = f"{self.url}/v1"
        return openai.OpenAI(
            base_url=address, api_key=key, timeout=300, max_retries=0, http_client=plain
        )

    def chat(self, *texts: str | list[Any], key: str = "none", **more: Any) -> Any:
        """The answer to the last of these texts, which user and assistant say in turn."""
        roles = ("user", "assistant")
        messages = [{"role": roles[at % 2], "content": text} for at, text in enumerate(texts)]
        chat = self.openai(key).chat.completions
        return chat.create(model="memstore", messages=messages, **more)

    @asynccontextmanager
    async def mcp(self, key: str = "none", mode: str = "auto") -> AsyncIterator[Any]:
        """The official MCP client, connected to the server."""
        from mcp import Client
        from mcp.client.streamable_http import streamable_http_client

        headers, url = {"Authorization": f"Bearer {key}"}, f"{self.url}/mcp"
        async with (
            httpx2.AsyncClient(headers=headers, timeout=60, verify=False) as http,
            Client(streamable_http_client(url, http_client=http), mode=mode) as client,
        ):
            yield client

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Keep the model's thread in one step, which counts as an active question."""
        with busy(self.service.worker):
            yield

    def settled(self, **load: int) -> None:
        """Wait for a load of so many "active" and "waiting" questions, and "jobs"."""
        for _ in range(6000):
            if {name: self.service.worker.load[name] for name in load} == load:
                return
            time.sleep(0.01)
        raise AssertionError(f"{self.service.worker.load} instead of {load}")


@contextmanager
def serving(
    directory: Path,
    settings: ServeSettings | None = None,
    *,
    model: ModelAPI | None = None,
    keys: Keys | None = None,
    diary: bool = True,
    name: str = "memstore",
) -> Iterator[Served]:
    """Serve the memory in a directory; made, with DIARY read into it, if there is none."""
    model = model or load_model()
    new = not (directory / "data.mdb").exists()
    store = (
        MemoryStore.create(
            directory, model.signature, codec="raw", selector=model.keeps, host_budget=64 << 20
        )
        if new
        else MemoryStore.open(directory, model.signature, host_budget=64 << 20)
    )
    with store:
        if new and diary:
            model.ingest(DIARY, store, name="diary")
        with serving_store(store, model, settings, keys=keys, name=name) as served:
            yield served


@contextmanager
def serving_store(
    store: MemoryStore,
    model: ModelAPI,
    settings: ServeSettings | None = None,
    *,
    keys: Keys | None = None,
    name: str = "memstore",
) -> Iterator[Served]:
    """Serve a memory that is open, and stays so; name: of the model."""
    service = Service(model, store, settings, keys=keys, name=name)
    try:
        config = configured(service)
        config.port = 0
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        try:
            while not server.started:
                assert thread.is_alive()
                time.sleep(0.01)
            port = server.servers[0].sockets[0].getsockname()[1]
            yield Served(service, f"http://127.0.0.1:{port}")
        finally:
            server.should_exit = True
            thread.join()
    finally:
        service.worker.stop()


@contextmanager
def process(memory: Path, *options: str) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """Run `memstore serve` as a process; yields it and the URL it serves at."""
    words = ["serve", "--store", memory, "--port", "0", *options, "--json"]
    started = start(*words, fresh=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        yield started, json.loads(started.stdout.readline())["url"]
    finally:
        started.kill()
        started.wait()
