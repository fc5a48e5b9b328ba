"""Exception handlers: every error of the app becomes OpenAI's error object."""

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from memstore.errors import MemstoreError
from memstore.serve.api_errors import ApiError, as_api_error, failed, unsupported

_CODES = {
    400: "invalid_value",
    404: "not_found",
    405: "method_not_allowed",
    413: "too_large",
    415: "unsupported_type",
    429: "overloaded",
}


def error_response(error: ApiError) -> JSONResponse:
    """The response of an error."""
    return JSONResponse(error.body, error.status, error.headers)


def install(app: FastAPI) -> None:
    """Register handlers for every kind of error."""

    async def known(request: Request, error: Exception) -> JSONResponse:
        return error_response(as_api_error(error))

    async def unforeseen(request: Request, error: Exception) -> JSONResponse:
        return error_response(failed())  # uvicorn logs it

    async def http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        code = _CODES.get(error.status_code)
        headers = dict(error.headers or {})
        return error_response(
            ApiError(error.status_code, str(error.detail), code=code, headers=headers)
        )

    async def invalid(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return error_response(_of_validation(error))

    app.add_exception_handler(ApiError, known)
    app.add_exception_handler(MemstoreError, known)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(Exception, unforeseen)


def _of_validation(error: RequestValidationError) -> ApiError:
    """The first wrong value of a request, by the name of its parameter."""
    first = error.errors()[0]
    _, *parts = first["loc"]  # after "body", "query" or "path"
    param, what = ".".join(map(str, parts)), first["msg"].removeprefix("Value error, ")
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is no JSON: {what}", code="invalid_value")
    if first["type"] == "extra_forbidden":
        return unsupported(param)
    message = f"{param or 'the body'}: {what}"
    return ApiError(400, message, code="invalid_value", param=param or None)
