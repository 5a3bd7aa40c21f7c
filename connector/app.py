"""The WSGI application: the hooks that CRMs post to, and two probes for whoever runs it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING, TypeVar

from flask import Flask, Response, current_app, jsonify
from sqlalchemy.exc import SQLAlchemyError
from werkzeug import wrappers
from werkzeug.exceptions import HTTPException, MethodNotAllowed

from connector import accept, log, migrate, oauth_pages
from connector.runtime import Runtime
from routing.model import Flag

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

AnyResponse = TypeVar("AnyResponse", bound=wrappers.Response)

_HOOK = re.compile(r"/hooks/([^/]+)(?:/([^/]+))?")
_log = log.get("web")


def create_app(runtime: Runtime) -> Flask:
    """The application on a runtime that was made and checked before."""
    app = Flask("turnlock", static_folder=None)
    app.extensions["turnlock"] = runtime
    app.register_blueprint(oauth_pages.blueprint)
    app.add_url_rule("/healthz", view_func=healthz)
    app.add_url_rule("/readyz", view_func=readyz)
    app.register_error_handler(HTTPException, _http_error)
    app.register_error_handler(Exception, _unexpected)
    app.after_request(_headers)
    # How Flask has one application put before it: https://flask.palletsprojects.com/en/stable/api/#flask.Flask.wsgi_app
    app.wsgi_app = _hooks_first(runtime, app.wsgi_app)  # type: ignore[method-assign,assignment]
    return app


def _hooks_first(runtime: Runtime, others: WSGIApplication) -> WSGIApplication:
    """Deliveries go past what Flask does around a request, which takes as long as proving one; the rest is Flask's."""

    def serve(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        hook = _HOOK.fullmatch(environ.get("PATH_INFO", ""))
        if hook is None:
            return others(environ, start_response)
        request = wrappers.Request(environ)
        if request.method != "POST":
            response = _http_error(MethodNotAllowed(["POST"]))
        else:
            try:
                answer = accept.receive(runtime, request, *hook.groups())
            except Exception as error:  # noqa: BLE001 - the last resort of this address
                response = _http_error(error) if isinstance(error, HTTPException) else _unexpected(error)
            else:
                if isinstance(answer, accept.Accepted):
                    status, headers, body = _accepted(answer)
                    start_response(status, [*headers])
                    return [body]
                response = answer
        return _hook_headers(response)(environ, start_response)

    return serve


@lru_cache(maxsize=16)
def _accepted(answer: accept.Accepted) -> tuple[str, list[tuple[str, str]], bytes]:
    """Status, headers and body of the answer to nearly every request: made once, it is a sixth of taking one."""
    response = _hook_headers(wrappers.Response(answer.text, content_type=answer.content_type))
    body, status, headers = response.get_wsgi_response({"REQUEST_METHOD": "POST"})
    return status, headers, b"".join(body)


def healthz() -> Response:
    """The process answers."""
    return jsonify(status="ok")


def readyz() -> tuple[Response, int]:
    """The process can store a delivery: the database answers and has the schema this code needs."""
    runtime: Runtime = current_app.extensions["turnlock"]
    try:
        with runtime.engine.connect() as conn:
            missing = frozenset(Flag) - migrate.stages(conn)
    except SQLAlchemyError as error:
        return jsonify(status="unavailable", **log.fault(error)), 503
    if Flag.WRITE_BACK in missing:
        return jsonify(status="unavailable", error="the schema is missing; run `turnlock migrate`"), 503
    return jsonify(status="ready"), 200


def _http_error(error: HTTPException) -> wrappers.Response:
    # 406 and 410 make CRMs delete the hook: Flask raises neither by itself, and if anything ever did, it is a 404.
    status = error.code if error.code not in (None, 406, 410) else 404
    kept = [(name, value) for name, value in error.get_headers() if name != "Content-Type"]  # Allow, Retry-After
    return wrappers.Response(f"{error.name}.", status, kept, content_type="text/plain")


def _unexpected(error: Exception) -> wrappers.Response:
    """The last resort: nothing was promised, so the CRM sends it again; the log says where, never what."""
    _log.error("unexpected", **log.fault(error))
    return wrappers.Response("Not stored, please send it again.", 503, {"Retry-After": "60"}, content_type="text/plain")


def _hook_headers(response: wrappers.Response) -> wrappers.Response:
    response.headers["Content-Security-Policy"] = "default-src 'none'"
    return _headers(response)


def _headers(response: AnyResponse) -> AnyResponse:
    response.headers["Cache-Control"] = "no-store"
    response.headers["X-Content-Type-Options"] = "nosniff"
    response.headers["Referrer-Policy"] = "no-referrer"
    return response
