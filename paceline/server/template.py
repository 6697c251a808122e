"""Chat templates: messages to text, in a helper process."""

from typing import Any

import msgspec

from paceline.server.helper import Ended, Helper
from paceline.server.template_worker import Render, Rendered

TIME_LIMIT = 2.0  # seconds for one render
MAX_CHARS = 2**20


class TemplateError(Exception):
    """The text could not be made. `by_template`: the template refuses these messages; otherwise it is at fault."""

    def __init__(self, reason: str, by_template: bool = False) -> None:
        super().__init__(reason)
        self.by_template = by_template


class ChatTemplate:
    """One checkpoint's template and its helper process. Belongs to one event loop."""

    def __init__(self, source: str, time_limit: float = TIME_LIMIT, max_chars: int = MAX_CHARS) -> None:
        self.source = source
        self.helper = Helper("paceline.server.template_worker", time_limit)
        self._max_chars = max_chars
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Rendered)

    async def render(self, **variables: Any) -> str:
        """The template's text for these variables. Raises `TemplateError` and `NoHelper`."""
        message = self._encoder.encode(Render(self.source, variables, self._max_chars))
        try:
            said = await self.helper.ask(message)
        except Ended:
            raise TemplateError("its process ended") from None
        except TimeoutError:
            raise TemplateError(f"it took longer than {self.helper.time_limit:g} s") from None
        answer = self._decoder.decode(said)
        if answer.error:
            raise TemplateError(answer.error, answer.by_template)
        return answer.text
