"""What clients hold answers to is checked where it can be killed: schemas of some bytes would take minutes."""

import asyncio
import json

import pytest

from paceline.engine.grammar import grammar_of
from paceline.server.grammar_check import GrammarCheck
from tests.server.conftest import in_process, make_tokenizer

PATTERNS = [{"type": "string", "pattern": f".*{chr(97 + n % 26)}{n}.*"} for n in range(100)]
PRIMES = [8923, 8929, 8933, 8941, 8951]
ENDLESS = [
    ("json", json.dumps({"type": "integer", "multipleOf": 9999999})),
    ("json", json.dumps({"allOf": PATTERNS})),
    ("json", json.dumps({"anyOf": [{"type": "integer", "multipleOf": prime} for prime in PRIMES]})),
    ("regex", ".*" * 16384),
]


@pytest.mark.parametrize(("form", "text"), ENDLESS, ids=lambda part: part[:30])
async def test_what_would_take_minutes_or_gigabytes_is_refused_and_the_next_one_is_not(form: str, text: str) -> None:
    check = GrammarCheck()
    with pytest.raises(ValueError, match="takes too long or too much memory"):
        await check.grammar_of(form, text)
    assert await check.grammar_of("regex", "[ab]") == grammar_of("regex", "[ab]")
    await check.helper.close()


async def test_the_reason_is_the_librarys() -> None:
    check = GrammarCheck()
    with pytest.raises(ValueError, match="Unimplemented"):
        await check.grammar_of("json", '{"type": "object", "unevaluatedProperties": false}')
    first = check.helper.process
    with pytest.raises(ValueError, match="invalid regex"):
        await check.grammar_of("regex", "(")
    assert check.helper.process is first is not None
    first.kill()  # by the system, say: not the next one's fault
    assert await check.grammar_of("regex", "[ab]") == grammar_of("regex", "[ab]")
    await check.helper.close()


async def test_a_server_says_so_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(*_: object, **__: object) -> None:
        raise OSError("too many open files")

    body = {"prompt": "x", "max_tokens": 3}
    async with in_process(make_tokenizer("fine")) as server:
        for form, text in ENDLESS[:2]:
            schema = {"type": "json_schema", "json_schema": {"schema": json.loads(text)}}
            held, free = await asyncio.gather(
                server.client.post("/v1/completions", json=body | {"response_format": schema}),
                server.client.post("/v1/completions", json=body),
            )
            assert (form, held.status_code, held.json()["error"]["param"]) == ("json", 400, "response_format")
            assert free.status_code == 200
        with monkeypatch.context() as patch:
            patch.setattr(asyncio, "create_subprocess_exec", fails)
            answer = await server.client.post("/v1/completions", json=body | {"structured_outputs": {"regex": "a"}})
            assert answer.status_code == 503 and "too many open files" in answer.json()["error"]["message"]
