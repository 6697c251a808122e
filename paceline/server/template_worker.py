"""The process that renders chat templates: programs from a checkpoint, so they run where they can be killed.

Reads requests from standard input and answers on standard output, each as four bytes of length (big-endian) and
msgpack. The memory and the processor time of a render are limited here; the wall time by whoever started this process.
"""

import json
import resource
import sys
from datetime import datetime
from typing import Any, BinaryIO, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox
import msgspec

MEMORY_LIMIT = 256 * 2**20  # bytes of address space
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


def limit_resources() -> None:
    """No memory beyond the limit, no file growth, no core dumps."""
    for kind, value in (
        (resource.RLIMIT_AS, MEMORY_LIMIT),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (value, value))


def limit_cpu() -> None:
    """From now on `CPU_LIMIT` seconds: ends this process even when nobody is left to kill it."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    soft = int(used.ru_utime + used.ru_stime) + CPU_LIMIT + 1
    resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def read_message(stream: BinaryIO) -> bytes | None:
    """The next message; None when the other side is gone."""
    head = stream.read(4)
    return stream.read(int.from_bytes(head, "big")) if len(head) == 4 else None


def main() -> None:
    limit_resources()
    decoder, encoder, renderer = msgspec.msgpack.Decoder(Render), msgspec.msgpack.Encoder(), Renderer()
    while (message := read_message(sys.stdin.buffer)) is not None:
        limit_cpu()
        try:
            answer = encoder.encode(renderer.render(decoder.decode(message)))
        except (MemoryError, UnicodeEncodeError) as error:
            answer = encoder.encode(Rendered(error=f"its text cannot be sent ({type(error).__name__})"))
        sys.stdout.buffer.write(len(answer).to_bytes(4, "big") + answer)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
