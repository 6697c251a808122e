"""The types of request fields: each has its bounds here, and says them in the OpenAPI schema."""

import difflib
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, Field, PlainValidator, ValidationError, WithJsonSchema
from pydantic_core import PydanticCustomError

from paceline.server.errors import ApiError, bad_request

MAX_CHOICES = 16
MAX_PROMPTS = 256
MAX_INPUTS = 2048  # texts to embed
MAX_SEQUENCES = 256  # prompts times choices
MAX_STOPS = 16
MAX_STOP_BYTES = 256
MAX_BIASES = 1024
MAX_MESSAGES = 4096
MAX_TOKENS = 2**31 - 1
Model = TypeVar("Model", bound=BaseModel)
TOKEN_ID = {"type": "integer", "minimum": 0, "maximum": MAX_TOKENS}


def fault(message: str) -> PydanticCustomError:
    return PydanticCustomError("bad_value", "{message}", {"message": message})


def unsupported(name: str, message: str) -> PydanticCustomError:
    """A fault of the field `name`, found while looking at several."""
    return PydanticCustomError("bad_field", "{message}", {"message": message, "param": name})


def _is_ids(value: list[Any]) -> bool:
    """A list of integers only; True and False are none."""
    return set(map(type, value)) == {int}


def _check_range(ids: list[int]) -> None:
    if ids and not (min(ids) >= 0 and max(ids) <= MAX_TOKENS):
        raise fault("token ids are integers from 0 on")


def _stop(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise fault("must be a string or a list of strings")
    if len(stops) > MAX_STOPS:
        raise fault(f"has {len(stops)} strings; at most {MAX_STOPS} are allowed")
    for stop in stops:
        if not 1 <= len(stop.encode("utf-8")) <= MAX_STOP_BYTES:
            raise fault(f"every string must have 1 to {MAX_STOP_BYTES} bytes")
    return tuple(stops)


def _logit_bias(value: Any) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, dict):
        raise fault("must be an object of token ids and numbers")
    if len(value) > MAX_BIASES:
        raise fault(f"has {len(value)} entries; at most {MAX_BIASES} are allowed")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10) or int(key) in biases:
            raise fault(f"{ascii(key[:40])} is not a token id, or is there twice")
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise fault(f"the bias of {key} must be a number from -100 to 100")
        biases[int(key)] = float(bias)
    return tuple(sorted(biases.items()))


def _prompt(value: Any, most: int = MAX_PROMPTS) -> list[str | list[int]]:
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise fault("must be a string, a list of strings, a list of token ids or a list of lists of token ids")
    if _is_ids(value):
        _check_range(value)
        return [value]
    if len(value) > most:
        raise fault(f"has {len(value)} entries; at most {most} are allowed")
    if all(isinstance(item, str) for item in value):
        return value
    if not all(isinstance(item, list) and item and _is_ids(item) for item in value):
        raise fault("must be all strings, all token ids (integers) or all non-empty lists of token ids")
    for ids in value:
        _check_range(ids)
    return value


def _inputs(value: Any) -> list[str | list[int]]:
    inputs = _prompt(value, MAX_INPUTS)
    if "" in inputs:
        raise fault("must not be, or hold, an empty string")
    return inputs


def _token_ids(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not (not value or _is_ids(value)):
        raise fault("must be a list of token ids (integers)")
    _check_range(value)
    return tuple(value)


def _stop_token_ids(value: Any) -> tuple[int, ...]:
    ids = _token_ids(value)
    if len(ids) > MAX_BIASES:
        raise fault(f"has {len(ids)} ids; at most {MAX_BIASES} are allowed")
    return ids


def _content(value: Any) -> str:
    """The text of a message: a string, or the texts of its parts, one per line (as vLLM joins them)."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value or not all(isinstance(part, dict) for part in value):
        raise fault("must be a string or a non-empty list of parts")
    texts = []
    for part in value:
        if part.get("type") != "text":
            raise fault("only parts of the type 'text' are supported")
        if not isinstance(part.get("text"), str) or part.keys() - {"type", "text"}:
            raise fault("a text part has the keys 'type' and 'text', a string, and no others")
        texts.append(part["text"])
    return "\n".join(texts)


_TEXT_PART = {
    "type": "object",
    "properties": {"type": {"type": "string", "enum": ["text"]}, "text": {"type": "string"}},
    "required": ["type", "text"],
    "additionalProperties": False,
}
_IDS = {"type": "array", "items": TOKEN_ID, "minItems": 1}


def _prompt_schema(most: int, text: dict[str, Any]) -> dict[str, Any]:
    lists = [{"type": "array", "items": item, "minItems": 1, "maxItems": most} for item in (text, _IDS)]
    return {"anyOf": [text, lists[0], _IDS, lists[1]]}


_PROMPT_SCHEMA = _prompt_schema(MAX_PROMPTS, {"type": "string"})
_INPUTS_SCHEMA = _prompt_schema(MAX_INPUTS, {"type": "string", "minLength": 1})
_STOP_STRING = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_BYTES}
_STOP_SCHEMA = {"anyOf": [_STOP_STRING, {"type": "array", "items": _STOP_STRING, "maxItems": MAX_STOPS}]}
_BIAS_SCHEMA = {
    "type": "object",
    "propertyNames": {"pattern": "^[0-9]{1,10}$"},
    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
    "maxProperties": MAX_BIASES,
}
_CONTENT_SCHEMA = {"anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT_PART, "minItems": 1}]}

Stop = Annotated[tuple[str, ...], PlainValidator(_stop), WithJsonSchema(_STOP_SCHEMA)]
LogitBias = Annotated[tuple[tuple[int, float], ...], PlainValidator(_logit_bias), WithJsonSchema(_BIAS_SCHEMA)]
Prompts = Annotated[list[str | list[int]], PlainValidator(_prompt), WithJsonSchema(_PROMPT_SCHEMA)]
Inputs = Annotated[list[str | list[int]], PlainValidator(_inputs), WithJsonSchema(_INPUTS_SCHEMA)]
TokenIds = Annotated[tuple[int, ...], PlainValidator(_token_ids), WithJsonSchema({"type": "array", "items": TOKEN_ID})]
StopTokenIds = Annotated[
    tuple[int, ...],
    PlainValidator(_stop_token_ids),
    WithJsonSchema({"type": "array", "items": TOKEN_ID, "maxItems": MAX_BIASES}),
]
Content = Annotated[str, PlainValidator(_content), WithJsonSchema(_CONTENT_SCHEMA)]
Text = Annotated[str, Field(max_length=512)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
TopLogprobs = Annotated[int, Field(ge=0, le=20)]
Seed = Annotated[int, Field(ge=-(2**63), le=2**64 - 1)]
Metadata = Annotated[dict[Annotated[str, Field(max_length=64)], Text], Field(max_length=16)]


def nullable(schema: dict[str, Any]) -> None:
    """Says in a JSON Schema that null stands for the default in every optional field."""
    required = schema.get("required", [])
    for name, field in schema.get("properties", {}).items():
        if name in required or "enum" in field:
            continue
        default = field.pop("default", None)
        shown = {"default": default} if isinstance(default, bool | int | float) else {}
        schema["properties"][name] = {"anyOf": [field, {"type": "null"}]} | shown


def validate(model: type[Model], data: dict[str, Any]) -> Model:
    """`data` as a `model`. Raises `ApiError` 400 that names one field, the first that is wrong."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise _explain(model, error) from None


def _explain(model: type[BaseModel], error: ValidationError) -> ApiError:
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part)[:80] for part in first["loc"])
    if first["type"] == "bad_field":
        return bad_request(first["ctx"]["param"], first["msg"])
    if first["type"] == "extra_forbidden":
        name = str(first["loc"][-1])[:80]
        near = difflib.get_close_matches(name, model.model_fields, n=1) if len(first["loc"]) == 1 else []
        hint = f"; did you mean {near[0]!r}?" if near else ""
        return bad_request(where, f"unknown field{hint}", "unknown_field")
    if first["type"] == "missing":
        return bad_request(where, "this field is required")
    message = first["msg"].removeprefix("Value error, ")
    return bad_request(where or None, message[:1].lower() + message[1:])
