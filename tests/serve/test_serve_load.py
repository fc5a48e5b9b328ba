"""A server under two hundred clients that chat, search and upload at once, then killed: no error
but 429, flat memory, and no ready document lost. A part of `make soak`: MEMSTORE_LOAD_SECONDS sets
its length.
"""

import asyncio
import json
import os
import random
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx2
import pytest

from support.diary import DIARY, LETTER, QUESTION
from support.serving_process import process

SECONDS = float(os.environ.get("MEMSTORE_LOAD_SECONDS", "0"))
CLIENTS = int(os.environ.get("MEMSTORE_LOAD_CLIENTS", "200"))
pytestmark = pytest.mark.skipif(not SECONDS, reason="set MEMSTORE_LOAD_SECONDS, or make soak")
DOCUMENTS = "/v1/memstore/documents"


@dataclass
class Seen:
    """What all clients saw. first: seconds to the first text of each answer; ready: the tokens of
    documents that were listed as ready and are not deleted.
    """

    first: list[float] = field(default_factory=list)
    answers: int = 0
    searches: int = 0
    uploads: int = 0
    busy: int = 0
    errors: list[str] = field(default_factory=list)
    ready: dict[str, int] = field(default_factory=dict)


class Client:
    """A client that chats, searches and uploads, one after the other."""

    def __init__(self, number: int, url: str, seen: Seen) -> None:
        self.seen, self.name, self.chance = seen, f"note-{number}", random.Random(number)
        # verify: an SSL context takes a tenth of a second to make
        self.http = httpx2.AsyncClient(base_url=url, timeout=300, verify=False)
        self.uploaded = False

    async def run(self, until: float) -> None:
        async with self.http:
            while time.monotonic() < until:
                act = self.chance.choices([self.chat, self.search, self.upload], [75, 20, 5])[0]
                answer = await act()
                if answer.status_code == 429:
                    self.seen.busy += 1
                    await asyncio.sleep(float(answer.headers["retry-after"]))
                elif answer.status_code not in (200, 202):
                    self.seen.errors.append(f"{answer.status_code} {answer.text}")

    async def chat(self) -> httpx2.Response:
        said = {"role": "user", "content": QUESTION}, {"role": "assistant", "content": "4467"}
        earlier = [*said] * self.chance.randrange(3)
        messages = [*earlier, {"role": "user", "content": "What is the price of the brown mare?"}]
        body = {"model": "memstore", "messages": messages, "stream": True}
        body["memstore"] = {"documents": ["diary"]}
        began, first = time.monotonic(), 0.0
        async with self.http.stream("POST", "/v1/chat/completions", json=body) as answer:
            if answer.status_code != 200:
                await answer.aread()
                return answer
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        self.seen.errors.append(line)
                    first = first or time.monotonic() - began
        self.seen.first.append(first)
        self.seen.answers += 1
        return answer

    async def search(self) -> httpx2.Response:
        body = {"query": "the ferry will not cross", "top_k": 2, "documents": ["diary"]}
        self.seen.searches += 1
        return await self.http.post("/v1/memstore/search", json=body)

    async def upload(self) -> httpx2.Response:
        """Upload a document, or look whether it is ready, or delete it."""
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
            self.uploaded = answer.status_code != 200
        return answer


def held_by(pid: int) -> int:
    """Bytes of main memory that a process holds."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) << 10


async def load(url: str, pid: int, seen: Seen) -> list[int]:
    """Have all clients at work; the main memory of the server over time."""
    until = time.monotonic() + SECONDS
    clients = [Client(number, url, seen) for number in range(CLIENTS)]
    going = asyncio.gather(*(client.run(until) for client in clients))
    rss = []
    for _ in range(8):
        await asyncio.sleep(SECONDS / 8)
        rss.append(held_by(pid))
    await going
    return rss


def test_many_clients_get_no_error_but_429_and_a_kill_loses_nothing(tmp_path: Path) -> None:
    seen = Seen()
    with process(tmp_path / "mem", "--host-budget", "64MB") as (server, url):
        with httpx2.Client(base_url=url, timeout=60, verify=False) as http:
            http.post(DOCUMENTS, json={"name": "diary", "text": DIARY}).raise_for_status()
            while http.get(DOCUMENTS).json()["data"][0]["state"] != "ready":
                time.sleep(0.1)
        rss = asyncio.run(load(url, server.pid, seen))
        server.kill()
    with (
        process(tmp_path / "mem") as (_, url),
        httpx2.Client(base_url=url, timeout=60, verify=False) as http,
    ):
        there = {row["name"]: row for row in http.get(DOCUMENTS).json()["data"]}
    for name, tokens in seen.ready.items():
        assert (there[name]["state"], there[name]["tokens"]) == ("ready", tokens)
    assert not seen.errors, seen.errors[:3]
    assert seen.answers and seen.searches and seen.uploads
    print(
        f"\n{CLIENTS} clients, {SECONDS:.0f} s: {seen.answers:,} answers, {seen.searches:,} "
        f"searches, {seen.uploads:,} uploads, {seen.busy:,} times 429; first text after "
        f"{statistics.median(seen.first):.2f} s; {[size >> 20 for size in rss]} MiB"
    )
    assert rss[-1] < 1.15 * rss[3] + (32 << 20)
