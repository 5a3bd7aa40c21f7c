"""The floor of the stopwatch: the same web server, one insert and commit, and (on /call) one HTTP call out.

``python -m tests.bench.floor PORT DSN TARGET`` serves until killed. Nothing is verified, decided or read back.
"""

from __future__ import annotations

import sys
import threading

import psycopg
import requests
from flask import Flask, request
from waitress import serve

_local = threading.local()


def make(dsn: str, target: str, headers: dict[str, str]) -> Flask:
    """The application: POST /insert and POST /call/<lead>/<owner>."""
    app = Flask("floor")

    def insert() -> None:
        if not hasattr(_local, "conn"):
            _local.conn = psycopg.connect(dsn)
            _local.session = requests.Session()
        _local.conn.execute("INSERT INTO floor (body) VALUES (%s)", [request.get_data()])
        _local.conn.commit()

    @app.post("/insert")
    def only_insert() -> str:
        insert()
        return ""

    @app.post("/call/<lead>/<owner>")
    def insert_and_call(lead: str, owner: str) -> str:
        insert()
        _local.session.put(
            f"{target}/people/{lead}", json={"assignedUserId": int(owner)}, headers=headers, timeout=10
        ).raise_for_status()
        return ""

    return app


if __name__ == "__main__":
    port, dsn, target, authorization, system, key = sys.argv[1:7]
    headers = {"Authorization": authorization, "X-System": system, "X-System-Key": key}
    serve(make(dsn, target, headers), host="127.0.0.1", port=int(port), threads=16)
