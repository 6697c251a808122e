"""The HTTP application: its routes, and what they share."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI, Request, Response
from pydantic import BaseModel

from paceline import __version__
from paceline.runtime.api import Fleet
from paceline.server import errors, openapi
from paceline.server.beside import beside
from paceline.server.body import read_json
from paceline.server.embeddings import Embeddings, collect_embeddings
from paceline.server.errors import bad_request, model_not_found
from paceline.server.fields import validate
from paceline.server.generation import Generation, Job
from paceline.server.grammar_check import GrammarCheck
from paceline.server.metrics import CONTENT_TYPE, Metrics, exposition
from paceline.server.middleware import Auth, Edge
from paceline.server.prepare import (
    Caller,
    ServedModel,
    chat_job,
    chat_text,
    check_vocabulary,
    completion_job,
    embedding_inputs,
    encode,
)
from paceline.server.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    TokenizeRequest,
    slo,
)
from paceline.server.replies import ChatStyle, CompletionStyle, Style
from paceline.server.streaming import StreamReply, collect
from paceline.server.template import ChatTemplate

Endpoint = Callable[..., Awaitable[Response]]
Body = TypeVar("Body", bound=BaseModel)
REQUESTS: list[type[BaseModel]] = [
    CompletionRequest, ChatRequest, EmbeddingRequest, TokenizeRequest, DetokenizeRequest
]  # fmt: skip
UNKNOWN_CONTEXT = 2**31 - 1  # of a model that was never loaded: the fleet says why it cannot be had
METRICS_COMPAT = ("", "vllm")


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """api_keys: none is open to all; max_body_bytes: of a request; metrics_compat: "" or "vllm"."""

    api_keys: tuple[str, ...] = ()
    max_body_bytes: int = 4 * 2**20
    metrics_compat: str = ""
    template_seconds: float = 2.0  # wall time of one chat template

    def __post_init__(self) -> None:
        if self.metrics_compat not in METRICS_COMPAT:
            raise ValueError(f"metrics_compat: {self.metrics_compat!r} is not one of {METRICS_COMPAT}")
        if not all(key and key.isascii() and key.isprintable() and key == key.strip() for key in self.api_keys):
            raise ValueError("api_keys: a key must be printable ASCII, not empty, without spaces around it")


class Api:
    """The routes. Holds the fleet, the models and the requests under way."""

    def __init__(
        self,
        fleet: Fleet,
        models: Mapping[str, ServedModel],
        config: ServerConfig,
        recent: Callable[[], str] | None = None,
        placement: Callable[[], bytes] | None = None,
    ) -> None:
        self.fleet = fleet
        self.recent, self.placement = recent, placement
        self.models = dict(models)
        self.config = config
        self.metrics = Metrics()
        self.generations: set[Generation | Embeddings] = set()
        self.templates = {
            name: ChatTemplate(model.tokenizer.chat_template, config.template_seconds)
            for name, model in self.models.items()
            if model.tokenizer.chat_template
        }
        self.grammars = GrammarCheck()
        fleet.observers.append(self.metrics)

    def hurry(self) -> None:
        """Before a drain: what accepted requests have still to submit is submitted now."""
        for generation in list(self.generations):
            generation.hurry()

    def abort(self, reason: str) -> None:
        """Ends every request under way with an error: its client is told."""
        for generation in list(self.generations):
            generation.fail(errors.ApiError(503, reason, code="unavailable", headers={"retry-after": "1"}))

    async def close(self) -> None:
        """Ends the helper processes."""
        helpers = [self.grammars.helper, *(template.helper for template in self.templates.values())]
        await asyncio.gather(*(helper.close() for helper in helpers))
        if self.metrics in self.fleet.observers:
            self.fleet.observers.remove(self.metrics)

    def find(self, name: str) -> ServedModel:
        """The model of this name; the only one when no name is given. Its context is what the fleet can hold."""
        if not name and len(self.models) == 1:
            name = next(iter(self.models))
        if not name:
            raise bad_request("model", f"this field is required; this server has {', '.join(self.models)}")
        if name not in self.models:
            raise model_not_found(name, list(self.models))
        model = self.models[name]
        infos = [status.info for status in self.fleet.status() if status.name == name and status.info is not None]
        known = [context for context in (model.context, *(info.context for info in infos)) if context > 0]
        return replace(model, context=min(known, default=UNKNOWN_CONTEXT))

    async def _body(self, request: Request, kind: type[Body]) -> Body:
        return validate(kind, await read_json(request, self.config.max_body_bytes))

    # Generation

    async def completions(self, request: Request) -> Response:
        """Completes prompts given as text or as token ids."""
        body = await self._body(request, CompletionRequest)
        model = self.find(body.model)
        job = await completion_job(model, self.grammars, body, _caller(request))
        logprobs = body.logprobs is not None
        style = CompletionStyle(_new_id("cmpl"), model.name, model.tokenizer, logprobs, body.usage)
        return await self._answer(request, body, job, style)

    async def chat_completions(self, request: Request) -> Response:
        """Answers a conversation."""
        body = await self._body(request, ChatRequest)
        model = self.find(body.model)
        job = await chat_job(model, self.templates.get(model.name), self.grammars, body, _caller(request))
        style = ChatStyle(_new_id("chatcmpl"), model.name, model.tokenizer, body.logprobs, body.usage)
        return await self._answer(request, body, job, style)

    async def _answer(
        self, request: Request, body: CompletionRequest | ChatRequest, job: Job, style: Style
    ) -> Response:
        generation = Generation(self.fleet, job, self.metrics)
        generation.start()
        self.generations.add(generation)
        if body.stream:
            return StreamReply(generation, style, body.usage.include_usage, self.generations.discard)
        try:
            return await collect(generation, style, request.receive)
        finally:
            self.generations.discard(generation)

    async def embeddings(self, request: Request) -> Response:
        """Embeds texts, or lists of token ids."""
        body = await self._body(request, EmbeddingRequest)
        model, caller = self.find(body.model), _caller(request)
        inputs = await embedding_inputs(model, body)
        embeddings = Embeddings(self.fleet, model.name, inputs, caller, self.metrics)
        self.generations.add(embeddings)
        try:
            return await collect_embeddings(embeddings, body.encoding_format, request.receive)
        finally:
            self.generations.discard(embeddings)

    # Tokens

    async def tokenize(self, request: Request) -> Response:
        """Token ids of a text, or of messages as the chat template writes them."""
        body = await self._body(request, TokenizeRequest)
        model = self._named_or_first(body.model)
        if body.messages is not None:
            template = self.templates.get(model.name)
            text, special = await chat_text(model, template, body.messages, body.add_generation_prompt), False
        else:
            text, special = body.prompt or "", True
        special = special if body.add_special_tokens is None else body.add_special_tokens
        [tokens] = await encode(model, "prompt", [text], special, most=None)

        def answer() -> Response:
            strings = [model.tokenizer.token_text(token) for token in tokens] if body.return_token_strs else None
            counted = {"count": len(tokens), "max_model_len": model.context}
            return _json(counted | {"tokens": tokens, "token_strs": strings})

        return await beside(len(tokens), answer)

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids."""
        body = await self._body(request, DetokenizeRequest)
        model = self._named_or_first(body.model)
        check_vocabulary("tokens", body.tokens, model)
        tokens, skip = body.tokens, body.skip_special_tokens
        return _json({"prompt": await beside(len(tokens), lambda: model.tokenizer.decode(tokens, skip))})

    async def tokenizer_info(self, model: str = "") -> Response:
        """Special tokens and chat template; of the first model unless the query names one."""
        tokenizer = self._named_or_first(model).tokenizer
        special = {"bos_token": None, "eos_token": None, "pad_token": None, **tokenizer.special_tokens}
        rest = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": tokenizer.chat_template}
        return _json(special | rest)

    def _named_or_first(self, name: str) -> ServedModel:
        return self.find(name or next(iter(self.models)))

    # State

    async def list_models(self) -> Response:
        """The models served."""
        return _json({"object": "list", "data": [self._card(model) for model in self.models.values()]})

    async def get_model(self, model: str) -> Response:
        """One model."""
        if model not in self.models:
            raise model_not_found(model, list(self.models))
        return _json(self._card(self.find(model)))

    def _card(self, model: ServedModel) -> dict[str, Any]:
        states = [status for status in self.fleet.status() if status.name == model.name]
        context = self.find(model.name).context
        return {
            "id": model.name,
            "object": "model",
            "created": model.created,
            "owned_by": "paceline",
            "max_model_len": context if context < UNKNOWN_CONTEXT else None,
            "state": states[0].state if states else "unknown",
            "reason": states[0].reason if states else "",
        }

    async def health(self) -> Response:
        """200 while the workers answer and their steps move."""
        return _state("healthy", self.fleet.healthy)

    async def ready(self) -> Response:
        """200 while requests are taken: healthy, loaded, not draining."""
        return _state("ready", self.fleet.ready)

    async def version(self) -> Response:
        """This server's version."""
        return _json({"version": __version__})

    async def trace(self) -> Response:
        """The requests of the last ten minutes as a trace file (CSV): arrivals, models, tokens; no text."""
        if self.recent is None:
            raise errors.ApiError(404, "this server keeps no trace", code="not_found")
        return Response(self.recent(), media_type="text/csv")

    async def where(self) -> Response:
        """The groups that serve now as a placement file; devices are numbered in their order."""
        if self.placement is None:
            raise errors.ApiError(404, "this server has no placement", code="not_found")
        return Response(self.placement(), media_type="application/json")

    async def prometheus(self) -> Response:
        """Metrics in Prometheus' text format."""
        text = exposition(self.metrics, self.fleet.load(), self.config.metrics_compat == "vllm")
        return Response(text, headers={"content-type": CONTENT_TYPE})


def create_app(
    fleet: Fleet,
    models: Mapping[str, ServedModel],
    config: ServerConfig,
    recent: Callable[[], str] | None = None,
    placement: Callable[[], bytes] | None = None,
) -> FastAPI:
    """The application over `fleet`; `app.state.api` holds its parts. Needs the lifespan only to end its helpers.

    `recent` gives the traffic of late as a trace file, `placement` the groups as a placement file.
    """
    if not models:
        raise ValueError("models: at least one is needed")
    api = Api(fleet, models, config, recent, placement)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await api.close()

    app = FastAPI(
        title="Paceline",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,  # the pages of these two load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,  # a redirect would repeat the client's Host header
    )
    app.state.api = api
    _add_routes(app, api)
    errors.install(app)
    openapi.install(app, REQUESTS, bool(config.api_keys))
    app.add_middleware(Auth, keys=config.api_keys)
    app.add_middleware(Edge, metrics=api.metrics, route_of=_route_names(app))
    return app


def _add_routes(app: FastAPI, api: Api) -> None:
    posts: list[tuple[str, Endpoint, type[BaseModel], tuple[int, ...]]] = [
        ("/v1/completions", api.completions, CompletionRequest, (429, 500, 503)),
        ("/v1/chat/completions", api.chat_completions, ChatRequest, (429, 500, 503)),
        ("/v1/embeddings", api.embeddings, EmbeddingRequest, (429, 500, 503)),
        ("/tokenize", api.tokenize, TokenizeRequest, ()),
        ("/detokenize", api.detokenize, DetokenizeRequest, ()),
    ]
    gets: list[tuple[str, Endpoint, tuple[int, ...]]] = [
        ("/v1/models", api.list_models, ()),
        ("/v1/models/{model:path}", api.get_model, (404,)),
        ("/tokenizer_info", api.tokenizer_info, (404,)),
        ("/health", api.health, (503,)),
        ("/ready", api.ready, (503,)),
        ("/version", api.version, ()),
        ("/metrics", api.prometheus, ()),
        ("/trace", api.trace, (404,)),
        ("/placement", api.where, (404,)),
    ]
    for path, endpoint, kind, statuses in posts:
        responses = openapi.errors(400, 401, 404, 408, 413, 415, *statuses)
        app.add_api_route(
            path, endpoint, methods=["POST"], responses=responses, openapi_extra=openapi.body(kind), response_model=None
        )
    for path, endpoint, statuses in gets:
        responses = openapi.errors(401, *statuses)
        app.add_api_route(path, endpoint, methods=["GET"], responses=responses, response_model=None)


def _route_names(app: FastAPI) -> Callable[[str], str]:
    """From a path to the route it is counted under: a fixed set, whatever clients ask for."""
    known = {route.path for route in app.routes if "{" not in route.path}  # type: ignore[attr-defined]

    def route_of(path: str) -> str:
        if path in known:
            return path
        return "/v1/models/{model}" if path.startswith("/v1/models/") else "other"

    return route_of


def _caller(request: Request) -> Caller:
    state = request.scope["state"]
    return Caller(state.get("namespace", ""), slo(request.headers), state["arrival"])


def _new_id(kind: str) -> str:
    return f"{kind}-{secrets.token_hex(16)}"


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def _state(word: str, holds: bool) -> Response:
    if holds:
        return _json({"status": word})
    error = errors.ApiError(503, f"the server is not {word}", code="unavailable", headers={"retry-after": "1"})
    return errors.to_response(error)
