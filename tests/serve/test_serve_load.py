"""A server under two hundred clients that ask, search and upload at once, killed in the middle: no
error but 429, memory flat, nobody kept waiting for others, and nothing half when it is back. A part
of `make soak`: MEMSTORE_LOAD_SECONDS says for how long.
"""

import asyncio
import json
import os
import random
import statistics
import time
from collections import Counter
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

QUESTIONS = (
    "What is the combination of the lime barn?",
    "What is the price of the brown mare?",
    "What is the name of the new foal?",
)


@dataclass
class Seen:
    """What all clients saw. first: by client, seconds to the first token of each answer; served:
    by client, requests that were not refused.
    """

    first: dict[int, list[float]] = field(default_factory=dict)
    served: Counter[int] = field(default_factory=Counter)
    seconds: float = 0.0
    tokens: int = 0
    answers: int = 0
    searches: int = 0
    uploads: int = 0
    busy: int = 0
    errors: list[str] = field(default_factory=list)
    responses: dict[str, str] = field(default_factory=dict)  # id: text, of what was answered
    files: set[str] = field(default_factory=set)  # acknowledged, and not deleted


class Client:
    """One that asks, searches and uploads, one after the other, as long as it may."""

    def __init__(self, number: int, url: str, seen: Seen, store: str, seed: int) -> None:
        self.number, self.seen, self.store = number, seen, store
        self.chance = random.Random(number + seed * CLIENTS)
        # verify: an SSL context takes a tenth of a second to make
        self.http = httpx2.AsyncClient(base_url=url, timeout=120, verify=False)
        self.file: str | None = None
        self.previous: str | None = None

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
        body: dict[str, Any] = {
            "model": "memstore",
            "input": self.chance.choice(QUESTIONS),
            "stream": True,
            "memstore": {"documents": ["diary.txt", "letter.txt"]},
        }
        if self.previous is not None and self.chance.random() < 0.5:
            body["previous_response_id"] = self.previous
        began = time.monotonic()
        async with self.http.stream("POST", "/v1/responses", json=body) as answer:
            if answer.status_code != 200:
                await answer.aread()
                await self.refused(answer)
                return
            first: float | None = None
            async for line in answer.aiter_lines():
                if not line.startswith("data: "):
                    continue
                event = json.loads(line.removeprefix("data: "))
                if event["type"] == "response.output_text.delta" and first is None:
                    first = time.monotonic() - began
                if event["type"] in ("response.completed", "response.incomplete"):
                    body = event["response"]
                    self.previous = body["id"]
                    self.seen.responses[body["id"]] = body["output"][-1]["content"][0]["text"]
                    self.seen.tokens += body["usage"]["output_tokens"]
                    self.seen.answers += 1
                    self.seen.served[self.number] += 1
                    if first is not None:
                        self.seen.first.setdefault(self.number, []).append(first)
                elif event["type"] in ("response.failed", "error"):
                    self.seen.errors.append(line)

    async def search(self) -> None:
        body = {"query": "the ferry will not cross", "max_num_results": 2}
        answer = await self.http.post(f"/v1/vector_stores/{self.store}/search", json=body)
        self.seen.searches += answer.status_code == 200
        await self.refused(answer)

    async def upload(self) -> None:
        if self.file is not None:
            answer = await self.http.delete(f"/v1/files/{self.file}")
            if answer.status_code == 200:
                self.seen.files.discard(self.file)
                self.file = None
            await self.refused(answer)
            return
        text = f"Note {self.number}. " + LETTER * self.chance.randint(1, 8)
        files = {"file": (f"note-{self.number}.txt", text.encode())}
        answer = await self.http.post("/v1/files", files=files, data={"purpose": "assistants"})
        if answer.status_code == 200:
            self.file = answer.json()["id"]
            self.seen.files.add(self.file)
            self.seen.uploads += 1
        await self.refused(answer)

    async def refused(self, answer: httpx2.Response) -> None:
        if answer.status_code == 429:
            self.seen.busy += 1
            wait = float(answer.headers["retry-after"])
            await asyncio.sleep(wait * (0.5 + self.chance.random()))
        elif answer.status_code == 200:
            self.seen.served[self.number] += 1
        else:
            self.seen.errors.append(f"{answer.status_code} {answer.text}")


async def load(
    url: str, store: str, clients: int, seconds: float, seen: Seen, seed: int = 0
) -> None:
    """All clients at once: only for what they ask first is the line shorter for some."""
    all_of = [Client(number, url, seen, store, seed) for number in range(clients)]
    began = time.monotonic()
    await asyncio.gather(*(client.run(began + seconds) for client in all_of))
    seen.seconds += time.monotonic() - began


def held_by(pid: int) -> int:
    """Bytes of main memory that a process holds."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) << 10


def prepared(url: str) -> str:
    """A vector store of two documents; its id."""
    with httpx2.Client(base_url=url, timeout=60) as http:
        files = []
        for name, text in (("diary.txt", DIARY), ("letter.txt", LETTER)):
            made = http.post(
                "/v1/files", files={"file": (name, text.encode())}, data={"purpose": "assistants"}
            ).json()
            files.append(made["id"])
        store: str = http.post("/v1/vector_stores", json={"file_ids": files}).json()["id"]
        while http.get(f"/v1/vector_stores/{store}").json()["status"] != "completed":
            time.sleep(0.1)
    return store


def check_whole(url: str, seen: Seen) -> None:
    """All that was answered is there, and every file that was taken is read in the end."""
    with httpx2.Client(base_url=url, timeout=60) as http:
        for name, text in seen.responses.items():
            body = http.get(f"/v1/responses/{name}").json()
            assert body["output"][-1]["content"][0]["text"] == text
        waiting = set(seen.files)
        until = time.monotonic() + 300
        while waiting:
            assert time.monotonic() < until, f"{len(waiting)} files are still not read"
            states = {name: http.get(f"/v1/files/{name}").json()["status"] for name in waiting}
            assert set(states.values()) <= {"uploaded", "processed"}
            waiting = {name for name, state in states.items() if state == "uploaded"}
            time.sleep(0.2)


def test_two_hundred_clients_are_answered_alike_and_a_kill_loses_nothing(tmp_path: Path) -> None:
    alone, seen, rss = Seen(), Seen(), []
    with process(tmp_path / "mem", "--host-budget", "64MB") as (server, url):
        store = prepared(url)
        asyncio.run(load(url, store, 1, SECONDS / 10, alone))

        async def watched() -> None:
            going = asyncio.create_task(load(url, store, CLIENTS, SECONDS / 2, seen))
            for _ in range(4):
                await asyncio.sleep(SECONDS / 8)
                rss.append(held_by(server.pid))
            await going

        asyncio.run(watched())

        async def killed() -> None:
            going = asyncio.create_task(load(url, store, CLIENTS, SECONDS, Seen()))
            await asyncio.sleep(min(5.0, SECONDS / 8))
            server.kill()
            await asyncio.gather(going, return_exceptions=True)

        asyncio.run(killed())
    with process(tmp_path / "mem", "--host-budget", "64MB") as (server, url):
        check_whole(url, seen)
        asyncio.run(load(url, store, CLIENTS, SECONDS / 4, seen, seed=1))
        check_whole(url, seen)
    assert not seen.errors and not alone.errors, (alone.errors + seen.errors)[:3]
    assert seen.answers and seen.searches and seen.uploads
    medians = sorted(statistics.median(times) for times in seen.first.values() if len(times) >= 5)
    assert medians, "no client had five answers; raise MEMSTORE_LOAD_SECONDS"
    served = [seen.served[number] for number in range(CLIENTS)]
    every = sorted(time for times in seen.first.values() for time in times)
    many, one = seen.tokens / seen.seconds, alone.tokens / alone.seconds
    print(
        f"\n{CLIENTS} clients, {SECONDS:.0f} s: {seen.answers:,} answers, {seen.searches:,} "
        f"searches, {seen.uploads:,} uploads, {seen.busy:,} times 429\n"
        f"first token: median {statistics.median(every):.2f} s, "
        f"p95 {every[int(0.95 * len(every))]:.2f} s; "
        f"one client alone {statistics.median(alone.first[0]):.3f} s\n"
        f"tokens a second: {many:.1f}; one client alone {one:.1f}\n"
        f"clients' medians: {medians[0]:.2f} to {medians[-1]:.2f} s; "
        f"requests of each: {min(served)} to {max(served)}\n"
        f"main memory: {', '.join(f'{size / 1e6:.0f}' for size in rss)} MB"
    )
    # all that is cached is there after the first half
    assert rss[-1] < 1.15 * rss[1] + (32 << 20)
    assert medians[-1] <= 3 * medians[0]
    assert max(served) <= 3 * min(served)
