"""The process that renders chat templates: programs from a checkpoint, so they run where they can be killed."""

import json
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox
import msgspec

from paceline.server.helper_process import answer_messages

MEMORY_LIMIT = 256 * 2**20  # bytes
CPU_LIMIT = 3  # seconds for one render


class Render(msgspec.Struct, array_like=True):
    """Render the template with these variables, to at most `max_chars` characters."""

    template: str
    variables: dict[str, Any]
    max_chars: int


class Rendered(msgspec.Struct, array_like=True):
    """The text, or why there is none. `by_template`: the template itself refused these messages."""

    text: str = ""
    error: str = ""
    by_template: bool = False


class Refused(Exception):
    """Raised by the template, with its own words."""


def environment() -> jinja2.Environment:
    """Templates mean here what they mean in transformers: the same whitespace rules, filters and functions."""

    def raise_exception(message: str) -> NoReturn:
        raise Refused(str(message))

    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    result = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    result.filters["tojson"] = tojson
    result.globals["raise_exception"] = raise_exception
    result.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return result


class Renderer:
    """Compiles a template once and renders it."""

    def __init__(self) -> None:
        self._environment = environment()
        self._source: str | None = None
        self._template: jinja2.Template | None = None

    def render(self, request: Render) -> Rendered:
        try:
            if self._template is None or request.template != self._source:
                self._template, self._source = self._environment.from_string(request.template), request.template
            pieces, size = [], 0
            for piece in self._template.generate(**request.variables):
                size += len(piece)
                if size > request.max_chars:
                    return Rendered(error=f"its text is longer than {request.max_chars} characters")
                pieces.append(piece)
            return Rendered("".join(pieces))
        except Refused as error:
            return Rendered(error=str(error)[:500], by_template=True)
        except MemoryError:
            return Rendered(error="it needs more memory than a template may have")
        except Exception as error:  # whatever a template can raise: it is a program that we did not write
            return Rendered(error=f"{type(error).__name__}: {error}"[:500])


def main() -> None:
    decoder, encoder, renderer = msgspec.msgpack.Decoder(Render), msgspec.msgpack.Encoder(), Renderer()

    def answer(message: bytes) -> bytes:
        try:
            return encoder.encode(renderer.render(decoder.decode(message)))
        except (MemoryError, UnicodeEncodeError) as error:
            return encoder.encode(Rendered(error=f"its text cannot be sent ({type(error).__name__})"))

    answer_messages(answer, MEMORY_LIMIT, CPU_LIMIT)


if __name__ == "__main__":
    main()
