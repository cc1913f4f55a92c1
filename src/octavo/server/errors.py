"""Errors as a client sees them: OpenAI's error body, one status for each kind, and the name of the field at fault.

The tree of `octavo.errors` is turned into statuses here and nowhere else. What is our fault never shows its insides:
the message is in the log.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from octavo.errors import OctavoError, RequestError, UnavailableError
from octavo.logs import logger
from octavo.server.wire import dumps

KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    503: "unavailable_error",
}
FIELD = re.compile(r"^(?:prompt \d+: )?([a-z_]+)(?:\[\d+\])?(?:=| entry| key|:)")


class ApiError(Exception):
    """An answer with a status other than 200. param: the field at fault. headers: such as Retry-After."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        self.details = dict(details or {})

    def body(self) -> dict[str, Any]:
        """The JSON body; `details` (numbers behind a refusal) stand beside OpenAI's four fields."""
        kind = KINDS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.param,
                "code": self.code,
                **self.details,
            }
        }


def as_api_error(error: BaseException) -> ApiError:
    """What a client is told of an error from below."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        found = FIELD.match(str(error))
        param = found[1] if found else None
        if param in ("json", "regex", "choice", "grammar"):
            param = f"structured_outputs.{param}"
        return ApiError(400, str(error), param=param, code=_code(error))
    if isinstance(error, UnavailableError):
        return ApiError(503, str(error), code="unavailable", headers={"Retry-After": "5"})
    logger.error("a request failed: %s: %s", type(error).__name__, error, exc_info=error)
    what = "the engine" if isinstance(error, OctavoError) else "the server"
    return ApiError(500, f"{what} failed at this request; the log has the cause", code="internal_error")


def _code(error: RequestError) -> str:
    name = type(error).__name__.removesuffix("Error")
    return {"Capacity": "too_large", "Prompt": "invalid_prompt", "Sampling": "invalid_parameter"}.get(
        name, "invalid_request"
    )


def respond(error: ApiError) -> Response:
    return Response(dumps(error.body()), error.status, error.headers, "application/json")


def install(app: FastAPI) -> None:
    """Every error leaves in this form."""

    @app.exception_handler(ApiError)
    async def _ours(request: Request, error: ApiError) -> Response:
        return respond(error)

    @app.exception_handler(OctavoError)
    async def _below(request: Request, error: OctavoError) -> Response:
        return respond(as_api_error(error))

    @app.exception_handler(RequestValidationError)
    async def _invalid(request: Request, error: RequestValidationError) -> Response:
        return respond(_validation(error, request.headers.get("content-type", "")))

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> Response:
        message = str(error.detail)
        if error.status_code == 404:
            message = f"there is nothing at {request.method} {request.url.path}"
        elif error.status_code == 405:
            message = f"{request.url.path} does not take {request.method}"
        elif error.status_code == 400:
            message = "the body is not JSON in UTF-8"
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
        return respond(ApiError(error.status_code, message, code=code, headers=dict(error.headers or {})))

    @app.exception_handler(Exception)
    async def _unknown(request: Request, error: Exception) -> Response:
        return respond(as_api_error(error))


def _validation(error: RequestValidationError, content_type: str) -> ApiError:
    """What is wrong with the first field that is: of a union's branches, the one that fits best."""
    found = error.errors()
    if found[0]["type"] == "json_invalid":
        return ApiError(400, f"the body is no JSON: {found[0]['ctx']['error']}", code="invalid_json")
    field = _path(found[0])[:1]
    first = max((e for e in found if _path(e)[:1] == field), key=lambda e: len(_path(e)))
    kind, path = first["type"], _path(first)
    param = ".".join(str(part) for part in path) or None
    if kind == "extra_forbidden":
        return ApiError(400, f"{param}: this field is not supported; leave it out", param=param, code="unsupported")
    if param is None and (kind == "missing" or "json" not in content_type):
        message = "the request needs a JSON body, with Content-Type: application/json"
        return ApiError(400, message, code="missing_body")
    if kind == "missing":
        return ApiError(400, f"{param}: this field is required", param=param, code="missing")
    message = str(first["msg"]).removeprefix("Value error, ")
    return ApiError(400, f"{param or 'body'}: {message}", param=param, code="invalid_type")


def _path(error: Mapping[str, Any]) -> list[Any]:
    """Names and places of the field. Pydantic also names the branch of a union that it tried; no field is called so."""
    return [part for part in error["loc"][1:] if not (isinstance(part, str) and _is_branch(part))]


def _is_branch(part: str) -> bool:
    return not part.isidentifier() or part in ("str", "int", "float", "bool") or part[0].isupper()
