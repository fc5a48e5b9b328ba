"""A real S3 server and a real Valkey server whose answers are cut, late, doubled, changed, or not
theirs, read by several threads: no wrong block, every failure named, and the process ends.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from support.hostile_proxy import KINDS, S3_ANSWERS, VALKEY_ANSWERS, proxy
from support.paths import ROOT, TESTS
from support.published import publish_all, write
from support.services import S3_ENVIRONMENT, make_bucket, s3_server
from support.valkey_server import Server, valkey_server

pytestmark = pytest.mark.services

RUNS = int(os.environ.get("MEMSTORE_HOSTILE_SERVICES", "2"))
READS = 60  # of each thread
URL = "s3://bucket/library"


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The endpoint of an S3 server with a published memory."""
    with s3_server() as endpoint, pytest.MonkeyPatch.context() as patch:
        make_bucket(endpoint, "bucket")
        for name, value in (S3_ENVIRONMENT | {"AWS_ENDPOINT_URL": endpoint}).items():
            patch.setenv(name, value)
        with write(tmp_path_factory.mktemp("written") / "m", codec="raw") as store:
            publish_all(store, URL)
        yield endpoint


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with valkey_server(tmp_path_factory.mktemp("valkey")) as server:
        yield server


def test_hostile_answers_under_load_give_no_wrong_block(s3: str, valkey: Server) -> None:
    done, told = Counter[str](), Counter[str]()
    port = urlsplit(s3).port
    assert port is not None
    for seed in range(RUNS):
        with (
            proxy(port, S3_ANSWERS, seed, rate=0.3) as store,
            proxy(valkey.port, VALKEY_ANSWERS, seed, rate=0.2) as cache,
        ):
            store.quiet = cache.quiet = False
            environment = os.environ | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{store.port}"}
            environment["PYTHONPATH"] = f"{TESTS}:{ROOT}"
            command = [sys.executable, TESTS / "support" / "hostile_reads.py", URL]
            command += [f"redis://127.0.0.1:{cache.port}/0", str(seed), str(READS)]
            run = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=600
            )
            assert run.returncode == 0 and "Traceback" not in run.stderr, run.stderr
            found = json.loads(run.stdout)
            assert not found["wrong"], (seed, found)
            told += Counter(found["told"])
            done += store.done + cache.done
    print(dict(done), dict(told))  # shown by -s
    assert {*done} == {*KINDS} and told["answered"] > 0, (done, told)
