"""What answers are held to: checked in a helper process, since a client says it."""

import msgspec

from paceline.server.grammar_worker import Asked, Made
from paceline.server.helper import Ended, Helper

TIME_LIMIT = 5.0  # seconds; it may have a fraction of a core


class GrammarCheck:
    """One for all models, with its process. Belongs to one event loop."""

    def __init__(self) -> None:
        self.helper = Helper("paceline.server.grammar_worker", TIME_LIMIT)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Made)

    async def grammar_of(self, form: str, text: str) -> str:
        """As `engine.grammar.grammar_of`, which it runs. Raises ValueError and `NoHelper`."""
        try:
            made = self._decoder.decode(await self.helper.ask(self._encoder.encode(Asked(form, text))))
        except (Ended, TimeoutError):
            raise ValueError("to find its tokens takes too long or too much memory") from None
        if made.error:
            raise ValueError(made.error)
        return made.grammar
