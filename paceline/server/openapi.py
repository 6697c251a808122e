"""The OpenAPI document: request bodies from the very models that validate them."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

REF = "#/components/schemas/{model}"
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "code": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            },
        }
    },
}
ERRORS = {
    400: "a fault of the request",
    401: "no valid API key",
    404: "no such model",
    405: "no such method",
    408: "the body did not arrive",
    413: "the body is too large",
    415: "the body is not JSON",
    429: "the latency goal cannot be met",
    500: "a fault of the server",
    503: "out of capacity, or draining; see Retry-After",
}


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route that can fail so."""
    content = {"application/json": {"schema": {"$ref": REF.format(model="Error")}}}
    return {status: {"description": ERRORS[status], "content": content} for status in statuses}


def body(model: type[BaseModel]) -> dict[str, Any]:
    """The `openapi_extra` of a route that takes a `model`."""
    schema = {"$ref": REF.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def install(app: FastAPI, models: list[type[BaseModel]], with_keys: bool) -> None:
    """Makes `app.openapi` describe these request models, the errors and, `with_keys`, the authentication."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
            for operations in schema["paths"].values():
                for operation in operations.values():
                    operation["responses"].pop("422", None)  # FastAPI's own; our validator answers 400
            parts = schema.setdefault("components", {})
            schemas = models_json_schema([(model, "validation") for model in models], ref_template=REF)[1]["$defs"]
            parts.setdefault("schemas", {}).update(schemas, Error=ERROR)
            if with_keys:
                parts["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
                schema["security"] = [{"key": []}]
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]
