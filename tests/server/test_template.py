"""Chat templates: what honest ones mean, and that hostile ones harm nobody."""

import asyncio
import time
from pathlib import Path

import pytest

from paceline.engine.tokenizer import Tokenizer
from paceline.server.template import ChatTemplate, TemplateError
from paceline.server.template_worker import Render, Renderer
from tests.server.conftest import in_process, make_tokenizer

MESSAGES = [{"role": "system", "content": 'be <brief> & "kind"'}, {"role": "user", "content": "grüße"}]
VARIABLES = {"messages": MESSAGES, "add_generation_prompt": True, "bos_token": "<s>", "tools": None}


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m.content | trim }}{% endfor %}", None),
        ("{{ messages[1] | tojson }}", '{"role": "user", "content": "grüße"}'),
        ("{{ messages[0].content | tojson }}", '"be <brief> & \\"kind\\""'),
        ("  {% if add_generation_prompt %}\n  yes\n  {% endif %}\n", "  yes\n"),
        (
            "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.role }}{% break %}{% endfor %}",
            "user",
        ),
        ("{% if tools is none %}none{% endif %}{{ strftime_now('%Y') | length }}", "none4"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "2"),
        ("{{ messages[0].content[:2] }}{{ missing }}", "be"),
    ],
)
def test_templates_mean_what_they_mean_in_transformers(template: str, text: str | None) -> None:
    rendered = Renderer().render(Render(template, VARIABLES, 1000))
    assert rendered.error == ""
    assert rendered.text == (text or '<s>[system]be <brief> & "kind"[user]grüße')


HOSTILE = {
    "loop": ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "longer than"),
    "string bomb": ("{{ 'x' * 10**9 }}", "memory"),
    "doubling": (
        "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
        "memory|longer",
    ),
    "long output": ("{% for a in range(99999) %}{{ 'x' * 1000 }}{% endfor %}", "characters"),
    "padding": ("{{ '%999999999d' % 3 }}", "memory"),
    "big number": ("{{ 9**(9**9) }}", "longer than"),
    "recursion": ("{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", "Recursion"),
    "class walk": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
    "globals": ("{{ raise_exception.__globals__['json'] }}", "unsafe"),
    "mutation": ("{{ messages.append(1) }}", "unsafe"),
    "include": ("{% include '/etc/passwd' %}", "loader"),
    "syntax": ("{% if %}", "TemplateSyntaxError"),
    "undefined": ("{{ nothing.at.all }}", "Undefined"),
    "surrogate": ("{{ '\\ud800' }}", "UnicodeEncodeError"),
    "own words": ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
}


@pytest.mark.parametrize("name", sorted(HOSTILE))
async def test_a_hostile_template_fails_alone(name: str) -> None:
    """It gives an error within its limits, the event loop goes on, and the next render works."""
    source, reason = HOSTILE[name]
    template = ChatTemplate("first", time_limit=0.5)
    assert await template.render(**VARIABLES) == "first"  # on a busy machine its process takes longer to start
    template.source = source
    ticks, begin = 0, time.monotonic()

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.01)
            ticks += 1

    ticker = asyncio.create_task(tick())
    with pytest.raises(TemplateError, match=reason) as caught:
        await template.render(**VARIABLES)
    assert caught.value.by_template == (name == "own words")
    assert ticks > 1 or time.monotonic() - begin < 0.1  # some fail too soon to tell
    template.source = "fine"
    assert await template.render(**VARIABLES) == "fine"
    ticker.cancel()
    await template.helper.close()


async def test_a_helper_that_died_is_replaced() -> None:
    template = ChatTemplate("{{ bos_token }}")
    assert await template.render(**VARIABLES) == "<s>"
    assert template.helper.process is not None
    template.helper.process.kill()
    await template.helper.process.wait()
    assert await template.render(**VARIABLES) == "<s>"
    await template.helper.close()
    await template.helper.close()


async def test_a_render_whose_helper_dies_is_made_again() -> None:
    template = ChatTemplate("{% for a in range(n) %}{% for b in range(9999) %}{% endfor %}{% endfor %}{{ n }}", 30.0)
    assert await template.render(n=0) == "0"
    first = template.helper.process
    task = asyncio.create_task(template.render(n=400))
    await asyncio.sleep(0.05)
    assert first is not None and not task.done()
    first.kill()
    assert await task == "400" and template.helper.process is not first
    await template.helper.close()


async def test_a_helper_that_does_not_start_is_no_fault_of_the_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(*_: object, **__: object) -> None:
        raise OSError("too many open files")

    async with in_process(make_tokenizer("fine")) as server:
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
        with monkeypatch.context() as patch:
            patch.setattr(asyncio, "create_subprocess_exec", fails)
            answer = await server.client.post("/v1/chat/completions", json=body)
            assert answer.status_code == 503 and "too many open files" in answer.json()["error"]["message"]
        assert (await server.client.post("/v1/chat/completions", json=body)).status_code == 200


async def test_the_helper_finds_packages_where_the_server_does(tmp_path: Path, monkeypatch) -> None:
    """Not only those of the interpreter: PYTHONPATH may lead to them."""
    (tmp_path / "sitecustomize.py").write_text(f"open({str(tmp_path / 'found')!r}, 'w').close()")
    monkeypatch.syspath_prepend(tmp_path)
    template = ChatTemplate("fine")
    assert await template.render(**VARIABLES) == "fine"
    await template.helper.close()
    assert (tmp_path / "found").exists()


async def test_renders_do_not_mix() -> None:
    template = ChatTemplate("{{ n }}")
    texts = await asyncio.gather(*(template.render(n=n) for n in range(50)))
    assert texts == [str(n) for n in range(50)]
    await template.helper.close()


async def test_a_render_that_nobody_waits_for_leaves_nothing_behind() -> None:
    template = ChatTemplate("{% for a in range(n) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{{ n }}")
    assert await template.render(n=0) == "0"
    task = asyncio.create_task(template.render(n=99999))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await template.render(n=1) == "1"
    await template.helper.close()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
@pytest.mark.parametrize(
    ("template", "words"),
    [
        (None, "no chat template"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ 'x' * 10**9 }}", "failed"),
    ],
)
async def test_every_route_has_the_same_gate(path: str, template: str | None, words: str) -> None:
    async with in_process(make_tokenizer(template)) as server:
        answer = await server.client.post(path, json={"messages": [{"role": "user", "content": "x"}]})
        assert answer.status_code == 400 and words in answer.json()["error"]["message"]
        assert answer.json()["error"]["param"] == "messages"


@pytest.mark.parametrize("name", ["chat_template", "chat_template_kwargs"])
async def test_a_template_in_a_request_is_refused(tokenizer: Tokenizer, name: str) -> None:
    async with in_process(tokenizer) as server:
        body = {"messages": [{"role": "user", "content": "x"}], name: {"a": 1}}
        for path in ("/v1/chat/completions", "/tokenize"):
            answer = await server.client.post(path, json=body)
            assert answer.status_code == 400 and answer.json()["error"]["param"] == name
