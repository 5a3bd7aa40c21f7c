"""OAuth 2.0 for adapters: consent by authorization code, PKCE, renewal; client credentials. Pure but for the calls.

Sources: RFC 6749 (4.1, 4.4, 6), RFC 7636 (PKCE, S256), RFC 7009 (revocation), RFC 9700 (current practice).
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import quote_plus, urlencode, urlsplit

from adapters.outcome import CrmError, Outcome
from adapters.payload import Fields

if TYPE_CHECKING:
    from adapters.client import Client

#: Seconds that a token is taken to live where the CRM does not say (RFC 6749, 5.1 only recommends it).
LIFETIME = 3600.0
_LONGEST = 86400.0  # a token that is said to live longer is renewed daily all the same
_NOT_CONNECTED = "The CRM account is not connected yet. Run `turnlock connect` and open its link."
_RECONNECT = "The CRM account took its consent back, or it ended. Run `turnlock connect` and open its link."
_GIVEN_NONE = (
    "The CRM gives the tenant's own app no token. See there that its client credentials flow is on and runs as an "
    "active user, and that the base address is the account's own; then run `turnlock connect`."
)
_APP_REFUSED = "The CRM refuses the app itself. Correct its client id and client secret with `turnlock app`."
_OWN_APP_REFUSED = (
    "The CRM refuses the tenant's own app. Correct its secret with `turnlock tenant secret <tenant> client_secret`, or "
    "its id with `turnlock tenant set <tenant> --param client_id=...`."
)
_INACTIVE = "The CRM says that the connected user or the whole account is inactive. Reactivate it there."
# RFC 6749, 5.2, and Salesforce's own word for an id that it does not know (help: OAuth 2.0 error codes).
_OF_THE_APP = frozenset({"invalid_client", "unauthorized_client", "invalid_client_id"})
_OF_THE_USER = frozenset({"inactive_user", "inactive_org"})
_CODES = frozenset({"invalid_grant"}) | _OF_THE_APP | _OF_THE_USER


@dataclass(frozen=True, slots=True)
class OAuth:
    """How accounts of one CRM grant access to an app.

    `account` reads the CRM's id of the account out of a token answer, `base_url` the address of its API where each
    account has its own. `replaces` names the secrets of a tenant that the app has instead. Without `scopes` the app's
    registration names them. With `basic` the app proves itself to the token address by HTTP Basic (RFC 6749, 2.3.1),
    else in the form's body. With `own_host` consent and tokens are had at the tenant's own base address, where it names
    one. `revoke_url` is where a token is given back (RFC 7009); None where the CRM has no such address. Unless
    `revoke_proves` is False the app proves itself there, too. With `client_credentials` a tenant may have an app of its
    own, which is given tokens without anybody's consent (RFC 6749, 4.4), at the tenant's own base address. `removed`
    reads which account has removed the app out of what the CRM then sends to the app's callback address, with the app's
    :func:`basic`; None where it sends nothing.
    """

    authorize_url: str
    token_url: str
    scopes: tuple[str, ...]
    pkce: bool
    account: Callable[[Fields], str | None]
    base_url: Callable[[Fields], str | None] | None = None
    replaces: frozenset[str] = frozenset()
    basic: bool = False
    own_host: bool = False
    revoke_url: str | None = None
    revoke_proves: bool = True
    client_credentials: bool = False
    removed: Callable[[Fields], str] | None = None


@dataclass(frozen=True, slots=True)
class App:
    """An app as registered at the CRM: its id, its secret, where it is called back."""

    client_id: str
    client_secret: str = field(repr=False)
    redirect_uri: str


@dataclass(frozen=True, slots=True)
class Tokens:
    """A token answer. ``refresh`` None: the one there was stays good. ``lives`` is in seconds."""

    access: str = field(repr=False)
    refresh: str | None = field(repr=False)
    lives: float
    account: str | None = None
    base_url: str | None = None


class NotConnected(CrmError):
    """There is no token to call with, and only a human can change that. No call was made."""

    def __init__(self, *, before: bool, own_app: bool = False) -> None:
        super().__init__(Outcome.REAUTHORISE, text=_GIVEN_NONE if own_app else _RECONNECT if before else _NOT_CONNECTED)


class StaleToken(CrmError):
    """The token has run out and must be renewed before any call. No call was made."""

    def __init__(self, wait: float = 0.5) -> None:
        super().__init__(Outcome.WAIT, retry_after=wait, text="The access token is being renewed.")


class DeadGrant(CrmError):
    """The CRM says that the grant is over (``invalid_grant``): repeating never helps."""

    def __init__(self, status: int | None, *, own_app: bool = False) -> None:
        super().__init__(Outcome.REAUTHORISE, status=status, text=_GIVEN_NONE if own_app else _RECONNECT)


def challenge(verifier: str) -> str:
    """The S256 code challenge of a verifier (RFC 7636, 4.2)."""
    return base64.urlsafe_b64encode(hashlib.sha256(verifier.encode()).digest()).decode().rstrip("=")


def consent_url(oauth: OAuth, app: App, state: str, verifier: str | None, *, at: str | None = None) -> str:
    """Where the account's admin is sent to agree; `at` names another address than the CRM's own."""
    query = {"client_id": app.client_id, "redirect_uri": app.redirect_uri, "response_type": "code"}
    query |= {"scope": " ".join(oauth.scopes)} if oauth.scopes else {}
    query["state"] = state
    if verifier is not None:
        query |= {"code_challenge": challenge(verifier), "code_challenge_method": "S256"}
    return f"{at or oauth.authorize_url}?{urlencode(query)}"


def redeem(client: Client, oauth: OAuth, app: App, code: str, verifier: str | None) -> Tokens:
    """Exchange the code of a consent for tokens. Raises :class:`CrmError`."""
    form = {"grant_type": "authorization_code", "code": code, "redirect_uri": app.redirect_uri}
    return _ask(client, oauth, app, form | ({"code_verifier": verifier} if verifier is not None else {}))


def renew(client: Client, oauth: OAuth, app: App, refresh: str) -> Tokens:
    """New tokens for a refresh token. Raises :class:`DeadGrant`, or another :class:`CrmError` to try again after."""
    return _ask(client, oauth, app, {"grant_type": "refresh_token", "refresh_token": refresh})


def fetch(client: Client, oauth: OAuth, app: App) -> Tokens:
    """A token for an app itself (RFC 6749, 4.4), without a refresh token: the next is asked for in the same way.

    Raises:
        DeadGrant: the account lets the app have none. Another :class:`CrmError` is to try again after.
    """
    return _ask(client, oauth, app, {"grant_type": "client_credentials"}, own_app=True)


def revoke(client: Client, oauth: OAuth, app: App, token: str) -> None:
    """Give back what was granted, by its refresh token or else its access token. Raises :class:`CrmError`."""
    if oauth.revoke_url is None:
        return
    form, headers = {"token": token}, dict[str, str]()
    if oauth.revoke_proves:
        proof, headers = _proof(oauth, app)
        form |= {"token_type_hint": "refresh_token", **proof}  # without an own app there is always one
    client.post(urlsplit(oauth.revoke_url).path, data=form, headers=headers)


def _proof(oauth: OAuth, app: App) -> tuple[dict[str, str], dict[str, str]]:
    """What shows that it is the app who asks: fields of a form and headers."""
    if oauth.basic:
        return {}, {"Authorization": basic(app)}
    return {"client_id": app.client_id, "client_secret": app.client_secret}, {}


def basic(app: App) -> str:
    """An app's proof of itself to the CRM, or of the CRM to the app: only these two know it (RFC 6749, 2.3.1)."""
    pair = f"{quote_plus(app.client_id)}:{quote_plus(app.client_secret)}".encode()
    return "Basic " + base64.b64encode(pair).decode()


def _ask(client: Client, oauth: OAuth, app: App, form: Mapping[str, str], *, own_app: bool = False) -> Tokens:
    """Never in the query: addresses are logged on their way."""
    proof, headers = _proof(oauth, app)
    try:
        answer = client.post(urlsplit(oauth.token_url).path, data={**form, **proof}, headers=headers)
    except CrmError as error:
        said = _said(error.data)
        if said == "invalid_grant":
            raise DeadGrant(error.status, own_app=own_app) from None
        if said in _OF_THE_USER:
            raise CrmError(Outcome.FORBIDDEN, status=error.status, text=_INACTIVE) from None
        if said in _OF_THE_APP or error.outcome is Outcome.REAUTHORISE:
            text = _OWN_APP_REFUSED if own_app else _APP_REFUSED
            raise CrmError(Outcome.FORBIDDEN, status=error.status, text=text) from None
        raise
    with answer.reading():
        data = Fields(answer.data, strict=False)
        lives = data.number("expires_in")
        return Tokens(
            access=data.required_text("access_token", longest=20_000),
            refresh=data.text("refresh_token"),
            lives=min(max(float(lives), 1.0), _LONGEST) if lives is not None else LIFETIME,
            account=oauth.account(data),
            base_url=oauth.base_url(data) if oauth.base_url is not None else None,
        )


def _said(data: Any) -> str | None:
    """The code of an error (RFC 6749, 5.2). Some CRMs tell it at the head of a ``message``."""
    told = data if isinstance(data, dict) else {}
    heads = [str(told.get(name)).partition(":")[0].lower().replace(" ", "_") for name in ("error", "message")]
    return next((head for head in heads if head in _CODES), None)
