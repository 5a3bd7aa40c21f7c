"""Which WSGI server behind `serve` and `web`: accept's own path through each, one after the other, on one machine.

Not part of the tests. Run ``python -m tests.bench.web_servers`` with gunicorn, granian and cheroot installed beside
Turnlock; it prints a row per server: accepted deliveries per second over the slowest server's, p50 and p99.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

from cryptography.fernet import Fernet

from connector import tenants
from connector.app import create_app
from connector.process import open_runtime
from connector.settings import Settings, from_environment
from tests import homes
from tests.ports import free_port

CLIENTS, SECONDS, ROUNDS = 16, 3.0, 3
SERVERS = {
    "waitress (8 threads)": "from waitress import serve; serve(app, host='127.0.0.1', port=PORT, threads=8)",
    "gunicorn gthread (1 x 8)": [
        "-m", "gunicorn", "-k", "gthread", "-w", "1", "--threads", "8", "-b", "127.0.0.1:{port}", "--no-control-socket",
        "tests.bench.web_servers:application()",
    ],
    "gunicorn gthread (2 x 8)": [
        "-m", "gunicorn", "-k", "gthread", "-w", "2", "--threads", "8", "-b", "127.0.0.1:{port}", "--no-control-socket",
        "tests.bench.web_servers:application()",
    ],
    "granian (1 x 8)": [
        "-m", "granian", "--interface", "wsgi", "--workers", "1", "--blocking-threads", "8", "--host", "127.0.0.1",
        "--port", "{port}", "--no-ws", "--factory", "tests.bench.web_servers:application",
    ],
    "cheroot (8 threads)": (
        "from cheroot.wsgi import Server; Server(('127.0.0.1', PORT), app, numthreads=8).safe_start()"
    ),
}  # fmt: skip


def application() -> Any:
    """The WSGI application for a server that imports it."""
    runtime = open_runtime(from_environment(), upgrade=False, threads=12).__enter__()
    return create_app(runtime)


def _signed(key: str, number: int) -> tuple[bytes, dict[str, str]]:
    event = {"eventId": f"bench-{os.getpid()}-{number}-{time.time_ns()}", "event": "peopleCreated"}
    body = json.dumps(event | {"resourceIds": [number], "uri": None}).encode()
    signature = hmac.new(key.encode(), base64.b64encode(body), hashlib.sha256).hexdigest()
    return body, {"FUB-Signature": signature, "Content-Type": "application/json"}


def _load(port: int, path: str, key: str) -> tuple[float, list[float]]:
    took: list[list[float]] = [[] for _ in range(CLIENTS)]
    ends = time.monotonic() + SECONDS

    def client(mine: list[float], number: int) -> None:
        connection = HTTPConnection("127.0.0.1", port, timeout=10)
        while time.monotonic() < ends:
            number += CLIENTS
            body, headers = _signed(key, number)
            began = time.monotonic()
            connection.request("POST", path, body, headers)
            response = connection.getresponse()
            response.read()
            if response.status != 200:
                raise RuntimeError(f"status {response.status}")
            mine.append(time.monotonic() - began)

    threads = [threading.Thread(target=client, args=(mine, at)) for at, mine in enumerate(took)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    every = sorted(t for mine in took for t in mine)
    return len(every) / SECONDS, every


def main() -> None:
    """Measure and print."""
    with homes.passing() as folder:
        key = Fernet.generate_key().decode()
        settings = Settings(home=folder / "db", secret_keys=(key,), allow_private_hosts=True)
        with open_runtime(settings, upgrade=True) as runtime:
            secrets = {"api_key": "k", "system_key": "s" * 32}
            tenants.add_tenant(runtime, "b", "followupboss", base_url=None, parameters={}, secret_values=secrets)
            with runtime.engine.connect() as conn:
                path = urlsplit(tenants.hook_url(runtime, conn, runtime.tenant_named(conn, "b"))).path
            environment = dict(os.environ, TURNLOCK_SECRET_KEYS=key, TURNLOCK_HOME=str(settings.home))
            found: dict[str, list[tuple[float, list[float]]]] = {}
            for _ in range(ROUNDS):
                for name, how in SERVERS.items():
                    module = how[1] if isinstance(how, list) else how.split()[1].split(".")[0]
                    if importlib.util.find_spec(module) is None:
                        continue
                    port = free_port()
                    code = f"from tests.bench.web_servers import application; app = application(); PORT = {port}; {how}"
                    arguments = [a.format(port=port) for a in how] if isinstance(how, list) else ["-c", code]
                    with subprocess.Popen(
                        [sys.executable, *arguments], env=environment, stderr=subprocess.DEVNULL, start_new_session=True
                    ) as process:
                        try:
                            _wait(port)
                            _load(port, path, secrets["system_key"])  # warm
                            found.setdefault(name, []).append(_load(port, path, secrets["system_key"]))
                        finally:
                            os.killpg(process.pid, signal.SIGKILL)
            slowest = min(max(rate for rate, _ in rounds) for rounds in found.values())
            for name, rounds in found.items():
                rate, times = max(rounds)
                p50, p99 = times[len(times) // 2] * 1000, times[len(times) * 99 // 100] * 1000
                print(f"{name:26} {rate:6.0f}/s  x{rate / slowest:.2f}  p50 {p50:5.1f} ms  p99 {p99:6.1f} ms")


def _wait(port: int) -> None:
    for _ in range(200):
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=0.1):
                return
        except OSError:
            time.sleep(0.05)
    raise RuntimeError("the server did not start")


if __name__ == "__main__":
    main()
