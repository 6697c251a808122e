"""One HTTP request as the fleet's sequences: submitted, turned into text, watched, and cancelled when nobody listens.

A `Generation` has one `Choice` per answer. Each choice is a sink: the fleet pushes tokens into it, and it keeps the
text and log-probabilities that are ready to be sent until the writer takes them. Streaming and non-streaming answers
take the same pieces, so they cannot differ; a stream may get them later, evenly (`playout`).
"""

import asyncio
import logging
from collections import deque
from dataclasses import dataclass, replace
from typing import NamedTuple

from paceline.core.request import NO_SLO, SLO, SamplingParams
from paceline.core.work import SliceOutput, TokenLogprobs
from paceline.engine.tokenizer import Detokenizer, StopStrings, Tokenizer
from paceline.runtime.api import Fleet, Overloaded, Rejected
from paceline.server.errors import ApiError, engine_error, from_rejection, model_not_found
from paceline.server.metrics import Metrics
from paceline.server.playout import Playout

LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as token ids, and as text where it came as text."""

    tokens: list[int]
    text: str | None = None


@dataclass(frozen=True, slots=True)
class TextOptions:
    """How tokens become text. `echo`: the prompt comes first. `discard`: the one token asked for is thrown away."""

    stops: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    echo: bool = False
    discard: bool = False


@dataclass(frozen=True, slots=True)
class Job:
    """All that a request asks of the fleet."""

    model: str
    tokenizer: Tokenizer
    prompts: list[Prompt]
    n: int
    params: SamplingParams
    options: TextOptions
    namespace: str = ""
    slo: SLO = NO_SLO
    smooth: bool = False  # a stream whose tokens go out evenly (`playout`)
    arrival: float | None = None  # of the request (`Fleet.submit`)


class Entry(NamedTuple):
    """A token with its log-probabilities (None for the first of a prompt); `offset`: where its text starts."""

    offset: int
    token: int
    logprobs: TokenLogprobs | None


class Piece(NamedTuple):
    """What a choice has ready: its next text, the tokens that start in it, and the end if this is it."""

    text: str
    entries: list[Entry]
    finish_reason: str | None


class Choice:
    """The sink of one sequence."""

    def __init__(self, index: int, prompt: Prompt, job: Job, owner: "Generation") -> None:
        options = job.options
        self.index = index
        self.id: str | None = None  # the fleet's name for it, while it has it
        self.submitted = False
        self.prompt = prompt
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.completion_tokens = 0
        self.drafted = self.accepted = 0  # tokens
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.checks_stop = bool(options.stops)
        self.started = False  # has given its first output
        self._job = job
        self._owner = owner
        self._detokenizer = Detokenizer(job.tokenizer, prompt.tokens, options.skip_special_tokens)
        self._stops = StopStrings(options.stops, include=True) if options.stops else None
        self._one_by_one = self._stops is not None or job.params.logprobs is not None
        self._ready = False  # the writer has been told
        self._end: str | None = None  # finish reason that is still to be sent
        self._playout = Playout() if job.smooth else None
        self._later: asyncio.TimerHandle | None = None  # tells the writer
        self._text: deque[str] = deque()  # that may be sent: without what may become a stop string
        self._length = 0  # characters detokenised, the echoed prompt among them
        self._taken = 0  # characters
        self._echoed: list[Entry] = []  # of the prompt
        self._entries: list[Entry] = []  # of generated tokens
        self._cut = False  # the text ends before its tokens do

    def push(self, output: SliceOutput, finish: str | None) -> bool:
        """Takes the tokens of one step. True: the text ran into a stop string, no more tokens are wanted.

        A fault in here is this request's: the fleet's step goes on.
        """
        if self.finish_reason is not None:
            return True
        try:
            return self._push(output, finish)
        except Exception:
            LOGGER.exception("the output of a sequence could not be taken")
            self.fail("the answer could not be made")
            return True

    def _push(self, output: SliceOutput, finish: str | None) -> bool:
        self.prompt_logprobs += output.prompt_logprobs
        self.drafted += output.num_draft
        tokens, before = output.tokens, self.completion_tokens
        if not tokens and finish is None:
            return False
        if not self.started:
            self._begin()
        if self._job.options.discard:
            self._cut, finish = True, finish or "length"
        elif self._one_by_one or (self._playout and len(tokens) > 1):
            finish = self._take_each(output, finish)
        else:
            self.completion_tokens += len(tokens)
            text = self._detokenizer.push(self._visible(tokens, finish))
            if finish is not None:
                text += self._detokenizer.flush()
            if text:
                self._text.append(text)
        self.accepted += min(output.num_accepted, self.completion_tokens - before)  # a stop string may have cut the run
        if finish is not None:
            self.finish_reason = self._end = finish
            self._owner.ended(self)
        if self._playout:
            self._playout.come(asyncio.get_running_loop().time(), len(self._text))
        self.announce()
        return finish is not None

    @property
    def _smooth(self) -> Playout | None:
        """While there is more to come, and steps are so long that it matters."""
        if self._playout is None or not self._playout.spreads:
            return None
        return None if self.finish_reason or self._owner.failed else self._playout

    def announce(self) -> None:
        """Tells the writer as soon as something may go."""
        self.stop_waiting()
        if self._ready or not (self._text or self._end):
            return
        if playout := self._smooth:
            loop, (when, _) = asyncio.get_running_loop(), playout.due(len(self._text))
            if when > loop.time():
                self._later = loop.call_at(when, self._tell)
                return
        self._tell()

    def _tell(self) -> None:
        self._ready = True
        self._owner.has_output(self)

    def stop_waiting(self) -> None:
        if self._later:
            self._later.cancel()
            self._later = None

    def fail(self, reason: str) -> None:
        """The engine lost this sequence: the whole request is over."""
        if self.finish_reason is None:
            self.finish_reason = "error"
            self._owner.ended(self)
            self._owner.fail(engine_error(reason))

    def take(self) -> Piece:
        """What is ready to be sent, once."""
        parts, end = len(self._text), self._end
        self._ready, self._end = False, None
        if self._playout:
            if self._smooth:
                _, parts = self._playout.due(parts)
            self._playout.sent(asyncio.get_running_loop().time(), parts)
        text = "".join(self._text.popleft() for _ in range(parts))
        self._taken += len(text)
        self.announce()
        entries, self._echoed = self._echoed, []
        if self._entries:
            keep = len(self._entries)
            if end is None or self._cut:
                keep = next((i for i, entry in enumerate(self._entries) if entry.offset >= self._taken), keep)
            entries += self._entries[:keep]
            del self._entries[:keep]
        return Piece(text, entries, end)

    def _begin(self) -> None:
        self.started = True
        self._owner.began(self)
        if self._job.options.echo:
            text, entries = echo(self._job, self.prompt, self.prompt_logprobs)
            self._text.append(text)
            self._echoed = entries
            self._length = len(text)

    def _visible(self, tokens: list[int], finish: str | None) -> list[int]:
        """The tokens that become text: all but the one that ended the sequence."""
        if finish != "stop" or not tokens:
            return tokens
        if tokens[-1] in self._job.params.stop_token_ids:
            self.stop_reason = tokens[-1]
        return tokens if self._job.options.include_stop else tokens[:-1]

    def _take_each(self, output: SliceOutput, finish: str | None) -> str | None:
        """Token by token, so that text, counts and log-probabilities end at the same one; gives the finish reason."""
        visible = len(self._visible(output.tokens, finish))
        for i, token in enumerate(output.tokens):
            self.completion_tokens += 1
            if self._job.params.logprobs is not None:
                self._entries.append(Entry(self._length, token, output.logprobs[i]))
            if i < visible and self._release(self._detokenizer.push([token])):
                return "stop"
        if finish is not None:
            if self._release(self._detokenizer.flush()):
                return "stop"
            if self._stops is not None:
                self._emit(self._stops.flush())
        return finish

    def _release(self, text: str) -> bool:
        """Sends `text` through the stop strings; True when it ran into one."""
        self._length += len(text)
        if self._stops is None:
            self._emit(text)
            return False
        text, matched = self._stops.push(text, ends=self.completion_tokens > self._job.params.min_tokens)
        if matched:
            stop = max((stop for stop in self._job.options.stops if text.endswith(stop)), key=len)
            self._cut, self.stop_reason = True, stop
            text = text if self._job.options.include_stop else text[: -len(stop)]
        self._emit(text)
        return matched

    def _emit(self, text: str) -> None:
        if text:
            self._text.append(text)


def echo(job: Job, prompt: Prompt, logprobs: list[TokenLogprobs]) -> tuple[str, list[Entry]]:
    """The prompt's text, and its tokens with their log-probabilities when those were asked for."""
    detokenizer = Detokenizer(job.tokenizer, [], job.options.skip_special_tokens)
    if job.params.logprobs is None:
        if prompt.text is not None:
            return prompt.text, []
        return detokenizer.push(prompt.tokens) + detokenizer.flush(), []
    pieces, entries, length = [], [], 0
    for i, token in enumerate(prompt.tokens):
        entries.append(Entry(length, token, logprobs[i - 1] if 0 < i <= len(logprobs) else None))
        pieces.append(detokenizer.push([token]))
        length += len(pieces[-1])
    pieces.append(detokenizer.flush())
    return "".join(pieces), entries


class Generation:
    """The sequences of one request, from submission to the last piece."""

    def __init__(self, fleet: Fleet, job: Job, metrics: Metrics) -> None:
        self.job = job
        self.disconnected = False
        self._fleet = fleet
        self._metrics = metrics
        self._event = asyncio.Event()
        self._ready: list[Choice] = []
        self._error: ApiError | None = None
        self._calls: list[asyncio.Handle] = []
        self._left: deque[Choice] = deque()  # first choices that are to be submitted
        n = job.n
        self.choices = [Choice(p * n + i, prompt, job, self) for p, prompt in enumerate(job.prompts) for i in range(n)]
        self.unfinished = len(self.choices)

    # For the writer

    def start(self) -> None:
        """Submits the first choice of every prompt: all or none. Raises `ApiError`.

        The other choices follow when the first has given its first output, so that they find its prompt in the cache.
        Prompts that find the queue full behind others of theirs are not refused: each follows when one of those ends.
        """
        self._left.extend(self.choices[:: self.job.n])
        try:
            while self._left and (self._left[0] is self.choices[0] or not self._fleet.full(self.job.model)):
                self._submit(self._left[0], admitted=False)
                self._left.popleft()
        except Overloaded as error:
            if self._left[0] is self.choices[0]:
                raise from_rejection(error) from None
        except Rejected as error:
            self.cancel()
            raise from_rejection(error) from None
        except KeyError:
            self.cancel()
            raise model_not_found(self.job.model, [status.name for status in self._fleet.status()]) from None

    async def ready(self) -> list[Choice]:
        """The choices that have something to send, each once; waits for one. Empty when the client has left.

        Raises `ApiError` when the request has failed and nothing is left to send.
        """
        while not self._ready and self._error is None and not self.disconnected:
            self._event.clear()
            await self._event.wait()
        if self.disconnected:
            return []
        if self._error is not None and not self._ready:
            raise self._error
        ready, self._ready = self._ready, []
        return ready

    def take(self, choice: Choice) -> Piece:
        """What a choice has ready. Counts those that are complete."""
        piece = choice.take()
        if piece.finish_reason is not None:
            self.unfinished -= 1
        return piece

    def disconnect(self) -> None:
        """The client has left."""
        self.disconnected = True
        self.cancel()
        self._event.set()

    def cancel(self) -> None:
        """Frees whatever still runs; does nothing after the end."""
        for call in self._calls:
            call.cancel()
        for choice in self.choices:
            choice.stop_waiting()
            choice.submitted = True  # never again
            if choice.id is not None:
                self._fleet.cancel(choice.id)
                choice.id = None
                self._metrics.ended(self.job.model, "abort")

    def hurry(self) -> None:
        """Submits what waits for its first choice to begin: the fleet is about to drain."""
        for choice in self.choices:
            self._submit_later(choice)

    @property
    def failed(self) -> bool:
        return self._error is not None

    # For the choices. Called inside the fleet's step, so the fleet is not called back from here.

    def began(self, choice: Choice) -> None:
        if choice.index % self.job.n == 0 and self.job.n > 1:
            self._calls.append(asyncio.get_running_loop().call_soon(self._submit_siblings, choice))

    def has_output(self, choice: Choice) -> None:
        self._ready.append(choice)
        self._event.set()

    def ended(self, choice: Choice) -> None:
        choice.id = None
        self._metrics.ended(self.job.model, choice.finish_reason or "error")
        if self._left and choice.index % self.job.n == 0:
            self._calls.append(asyncio.get_running_loop().call_soon(self._submit_later, self._left.popleft()))

    def fail(self, error: ApiError) -> None:
        if self._error is None:
            self._error = error
            for choice in self.choices:
                choice.announce()
            self._event.set()

    # Submission

    def _submit(self, choice: Choice, admitted: bool) -> None:
        params, tokens = self.job.params, choice.prompt.tokens
        if nth := choice.index % self.job.n:
            known = None if choice.prompt_logprobs else params.prompt_logprobs
            params = replace(params, choice=nth, prompt_logprobs=known)
        job = self.job
        arrival = None if admitted else job.arrival  # nobody who was accepted meanwhile counted on it
        options = {"namespace": job.namespace, "slo": job.slo, "admitted": admitted, "arrival": arrival}
        choice.id = self._fleet.submit(job.model, tokens, params, choice, **options)
        choice.submitted = True
        cacheable = params.prompt_logprobs is None
        self._metrics.admitted(choice.id, job.model, len(tokens), job.arrival, cacheable=cacheable)

    def _submit_siblings(self, first: Choice) -> None:
        for choice in self.choices[first.index + 1 : first.index + self.job.n]:
            if not choice.submitted:
                choice.prompt_logprobs = first.prompt_logprobs
                self._submit_later(choice)

    def _submit_later(self, choice: Choice) -> None:
        if choice.submitted or self._error is not None:
            return
        try:
            self._submit(choice, admitted=True)
        except Rejected as error:
            self.fail(from_rejection(error))
