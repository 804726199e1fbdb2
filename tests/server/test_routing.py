"""Two replicas of `kvrag serve` behind HAProxy: prompts go where their chunks are in memory."""

import json
import os
import random
import shutil
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest

from kvrag.chunk import Chunk, Document
from kvrag.engine.base import ROUTE_HEADER, route_key
from kvrag.engine.engine import KVEngine
from kvrag.ingest.index import Index
from tests.support.api_server import Served, serving
from tests.support.rag import make_index
from tests.support.servers import free_port, wait_for

CONFIG = Path(__file__).parents[2] / "deploy" / "haproxy.cfg"
BY_KEY = "balance hdr(X-KVRag-Route)"
NUM_TOPICS, PER_TOPIC, NUM_PROMPTS = 12, 4, 80


def test_the_key_depends_on_the_set_alone() -> None:
    assert route_key(["b", "a", "c"]) == route_key(["c", "a"]) == "a"
    assert route_key([]) == ""


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Index]:
    folder = tmp_path_factory.mktemp("routed")
    with make_index(folder) as made:
        made.add(
            [
                Document(
                    source=f"{topic}-{part}",
                    text=f"Part {part} of report {topic} is by author {7 * topic + part}. " * 3,
                )
                for topic in range(NUM_TOPICS)
                for part in range(PER_TOPIC)
            ]
        )
        yield made


def _answers(url: str) -> bool:
    try:
        urlopen(url, timeout=5).close()
    except (URLError, OSError):
        return False
    return True


@contextmanager
def proxy(config: Path, listen: str, replicas: Sequence[str]) -> Iterator[None]:
    places = {
        f"REPLICA_{number}": one.removeprefix("http://") for number, one in enumerate(replicas, 1)
    }
    log = config.with_suffix(".log")
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(shutil.which("haproxy")), "-f", str(config)],
            stdout=output,
            stderr=output,
            env={**os.environ, "LISTEN": listen, **places},
        )
    wait_for(lambda: _answers(f"http://{listen}/v1/models"), process, log)
    try:
        yield
    finally:
        process.terminate()
        process.wait(30)


@contextmanager
def naming(name: str) -> Iterator[str]:
    """Listen, and answer each request with a name; yield the URL."""

    class Named(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(200)
            self.send_header("Content-Length", str(len(name)))
            self.end_headers()
            self.wfile.write(name.encode())

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Named) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.skipif(shutil.which("haproxy") is None, reason="haproxy is not installed")
def test_conversations_without_a_key_stay_at_their_replica(tmp_path: Path) -> None:
    config = tmp_path / "haproxy.cfg"
    # Without checks of health: on a busy machine one is late, and its conversations move on.
    config.write_text(CONFIG.read_text().replace(" check\n", "\n"))
    listen = f"127.0.0.1:{free_port()}"

    def replica_of(messages: list[dict[str, str]]) -> str:
        body = json.dumps({"stream": True, "messages": messages}).encode()
        with urlopen(Request(f"http://{listen}/v1/chat/completions", body), timeout=60) as answer:
            return str(answer.read(), "utf-8")

    with naming("one") as one, naming("two") as two, proxy(config, listen, (one, two)):
        found = []
        for number in range(20):
            system = [{"role": "system", "content": "Be brief. " * 500}] * (number % 2)
            turns = [{"role": "user", "content": f'Is "{number}" a number? ' + "é" * 9_000}]
            for _ in range(3):
                found.append(replica_of(system + turns))
                turns += [{"role": "assistant", "content": "Yes. " * 30_000}, turns[0]]
            assert len({*found[-3:]}) == 1, number
        assert {*found} == {"one", "two"}


@contextmanager
def replica(index: Index) -> Iterator[Served]:
    """A server with memory for 60 % of the records, before the index's folder."""
    limit = int(0.6 * sum(dict(index.store.sizes()).values()))
    store = f"tiered:memory:?limit={limit}|{index.store.url}"
    with Index.open(index.path, store=store) as opened:
        engine = KVEngine(opened, max_tokens=16, session_bytes=0)
        with serving(opened, engine=engine) as running:
            yield running


def hit_rate(index: Index, folder: Path, balance: str) -> float:
    """Return the share of records that came from memory."""
    listing = [
        chunk
        for source in sorted(row.source for row in index.documents())
        for chunk in index.get_chunks(index.catalog.chunk_ids_of(source))
    ]
    listen = f"127.0.0.1:{free_port()}"
    config = folder / "haproxy.cfg"
    config.write_text(CONFIG.read_text().replace(BY_KEY, balance))
    with (
        replica(index) as one,
        replica(index) as two,
        proxy(config, listen, (one.server.url, two.server.url)),
    ):
        draw = random.Random(5)
        for _ in range(NUM_PROMPTS):
            topic = draw.randrange(NUM_TOPICS) * PER_TOPIC
            ask(f"http://{listen}", draw.sample(listing[topic : topic + PER_TOPIC], 3))
        counts = [
            [tier.hits for tier in served.engine.index.store.counts()] for served in (one, two)
        ]
    memory, disk = (sum(found) for found in zip(*counts, strict=True))
    # Neither has had all of the load.
    assert all(sum(found) > NUM_PROMPTS / 2 for found in counts)
    return memory / (memory + disk)


def ask(url: str, chunks: Sequence[Chunk]) -> None:
    prompt = "\n\n".join([*(chunk.text for chunk in chunks), "Question: who? Answer:"])
    body = json.dumps({"model": "model", "prompt": prompt, "max_tokens": 1}).encode()
    headers = {
        "Content-Type": "application/json",
        ROUTE_HEADER: route_key(chunk.chunk_id for chunk in chunks),
    }
    with urlopen(Request(f"{url}/v1/completions", body, headers), timeout=60) as response:
        assert json.loads(response.read())["choices"]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("haproxy") is None, reason="haproxy is not installed")
def test_prompts_go_where_their_chunks_are_in_memory(index: Index, tmp_path: Path) -> None:
    rates = {}
    for name, balance in (
        ("in turn", "balance roundrobin"),
        ("by key", "balance hdr(X-KVRag-Route)"),
    ):
        folder = tmp_path / name
        folder.mkdir()
        rates[name] = hit_rate(index, folder, balance)
    print({name: round(rate, 3) for name, rate in rates.items()})
    # Every chunk is read from disk once at least.
    assert rates["by key"] > rates["in turn"] + 0.1
