"""The pages of a consent: an admin's link leads to the CRM, and the CRM leads back, or tells of its end."""

from __future__ import annotations

from flask import Blueprint, Response, current_app, redirect, request
from markupsafe import escape
from sqlalchemy.exc import SQLAlchemyError

from adapters.base import Unreadable
from adapters.outcome import CrmError
from connector import log, oauth
from connector.database import is_contention, is_outage
from connector.errors import TurnlockError
from connector.runtime import Runtime

blueprint = Blueprint("oauth", __name__, url_prefix="/oauth")
_COOKIE = "turnlock_oauth"
_LONGEST = 16 * 1024  # bytes of what a CRM may tell of an account
_log = log.get("oauth")


@blueprint.get("/start/<ticket>")
def start(ticket: str) -> Response:
    """To the CRM, with a state that is bound to the tenant and to this browser."""
    runtime: Runtime = current_app.extensions["turnlock"]
    begun = oauth.begin(runtime, ticket)
    if begun is None:
        return _page(404, "This link is not valid any more. Ask for a new one: turnlock connect.")
    url, browser = begun
    answer = redirect(url, 302)
    # Lax: the CRM's redirect is a top-level GET from another site, and must bring it along.
    secure = runtime.settings.public_url.startswith("https:")
    lives = int(oauth.LINK_LIVES.total_seconds())
    answer.set_cookie(_COOKIE, browser, max_age=lives, path="/oauth", secure=secure, httponly=True, samesite="Lax")
    return Response(answer.get_data(), answer.status_code, answer.headers)


@blueprint.get("/callback")
def callback() -> Response:
    """From the CRM, with a code. Nothing that the address holds is shown or logged."""
    runtime: Runtime = current_app.extensions["turnlock"]
    state, code = request.args.get("state", ""), request.args.get("code", "")
    browser = request.cookies.get(_COOKIE, "")
    if not code or not state or not browser:
        return _page(400, "No consent was given, or not in this browser. Open the link again to try once more.")
    try:
        tenant, account = oauth.finish(runtime, state, browser, code)
    except TurnlockError as error:
        return _page(400, str(error))
    except CrmError as error:
        _log.warning("consent not redeemed", outcome=error.outcome.value, status=error.status)
        return _page(
            502, f"The CRM did not complete the connection. {error.text} Open the link again to try once more."
        )
    except SQLAlchemyError as error:
        if not (is_outage(error) or is_contention(error)):
            raise
        _log.warning("consent not stored", **log.fault(error))
        return _page(503, "Turnlock could not store the connection just now. Open the link again.")
    _log.info("connected", tenant=tenant.name, crm=tenant.crm)
    answer = _page(
        200, f"Connected: {tenant.name}{f', account {account}' if account else ''}. You may close this page."
    )
    answer.delete_cookie(_COOKIE, path="/oauth")
    return answer


@blueprint.delete("/callback")
def removed() -> Response:
    """From the CRM, too: an account has removed the app. It is believed by the app's own id and secret."""
    runtime: Runtime = current_app.extensions["turnlock"]
    body = request.stream.read(_LONGEST + 1)
    if len(body) > _LONGEST:
        return _page(413, "Too long.")
    try:
        known = oauth.removed(runtime, request.headers.get("Authorization", ""), body)
    except Unreadable as error:
        return _page(400, f"Not readable: {error.reason}.")
    except SQLAlchemyError as error:
        if not (is_outage(error) or is_contention(error)):
            raise
        _log.warning("removal not stored", **log.fault(error))
        return _page(503, "Not stored, please send it again.")
    return _page(200, "Noted.") if known else _page(401, "Not accepted.")


def _page(status: int, text: str) -> Response:
    body = f"<!doctype html><meta charset=utf-8><title>Turnlock</title><p>{escape(text)}</p>"
    headers = {"Content-Security-Policy": "default-src 'none'"}
    return Response(body, status, headers, content_type="text/html; charset=utf-8")
