"""A server under two hundred clients that ask, search and upload at once, killed in the middle: no
error but 429, flat memory, and nothing half stored. A part of `make soak`: MEMSTORE_LOAD_SECONDS
sets its length.
"""

import asyncio
import json
import os
import random
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pytest

from support.diary import DIARY, LETTER
from support.serving_process import process

SECONDS = float(os.environ.get("MEMSTORE_LOAD_SECONDS", "0"))
CLIENTS = int(os.environ.get("MEMSTORE_LOAD_CLIENTS", "200"))
pytestmark = pytest.mark.skipif(not SECONDS, reason="set MEMSTORE_LOAD_SECONDS, or make soak")

DOCUMENTS = "/v1/memstore/documents"
QUESTIONS = (
    "What is the combination of the lime barn?",
    "What is the price of the brown mare?",
    "What is the name of the new foal?",
)


@dataclass
class Seen:
    """What all clients saw. first: seconds to the first token of each answer; ready: documents
    that were listed as ready, and are not deleted.
    """

    first: list[float] = field(default_factory=list)
    seconds: float = 0.0
    tokens: int = 0
    answers: int = 0
    searches: int = 0
    uploads: int = 0
    busy: int = 0
    errors: list[str] = field(default_factory=list)
    ready: dict[str, int] = field(default_factory=dict)  # with their tokens


class Client:
    """A client that asks, searches and uploads, one after the other."""

    def __init__(self, number: int, url: str, seen: Seen, seed: int) -> None:
        self.seen, self.name = seen, f"note-{seed}-{number}"
        self.chance = random.Random(number + seed * CLIENTS)
        # verify: an SSL context takes a tenth of a second to make
        self.http = httpx2.AsyncClient(base_url=url, timeout=300, verify=False)
        self.said: list[dict[str, str]] = []
        self.uploaded = False

    async def run(self, until: float) -> None:
        async with self.http:
            while time.monotonic() < until:
                kind = self.chance.random()
                if kind < 0.75:
                    await self.ask()
                elif kind < 0.95:
                    await self.search()
                else:
                    await self.upload()

    async def ask(self) -> None:
        if self.chance.random() < 0.5 or len(self.said) > 6:
            self.said = []
        self.said.append({"role": "user", "content": self.chance.choice(QUESTIONS)})
        body = {
            "model": "memstore",
            "messages": self.said,
            "stream": True,
            "stream_options": {"include_usage": True},
            "memstore": {"documents": ["diary", "letter"]},
        }
        began, first, text = time.monotonic(), 0.0, ""
        async with self.http.stream("POST", "/v1/chat/completions", json=body) as answer:
            if answer.status_code != 200:
                self.said.pop()
                await answer.aread()
                await self.refused(answer)
                return
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    self.seen.errors.append(line)
                    return
                for choice in event["choices"]:
                    text += choice["delta"].get("content", "")
                    first = first or (text and time.monotonic() - began)
                self.seen.tokens += (event.get("usage") or {}).get("completion_tokens", 0)
        self.said.append({"role": "assistant", "content": text})
        self.seen.answers += 1
        self.seen.first.append(first)

    async def search(self) -> None:
        body = {"query": "the ferry will not cross", "top_k": 2, "documents": ["diary"]}
        answer = await self.http.post("/v1/memstore/search", json=body)
        self.seen.searches += answer.status_code == 200
        await self.refused(answer)

    async def upload(self) -> None:
        """Upload a document, or look how far it is, or delete it."""
        if not self.uploaded:
            text = f"{self.name}. " + LETTER * self.chance.randint(1, 8)
            answer = await self.http.post(DOCUMENTS, json={"name": self.name, "text": text})
            self.uploaded = answer.status_code == 202
            self.seen.uploads += self.uploaded
        elif self.name not in self.seen.ready:
            answer = await self.http.get(DOCUMENTS)
            row = next(one for one in answer.json()["data"] if one["name"] == self.name)
            if row["state"] == "ready":
                self.seen.ready[self.name] = row["tokens"]
        else:
            del self.seen.ready[self.name]
            answer = await self.http.delete(f"{DOCUMENTS}/{self.name}")
            self.uploaded = False
        await self.refused(answer)

    async def refused(self, answer: httpx2.Response) -> None:
        if answer.status_code == 429:
            self.seen.busy += 1
            wait = float(answer.headers["retry-after"])
            await asyncio.sleep(wait * (0.5 + self.chance.random()))
        elif answer.status_code not in (200, 202):
            self.seen.errors.append(f"{answer.status_code} {answer.text}")


async def load(url: str, clients: int, seconds: float, seen: Seen, seed: int) -> None:
    began = time.monotonic()
    all_of = [Client(number, url, seen, seed) for number in range(clients)]
    await asyncio.gather(*(client.run(began + seconds) for client in all_of))
    seen.seconds += time.monotonic() - began


def rows(http: httpx2.Client) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in http.get(DOCUMENTS).json()["data"]}


def prepare(url: str) -> None:
    with httpx2.Client(base_url=url, timeout=60) as http:
        for name, text in (("diary", DIARY), ("letter", LETTER)):
            http.post(DOCUMENTS, json={"name": name, "text": text}).raise_for_status()
        while any(row["state"] != "ready" for row in rows(http).values()):
            time.sleep(0.1)


def held_by(pid: int) -> int:
    """Bytes of main memory that a process holds."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) << 10


def test_two_hundred_clients_get_no_error_but_429_and_a_kill_loses_nothing(tmp_path: Path) -> None:
    alone, seen, rss = Seen(), Seen(), list[int]()
    with process(tmp_path / "mem", "--host-budget", "64MB") as (server, url):
        prepare(url)
        asyncio.run(load(url, 1, SECONDS / 10, alone, 0))

        async def watched() -> None:
            going = asyncio.create_task(load(url, CLIENTS, SECONDS / 2, seen, 1))
            for _ in range(4):
                await asyncio.sleep(SECONDS / 8)
                rss.append(held_by(server.pid))
            await going

        async def killed() -> None:
            going = asyncio.create_task(load(url, CLIENTS, SECONDS, Seen(), 2))
            await asyncio.sleep(min(5.0, SECONDS / 8))
            server.kill()
            await asyncio.gather(going, return_exceptions=True)

        asyncio.run(watched())
        asyncio.run(killed())
    with process(tmp_path / "mem", "--host-budget", "64MB") as (server, url):
        with httpx2.Client(base_url=url, timeout=60) as http:
            there = rows(http)
        for name, tokens in seen.ready.items():
            assert there[name]["state"] == "ready" and there[name]["tokens"] == tokens
        asyncio.run(load(url, CLIENTS, SECONDS / 4, seen, 3))
    assert not seen.errors and not alone.errors, (alone.errors + seen.errors)[:3]
    assert seen.answers and seen.searches and seen.uploads
    every = sorted(seen.first)
    many, one = seen.tokens / seen.seconds, alone.tokens / alone.seconds
    print(
        f"\n{CLIENTS} clients, {SECONDS:.0f} s: {seen.answers:,} answers, {seen.searches:,} "
        f"searches, {seen.uploads:,} uploads, {seen.busy:,} times 429\n"
        f"first token: median {statistics.median(every):.2f} s, "
        f"p95 {every[int(0.95 * len(every))]:.2f} s; "
        f"one client alone {statistics.median(alone.first):.3f} s\n"
        f"tokens a second: {many:.1f}; one client alone {one:.1f}\n"
        f"main memory: {', '.join(f'{size / 1e6:.0f}' for size in rss)} MB"
    )
    # all that is cached is there after the first half
    assert rss[-1] < 1.15 * rss[1] + (32 << 20)
