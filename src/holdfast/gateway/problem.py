"""Every error as application/problem+json (RFC 9457), with the number under which the logs know the request."""

from __future__ import annotations

import json
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import PydanticSerializationError
from starlette.exceptions import HTTPException
from starlette.routing import Route

import holdfast


class Document(BaseModel):
    """A problem, as it is told; some have further members."""

    type: str
    title: str
    status: int
    detail: str
    requestId: str = Field(description="Under which the logs know the request.")  # noqa: N815
    model_config = ConfigDict(
        extra="allow",
        json_schema_extra={
            "examples": [
                {
                    "type": "about:blank",
                    "title": "Not Found",
                    "status": 404,
                    "detail": "there is no such thing",
                    "requestId": "5f0c3a1be2d94c7e",
                }
            ]
        },
    )


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """For ``responses=`` of a route: the problems that it may answer with."""
    told = {"application/problem+json": {"schema": Document.model_json_schema()}}
    return {status: {"description": HTTPStatus(status).phrase, "content": told} for status in statuses}


_DETAILS = {404: "there is nothing at this path", 405: "this path does not know the method"}
"""Of what the framework raises by itself, for the usual word says nothing."""


class Problem(Exception):
    """Raised by a route: the answer. ``more`` are members of the document beside the usual ones."""

    def __init__(
        self,
        status: int,
        detail: str,
        *,
        title: str | None = None,
        headers: Mapping[str, str] | None = None,
        **more: Any,
    ) -> None:
        super().__init__(detail)
        self.status, self.detail, self.headers, self.more = status, detail, dict(headers or {}), more
        self.title = title or HTTPStatus(status).phrase

    def document(self, request_id: str) -> dict[str, Any]:
        told = {"type": "about:blank", "title": self.title, "status": self.status, "detail": self.detail}
        return told | self.more | {"requestId": request_id}


def problem_of(error: Exception) -> Problem:
    """What an error of the library is to a client."""
    match error:
        case Problem():
            return error
        case holdfast.Conflict():
            return Problem(412, str(error), current=error.current)
        case holdfast.AlreadyExists():
            return Problem(409, str(error), current=error.current, owner=error.owner)
        case holdfast.PolicyDenied():
            return Problem(403, str(error), review=error.review)
        case holdfast.NotAcquired():
            return Problem(503, str(error), headers={"Retry-After": "1"})
        case holdfast.DriverError():
            return Problem(409 if error.status in (404, 409) else 502, str(error))  # all else is not the client's fault
        case holdfast.HoldfastError():
            return Problem(503, f"{type(error).__name__}: {error}", headers={"Retry-After": "1"})
        case ValidationError() | PydanticSerializationError():
            raise error  # a record or an answer of ours is not what it should be: nothing that a client can mend
        case ValueError():
            return Problem(422, str(error))
    raise error


class Told(JSONResponse):
    media_type = "application/problem+json"

    def render(self, content: Any) -> bytes:
        """In ASCII, whatever a client has sent that is told here again: half a character cannot be UTF-8."""
        return json.dumps(content, default=str).encode()


def answer(error: Exception, request_id: str) -> Told:
    problem = problem_of(error)
    return Told(problem.document(request_id), problem.status, problem.headers)


def _allowed(request: Request) -> str:
    """By all routes of the path: the framework knows those of the first one alone."""
    routes = [each for each in request.app.routes if isinstance(each, Route) and each.matches(request.scope)[0].value]
    return ", ".join(sorted({method for each in routes for method in each.methods or ()}))


def register(app: FastAPI) -> None:
    async def known(request: Request, error: Exception) -> JSONResponse:
        return answer(error, request.state.request_id)

    async def http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        usual = error.detail == HTTPStatus(error.status_code).phrase
        detail = (usual and _DETAILS.get(error.status_code)) or str(error.detail)
        headers = {"Allow": _allowed(request)} if error.status_code == 405 else error.headers
        return answer(Problem(error.status_code, detail, headers=headers), request.state.request_id)

    async def invalid(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        wrong = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}"[:300] for each in error.errors()[:20]]
        return answer(Problem(422, "; ".join(wrong), errors=wrong), request.state.request_id)

    for kind in (Problem, holdfast.HoldfastError, ValueError):
        app.add_exception_handler(kind, known)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(RequestValidationError, invalid)
