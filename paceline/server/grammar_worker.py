"""The process that checks what answers are to be held to: some schemas of 39 bytes would take minutes and gigabytes."""

import msgspec

from paceline.engine.grammar import grammar_of
from paceline.server.helper_process import answer_messages

MEMORY_LIMIT, CPU_LIMIT = 128 * 2**20, 1  # bytes and seconds; the engine takes as much once more


class Asked(msgspec.Struct, array_like=True):
    """As of `grammar_of`."""

    form: str
    text: str


class Made(msgspec.Struct, array_like=True):
    """The grammar, or why there is none."""

    grammar: str = ""
    error: str = ""


def main() -> None:
    decoder, encoder = msgspec.msgpack.Decoder(Asked), msgspec.msgpack.Encoder()

    def answer(message: bytes) -> bytes:
        asked = decoder.decode(message)
        try:
            return encoder.encode(Made(grammar_of(asked.form, asked.text)))
        except ValueError as error:
            return encoder.encode(Made(error=" ".join(str(error).split())[:200]))  # it shows where in lines of its own

    answer_messages(answer, MEMORY_LIMIT, CPU_LIMIT)


if __name__ == "__main__":
    main()
