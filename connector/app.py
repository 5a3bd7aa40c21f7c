"""The WSGI application: the hooks that CRMs post to, and two probes for whoever runs it."""

from __future__ import annotations

from flask import Flask, Response, current_app, jsonify, request
from sqlalchemy.exc import SQLAlchemyError
from werkzeug.exceptions import HTTPException

from connector import accept, log, migrate, oauth_pages
from connector.runtime import Runtime
from routing.model import Flag

_log = log.get("web")


def create_app(runtime: Runtime) -> Flask:
    """The application on a runtime that was made and checked before."""
    app = Flask("turnlock", static_folder=None)
    app.extensions["turnlock"] = runtime
    app.register_blueprint(accept.blueprint)
    app.register_blueprint(oauth_pages.blueprint)
    app.add_url_rule("/healthz", view_func=healthz)
    app.add_url_rule("/readyz", view_func=readyz)
    app.register_error_handler(HTTPException, _http_error)
    app.register_error_handler(Exception, _unexpected)
    app.after_request(_headers)
    return app


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


def _http_error(error: HTTPException) -> Response:
    # 406 and 410 make CRMs delete the hook: Flask raises neither by itself, and if anything ever did, it is a 404.
    status = error.code if error.code not in (None, 406, 410) else 404
    kept = [(name, value) for name, value in error.get_headers() if name != "Content-Type"]  # Allow, Retry-After
    return Response(f"{error.name}.", status, kept, content_type="text/plain")


def _unexpected(error: Exception) -> Response:
    """The last resort: nothing was promised, so the CRM sends it again; the log says where, never what."""
    _log.error("unexpected", **log.fault(error))
    return Response("Not stored, please send it again.", 503, {"Retry-After": "60"}, content_type="text/plain")


def _headers(response: Response) -> Response:
    response.headers["Cache-Control"] = "no-store"
    response.headers["X-Content-Type-Options"] = "nosniff"
    response.headers["Referrer-Policy"] = "no-referrer"
    if request.path.startswith("/hooks/"):
        response.headers["Content-Security-Policy"] = "default-src 'none'"
    return response
