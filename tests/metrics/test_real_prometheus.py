"""The Prometheus of Debian scrapes services of this library, and its answers are what ``stats()`` says."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
import threading
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from kestrelpy import JournaledQueue, QueueEmpty
from kestrelpy.metrics import Collector, MetricsServer
from kestrelpy.work import WorkQueue
from tests.metrics.pages import needs_prometheus
from tests.support.budget import takes_long
from tests.support.paths import ROOT
from tests.support.patience import PATIENCE, until

pytestmark = needs_prometheus

CONFIG = """
global:
  scrape_interval: 1s
  scrape_timeout: 1s
  evaluation_interval: 1s
rule_files: [{rules}]
scrape_configs:
  - job_name: kestrelpy
    static_configs: [{{targets: [{targets}]}}]
"""


class Prometheus:
    """A server that runs. ``ask`` is an instant query."""

    def __init__(self, port: int) -> None:
        self._port = port

    def get(self, path: str, **query: str) -> Any:
        url = f"http://127.0.0.1:{self._port}{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=PATIENCE) as answer:
            return json.load(answer)["data"]

    def ask(self, query: str) -> dict[tuple[str, ...], float]:
        """The values, by the labels but for those that Prometheus sets."""
        found = self.get("/api/v1/query", query=query)["result"]
        return {
            tuple(sorted(f"{name}={value}" for name, value in one["metric"].items() if name not in _ITS_OWN)): float(
                one["value"][1]
            )
            for one in found
        }

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/-/ready", timeout=1) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def is_content(self) -> bool:
        """Whether nothing was wrong with the last scrapes. One may have been too slow: it has a second."""
        targets = self.get("/api/v1/targets")["activeTargets"]
        return all((target["health"], target["lastError"]) == ("up", "") for target in targets)


_ITS_OWN = ("__name__", "instance", "job")
_PENDING = {("alertname=KestrelQueueDown", "alertstate=pending", "queue=orders", "severity=critical"): 1.0}


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


@contextlib.contextmanager
def prometheus(folder: Path, *ports: int) -> Iterator[Prometheus]:
    """A Prometheus that scrapes these ports, once a second."""
    config, port = folder / "prometheus.yml", free_port()
    targets = ", ".join(f"'127.0.0.1:{each}'" for each in ports)
    config.write_text(CONFIG.format(targets=targets, rules=ROOT / "contrib/prometheus/kestrelpy.rules.yml"))
    command = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder / 'tsdb'}"]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"]
    with (folder / "log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            server = Prometheus(port)
            until(lambda: server.is_ready() or process.poll() is not None)
            assert process.poll() is None, (folder / "log").read_text()
            yield server
        finally:
            process.terminate()


def settled(server: Prometheus, query: str, expected: Mapping[Any, float]) -> None:
    """Wait until the answer is what is expected; else say what it is. It is asked for ten times a second."""
    pause = threading.Event()
    for _ in range(int(PATIENCE * 10)):
        if server.ask(query) == expected:
            return
        pause.wait(0.1)
    assert server.ask(query) == expected, server.get("/api/v1/targets")


def test_a_service_at_work(tmp_path: Path) -> None:
    over = threading.Event()

    def consume(reader: Any) -> None:
        while not over.is_set():
            with contextlib.suppress(QueueEmpty):
                item = reader.get(timeout=0.01)
                if item.id % 7 or item.error_count:
                    item.commit()
                else:
                    item.abort()

    with JournaledQueue(tmp_path / "queues", "orders", sync=0.01) as queue, WorkQueue(None, "mail") as jobs:
        registry = CollectorRegistry()
        registry.register(Collector(queue, jobs))
        with MetricsServer(registry, port=0) as page, prometheus(tmp_path, page.address[1]) as server:
            readers = [queue.reader("fast"), queue.reader("slow")]
            thread = threading.Thread(target=consume, args=(readers[0],))
            thread.start()
            for number in range(500):
                queue.put(b"x" * (number % 50))
                jobs.put(b"job", tube=f"t{number % 3}")
            until(lambda: readers[0].head == 500 and queue.stats().durable_id == 500)
            settled(server, 'kestrel_put_total{queue="orders"}', {("queue=orders",): 500})
            over.set()
            thread.join()
            stats = queue.stats()
            per_reader = {
                "kestrel_items": "items",
                "kestrel_bytes": "bytes",
                "kestrel_lag_bytes": "bytes",
                "kestrel_open_items": "open_items",
                "kestrel_delivered_total": "opened",
                "kestrel_committed_total": "committed",
                "kestrel_aborted_total": "aborted",
                "kestrel_timeouts_total": "get_misses",
            }
            for name, field in per_reader.items():
                expected = {
                    ("queue=orders", f"reader={each}"): getattr(stats.readers[each], field) for each in ("fast", "slow")
                }
                settled(server, f'{name}{{queue="orders"}}', expected)
            settled(server, 'kestrel_journal_bytes{queue="orders"}', {("queue=orders",): stats.journal_bytes})
            count = {("queue=orders",): sum(stats.sync_buckets)}
            settled(server, 'kestrel_sync_seconds_count{queue="orders"}', count)
            settled(server, 'kestrel_sync_seconds_sum{queue="orders"}', {("queue=orders",): stats.sync_seconds})
            waiting = {f"t{n}": jobs.stats_tube(f"t{n}").ready for n in range(3)}
            settled(
                server,
                'kestrel_jobs{state="ready", tube=~"t."}',
                {("queue=mail", "state=ready", f"tube={tube}"): ready for tube, ready in waiting.items()},
            )
            types = server.get("/api/v1/metadata")
            assert types["kestrel_put"][0]["type"] == "counter"
            assert types["kestrel_items"][0]["type"] == "gauge"
            assert types["kestrel_sync_seconds"][0]["type"] == "histogram"
            until(server.is_content)
            queue.close()
            settled(server, "kestrel_up", {("queue=orders",): 0, ("queue=mail",): 1})
            settled(server, 'ALERTS{alertname="KestrelQueueDown"}', _PENDING)


@takes_long
def test_two_collectors_of_one_registry(tmp_path: Path) -> None:
    """Prometheus minds no repeated HELP line: what docs/metrics.md says."""
    with JournaledQueue(tmp_path / "queues", "jobs") as queue:
        registry = CollectorRegistry()
        registry.register(Collector(queue, labels={"app": "a"}))
        registry.register(Collector(tmp_path / "queues", labels={"app": "b"}))
        with MetricsServer(registry, port=0) as page, prometheus(tmp_path, page.address[1]) as server:
            settled(server, "kestrel_up", {("app=a", "queue=jobs"): 1, ("app=b", "queue=jobs"): 1})


def spoken_port(process: subprocess.Popen[bytes]) -> int:
    """Where a command says that its page is."""
    assert process.stderr is not None
    for line in process.stderr:
        if b"figures at http://127.0.0.1:" in line:
            return int(line.partition(b"figures at http://127.0.0.1:")[2].partition(b"/metrics")[0])
    raise AssertionError("it has ended")


@contextlib.contextmanager
def command(*arguments: str) -> Iterator[int]:
    words = [sys.executable, "-m", "kestrelpy", *arguments]
    with subprocess.Popen(words, stderr=subprocess.PIPE, cwd=ROOT) as process:
        try:
            yield spoken_port(process)
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=PATIENCE)


@takes_long
def test_the_commands(tmp_path: Path) -> None:
    """The folder of another program, and the servers: each by its command."""
    any_port = "127.0.0.1:0"
    serving = ("--listen", any_port, "--metrics", any_port)
    with (
        JournaledQueue(tmp_path / "queues", "orders") as queue,
        command("metrics", str(tmp_path / "queues"), "--listen", any_port) as folder,
        command("serve", "beanstalk", "--dir", str(tmp_path / "jobs"), *serving) as beanstalk,
        command("serve", "kestrel", "--dir", str(tmp_path / "kestrel"), *serving) as kestrel,
        prometheus(tmp_path, folder, beanstalk, kestrel) as server,
    ):
        queue.put_many([b"x"] * 3)
        settled(server, 'kestrel_put_total{queue="orders"}', {("queue=orders",): 3})
        settled(server, 'kestrel_items{queue="orders"}', {("queue=orders",): 3})
        settled(server, "kestrel_server_connections", {(): 0})
        settled(server, 'kestrel_jobs{state="ready"}', {("queue=work", "state=ready", "tube=default"): 0})
        settled(server, 'kestrel_server_commands_total{command="set"}', {("command=set",): 0})
        until(server.is_content)
