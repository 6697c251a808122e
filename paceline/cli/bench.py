"""`paceline bench`: a trace against any OpenAI-compatible server, reported as `simulate` reports it."""

import asyncio
import gc
import json
import time
from collections import defaultdict
from errno import EPROTO
from pathlib import Path
from typing import Annotated

import aiohttp
import msgspec
import numpy as np
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from paceline.cli import fleet_file
from paceline.cli.ask import bearer, failed
from paceline.cli.planning import check_parent, make_folder
from paceline.cli.simulate import report_table
from paceline.core.request import SLO
from paceline.metrics.outcomes import STATUSES, Outcomes, report
from paceline.workload.trace import Trace, load

TOKENS = np.arange(100, 1000)  # ids that prompts are made of: every vocabulary has them
WORDS = np.array(("the", "of", "and", "to", "in", "is", "was", "for", "on", "that"))  # a token each, about
UNEXPECTED = (ValueError, KeyError, TypeError, AttributeError, IndexError)  # of an answer in another form
KEPT_S = 5.0  # a connection that nobody uses; servers close theirs a little later
LINE_BYTES = 2**20  # of a stream, at most
OK, REJECTED, CANCELLED, FAILED = range(len(STATUSES))
errors = Console(stderr=True, markup=False)


def bench(
    url: Annotated[str, typer.Option(help="Of the server, such as http://127.0.0.1:8000.")],
    trace: Annotated[Path, typer.Option(help="Trace file; its models are the server's.")],
    out: Annotated[Path, typer.Option(help="Directory for requests.csv and report.json.")],
    fleet: Annotated[Path | None, typer.Option(help="Fleet file with the models' goals.")] = None,
    ttft: Annotated[float | None, typer.Option(min=0.0, help="Goal of all others: seconds to the first token.")] = None,
    tbt: Annotated[float | None, typer.Option(min=0.0, help="Likewise between tokens, on average.")] = None,
    deadline: Annotated[float | None, typer.Option(min=0.0, help="Likewise from arrival to the end.")] = None,
    speed: Annotated[float, typer.Option(min=0.01, help="Send so many times as fast as the trace says.")] = 1.0,
    text: Annotated[bool, typer.Option(help="Prompts are words, for servers that take no token ids.")] = False,
    api_key: Annotated[str, typer.Option(envvar="PACELINE_API_KEY", help="If the server wants one.")] = "",
    timeout: Annotated[float, typer.Option(min=1.0, help="Seconds after which a request has failed.")] = 600.0,
) -> None:
    """Send a trace to a server and report what it gave. The exit code is 1 where no request was answered.

    Example: paceline bench --url http://127.0.0.1:8000 --trace trace.csv --out results
    """
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"url: {url!r} is not like http://HOST:PORT")
    check_parent("out", out)
    requests = load(trace)
    make_folder("out", out)
    known = {entry.name: entry.slo for entry in fleet_file.load(fleet).models} if fleet else {}
    goals = [
        SLO(known[name].ttft, known[name].tbt, known[name].deadline) if name in known else SLO(ttft, tbt, deadline)
        for name in requests.names
    ]
    if speed != 1.0:
        requests = Trace(
            requests.arrivals / speed, requests.models, requests.prompts, requests.outputs, requests.names
        )
    client = Client(url.rstrip("/").removesuffix("/v1"), bearer(api_key), timeout, text)
    outcomes, late = asyncio.run(client.send(requests))
    outcomes.save(out / "requests.csv", goals)
    summary = report(outcomes, goals) | {"sent_late_p99_s": late}
    (out / "report.json").write_bytes(msgspec.json.format(msgspec.json.encode(summary), indent=1))
    Console(markup=False).print(report_table(summary))
    if late > 0.05:
        errors.print(f"requests were sent up to {late:.2f} s late (P99): this machine cannot send so fast")
    for reason, count in sorted(client.reasons.items()):
        errors.print(f"{count} times: {reason}", highlight=False, soft_wrap=True)
    errors.print(f"kept in {out}", highlight=False, soft_wrap=True)
    if not (outcomes.statuses == OK).any():
        raise typer.Exit(1)


class Client:
    """Sends requests at their times, whatever became of those before (an open loop)."""

    def __init__(self, url: str, headers: dict[str, str], timeout: float, text: bool) -> None:
        self.url, self.headers, self.timeout, self.text = url, headers, timeout, text
        self.reasons: dict[str, int] = defaultdict(int)  # why requests failed or were rejected

    async def send(self, trace: Trace) -> tuple[Outcomes, float]:
        """What became of the trace, and how late requests were sent (P99, seconds). Raises ValueError where nobody
        answers, or a model is not served, OSError where the server cannot answer."""
        count = len(trace)
        outcomes = Outcomes(
            trace.names, trace.models.astype(np.int64), np.full(count, -1, np.int64), trace.arrivals,
            np.full(count, np.nan), np.full(count, np.nan), trace.prompts, np.zeros(count, np.int64),
            np.full(count, FAILED, np.uint8),
        )  # fmt: skip
        gaps: dict[int, list[float]] = defaultdict(list)
        late = np.zeros(count)
        columns = (TextColumn("sending"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEPT_S), headers=self.headers,
            timeout=aiohttp.ClientTimeout(self.timeout), read_bufsize=LINE_BYTES,
        ) as http:  # fmt: skip
            await self._check(http, trace.names)
            begin = time.perf_counter()
            with Progress(*columns, console=errors, transient=True) as bars:
                task = bars.add_task("sending", total=count)

                async def one(i: int) -> None:
                    late[i] = time.perf_counter() - begin - trace.arrivals[i]
                    await self._one(http, trace, i, begin, outcomes, gaps)
                    bars.advance(task)

                gc.freeze()  # collections meanwhile need not look at what is here already
                async with asyncio.TaskGroup() as tasks:
                    for i in range(count):
                        if (left := trace.arrivals[i] - (time.perf_counter() - begin)) > 0:
                            await asyncio.sleep(left)
                        tasks.create_task(one(i))
        outcomes.gaps = {model: np.array(some) for model, some in gaps.items()}
        return outcomes, float(np.percentile(late, 99)) if count else 0.0

    async def _check(self, http: aiohttp.ClientSession, names: tuple[str, ...]) -> None:
        try:
            async with http.get(f"{self.url}/v1/models", raise_for_status=True) as answer:
                served = [model["id"] for model in json.loads(await answer.read())["data"]]
        except (aiohttp.ClientError, TimeoutError, *UNEXPECTED) as error:
            text = " ".join(str(error).split()) or type(error).__name__
            if isinstance(error, aiohttp.ClientResponseError) and failed(error.status):
                raise OSError(EPROTO, f"no list of models: {text}", f"{self.url}/v1/models") from error
            raise ValueError(f"url: no list of models at {self.url}/v1/models: {text}") from error
        missing = [name for name in names if name not in served]
        if missing:
            raise ValueError(f"trace: model {missing[0]!r} is not served; there are {', '.join(served)}")

    async def _one(
        self, http: aiohttp.ClientSession, trace: Trace, i: int, begin: float, outcomes: Outcomes,
        gaps: dict[int, list[float]],
    ) -> None:  # fmt: skip
        path, body = self._request(trace, i)
        try:
            async with http.post(self.url + path, json=body, allow_redirects=False) as answer:
                if answer.status != 200:
                    self._refused(answer.status, await answer.read())
                    outcomes.statuses[i] = REJECTED if answer.status in (429, 503) else FAILED
                elif body.get("stream"):
                    await self._tokens(answer, i, begin, outcomes, gaps[int(trace.models[i])])
                else:
                    one_shot = json.loads(await answer.read())
                    outcomes.first_tokens[i] = outcomes.finishes[i] = time.perf_counter() - begin
                    self._check_embedding(one_shot, body["input"])
                    outcomes.statuses[i] = OK
                    return
        except TimeoutError:
            self.reasons[f"no end within {self.timeout:g} s"] += 1
        except (aiohttp.ClientError, *UNEXPECTED) as error:
            self.reasons[f"{type(error).__name__}: {error}"] += 1
        outcomes.finishes[i] = time.perf_counter() - begin

    async def _tokens(
        self, answer: aiohttp.ClientResponse, i: int, begin: float, outcomes: Outcomes, gaps: list[float]
    ) -> None:
        """Gaps are between pieces of text, which may be several tokens."""
        last, chunks, whole = 0.0, 0, False
        async for line in answer.content:
            data = line.removeprefix(b"data:").strip()
            if not line.startswith(b"data:") or data == b"[DONE]":
                whole |= data == b"[DONE]"
                continue
            event = json.loads(data)
            if "error" in event:
                self.reasons[f"in the stream: {event['error']}"] += 1
                return
            now = time.perf_counter() - begin
            if usage := event.get("usage"):
                outcomes.outputs[i] = usage["completion_tokens"]
            choice = (event.get("choices") or [{}])[0]
            whole |= choice.get("finish_reason") is not None
            if choice.get("text"):
                outcomes.outputs[i] = max(outcomes.outputs[i], chunks + 1)
                if chunks:
                    gaps.append(now - last)
                else:
                    outcomes.first_tokens[i] = now
                last, chunks = now, chunks + 1
        if not whole:
            self.reasons["the stream ended early"] += 1
            return
        if np.isnan(outcomes.first_tokens[i]):  # tokens, but no text
            outcomes.first_tokens[i] = time.perf_counter() - begin
        outcomes.statuses[i] = OK

    def _check_embedding(self, answer: dict, prompt: str | list[int]) -> None:
        """Raises ValueError for no vector, or one of another text: a prompt of ids is so long, nothing is added."""
        if not answer["data"][0]["embedding"]:
            raise ValueError("an embedding without numbers")
        counted = answer["usage"]["prompt_tokens"]
        if not self.text and counted != len(prompt):
            raise ValueError(f"the server counts {counted} tokens in {len(prompt)} token ids")

    def _request(self, trace: Trace, i: int) -> tuple[str, dict]:
        random = np.random.default_rng(i)
        count, model = max(1, int(trace.prompts[i])), trace.names[trace.models[i]]
        prompt: object = random.choice(TOKENS, count).tolist()
        if self.text:
            prompt = " ".join(random.choice(WORDS, count))
        if trace.outputs[i] == 0:
            return "/v1/embeddings", {"model": model, "input": prompt}
        return "/v1/completions", {
            "model": model, "prompt": prompt, "max_tokens": int(trace.outputs[i]), "temperature": 0.0,
            "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip

    def _refused(self, status: int, body: bytes) -> None:
        try:
            reason = json.loads(body)["error"]["message"]
        except (ValueError, KeyError, TypeError):
            reason = ""
        self.reasons[f"{status} {reason}".strip()] += 1
