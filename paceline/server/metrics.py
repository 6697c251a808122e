"""Prometheus metrics, made of what the runtime's observers see and of what the routes report.

Plain numbers while serving; samples only when somebody scrapes.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from paceline.core.events import Emitted, Event
from paceline.core.request import MAX_DRAFT_TOKENS
from paceline.latency.step_time import BEFORE, OTHERS, WIDTHS
from paceline.runtime.api import IDLE, Drafted, GroupLoad, StepRecord

FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0)
BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0)
WHOLE = (0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0)
RELATIVE = (0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0)  # errors, as fractions
LENGTHS = tuple(map(float, range(MAX_DRAFT_TOKENS + 1)))
YIELDS = (*LENGTHS[1:], LENGTHS[-1] + 1)
PARTS = ("draft", "forward", "sample", "schedule", "messages", "output")
PROFILED = ("predicted", "engine", "overhead")
PACES = tuple(round(0.5 * 2 ** (n / 8), 4) for n in range(33))  # of steps, over what is profiled
REASONS = ("stop", "length", "abort", "error")
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Histogram:
    """Counts per bucket (upper bounds, in seconds or as fractions) and the sum."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += count
        self.sum += value * count

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative, as Prometheus wants them."""
        total, result = 0, []
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            total += count
            result.append(("+Inf" if bound == float("inf") else str(bound), float(total)))
        return result


class ModelMetrics:
    """What is counted per model."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.looked_up = 0  # of those, tokens looked up in the prefix cache
        self.generation_tokens = 0
        self.num_preemptions = 0
        self.ended = dict.fromkeys(REASONS, 0)
        self.first_token = Histogram(FIRST_TOKEN)
        self.between = Histogram(BETWEEN)
        self.whole = Histogram(WHOLE)


class DraftMetrics:
    """What became of one drafter's drafts for a group. By place: the first token of a decode is 0."""

    def __init__(self) -> None:
        self.lengths = Histogram(LENGTHS)  # of drafts
        self.yields = Histogram(YIELDS)  # tokens of decodes with a draft
        self.drafted_at, self.accepted_at, self.emitted_at = ([0] * (MAX_DRAFT_TOKENS + 1) for _ in range(3))

    def add(self, one: Drafted) -> None:
        self.lengths.observe(one.drafted)
        self.yields.observe(one.emitted)
        for count, places in (
            (one.drafted, self.drafted_at), (one.accepted, self.accepted_at), (one.emitted, self.emitted_at),
        ):  # fmt: skip
            for place in range(count):
                places[place] += 1


class _Open:
    """A sequence on its way: times in seconds."""

    __slots__ = ("arrival", "generates", "last", "model")

    def __init__(self, arrival: float, model: ModelMetrics) -> None:
        self.arrival = arrival
        self.generates = True  # else its one token stands for an embedding
        self.last = 0.0  # time of its last token; 0 before the first
        self.model = model


class Metrics:
    """An observer of the fleet (`paceline.runtime.api.Observer`), and the counters of the routes."""

    def __init__(self) -> None:
        self.models: dict[str, ModelMetrics] = defaultdict(ModelMetrics)
        self.parts: dict[int, list[float]] = defaultdict(lambda: [0.0] * len(PARTS))
        self.steps: dict[int, int] = defaultdict(int)
        self.cached: dict[int, int] = defaultdict(int)
        self.drafts: dict[tuple[int, str], DraftMetrics] = defaultdict(DraftMetrics)  # by group and drafter
        self.idle: dict[int, dict[str, int]] = defaultdict(lambda: dict.fromkeys(IDLE, 0))  # decodes without a draft
        self.verified: dict[int, int] = defaultdict(int)  # steps with drafts
        self.drafting_s: dict[int, dict[str, float]] = defaultdict(lambda: {"draft": 0.0, "verify": 0.0})
        self.prediction: dict[int, Histogram] = defaultdict(lambda: Histogram(RELATIVE))
        # by group, width, whether other devices are at work, and whether another model was at it before
        self.paces: dict[tuple[int, int, bool, bool], Histogram] = defaultdict(lambda: Histogram(PACES))
        self.profiled: dict[tuple[int, int, bool, bool], list[float]] = defaultdict(lambda: [0.0] * len(PROFILED))
        self.http: dict[tuple[str, int], int] = defaultdict(int)
        self.rejected = 0
        self._open: dict[str, _Open] = {}

    # From the fleet

    def on_events(self, events: Seq[Event]) -> None:
        for event in events:
            kind = event.kind
            if kind == "tokens":
                self._on_tokens(event)
            elif kind == "accepted":
                self._open[event.request] = _Open(event.time, self.models[""])
            elif kind in ("finished", "cancelled", "failed"):
                known = self._open.pop(event.request, None)
                if known is not None and kind == "finished":
                    known.model.whole.observe(event.time - known.arrival)
            elif kind == "preempted":
                known = self._open.get(event.request)
                if known is not None:
                    known.model.num_preemptions += 1
            elif kind == "rejected":
                self.rejected += 1

    def _on_tokens(self, event: Event) -> None:
        assert isinstance(event.detail, Emitted)
        for request, tokens in zip(event.detail.requests, event.detail.tokens, strict=True):
            known = self._open.get(request)
            if known is None or not tokens:
                continue
            model = known.model
            model.generation_tokens += tokens * known.generates
            if known.last:
                model.between.observe((event.time - known.last) / tokens, tokens)
            else:
                model.first_token.observe(event.time - known.arrival)
            known.last = event.time

    def on_step(self, record: StepRecord) -> None:
        group = record.group
        self.steps[group] += 1
        self.cached[group] += record.cached_tokens
        parts = self.parts[group]
        parts[0] += record.draft_s
        parts[1] += record.forward_s - record.draft_s
        parts[2] += record.sample_s
        parts[3] += record.schedule_s
        parts[4] += record.messages_s
        parts[5] += record.output_s
        if record.drafts:
            self._on_drafts(record)
        if record.predicted_s is not None:
            actual = record.forward_s + record.sample_s
            self.prediction[group].observe(abs(record.predicted_s / actual - 1))
            if record.profiled_s is not None:
                width = WIDTHS[bisect_right(WIDTHS, record.tokens) - 1]
                like = group, width, record.others, record.before
                took = actual - record.draft_s  # a draft model follows prompts in steps that draft nothing
                self.paces[like].observe(took / record.profiled_s)
                known = record.profiled_s, took, record.schedule_s + record.messages_s
                self.profiled[like] = [a + b for a, b in zip(self.profiled[like], known, strict=True)]

    def _on_drafts(self, record: StepRecord) -> None:
        group, drafted = record.group, False
        for one in record.drafts:
            if one.drafted:
                self.drafts[group, one.drafter].add(one)
                drafted = True
            else:
                self.idle[group][one.idle] += 1
        if drafted:
            self.verified[group] += 1
            seconds = self.drafting_s[group]
            seconds["draft"] += record.draft_s
            seconds["verify"] += record.forward_s - record.draft_s + record.sample_s

    # From the routes

    def admitted(
        self, id: str, model: str, prompt_tokens: int, arrival: float | None = None, generates: bool = True,
        cacheable: bool = True,
    ) -> None:  # fmt: skip
        """The fleet took a sequence: from now on its times count for `model`, since its request's `arrival`.
        `cacheable`: its prompt is looked up in the prefix cache."""
        metrics = self.models[model]
        metrics.prompt_tokens += prompt_tokens
        metrics.looked_up += prompt_tokens * (generates and cacheable)
        if known := self._open.get(id):
            known.model, known.generates = metrics, generates
            known.arrival = known.arrival if arrival is None else arrival

    def ended(self, model: str, reason: str) -> None:
        """A sequence is over: "stop", "length", "abort" (not wanted any more) or "error"."""
        ended = self.models[model].ended
        ended[reason] = ended.get(reason, 0) + 1

    def answered(self, route: str, status: int) -> None:
        self.http[route, status] += 1


class _Samples(Collector):
    """Turns the numbers into samples, under our names and, if asked for, under vLLM's."""

    def __init__(self, metrics: Metrics, load: Seq[GroupLoad], vllm: bool) -> None:
        self._metrics = metrics
        self._load = load
        self._vllm = vllm

    def collect(self) -> Iterator[Metric]:
        yield from self._http()
        yield from self._steps()
        yield from self._loads()
        yield from self._drafts("paceline_")
        yield from self._models("paceline_", "model", "inter_token_seconds")
        if self._vllm:
            yield from self._models("vllm:", "model_name", "inter_token_latency_seconds")
            yield from self._with_models(self._drafts("vllm:"))
            yield from self._vllm_gauges()

    def _http(self) -> Iterator[Metric]:
        http = CounterMetricFamily("paceline_http_requests", "Answers by route and status.", labels=["route", "code"])
        for (route, status), count in sorted(self._metrics.http.items()):
            http.add_metric([route, str(status)], count)
        yield http
        yield CounterMetricFamily("paceline_rejected", "Sequences refused by the queue.", value=self._metrics.rejected)

    def _steps(self) -> Iterator[Metric]:
        m = self._metrics
        names = ["group"]
        yield _family(CounterMetricFamily, "paceline_steps", "Steps.", names, m.steps)
        hits = "paceline_prefix_cache_hit_tokens"
        yield _family(CounterMetricFamily, hits, "Prompt tokens not computed.", names, m.cached)
        for name, text, get in (
            ("paceline_running", "Sequences running.", lambda load: load.running),
            ("paceline_waiting", "Sequences waiting.", lambda load: load.waiting),
            ("paceline_kv_blocks_used", "KV blocks that sequences hold.", lambda load: load.blocks_used),
            ("paceline_kv_usage", "Share of KV blocks in use.", usage),
        ):
            values = {group: get(load) for group, load in enumerate(self._load)}
            yield _family(GaugeMetricFamily, name, text, names, values)
        seconds = CounterMetricFamily("paceline_step_seconds", "Seconds of steps by part.", labels=["group", "part"])
        for group, parts in m.parts.items():
            for part, value in zip(PARTS, parts, strict=True):
                seconds.add_metric([str(group), part], value)
        yield seconds
        text = (
            "What steps take over their profile, by tokens from so many on, whether other devices had a step under way "
            "and whose their device's last step was; without drafts, of groups of one stage."
        )
        labels = ["group", "model", "width", "others", "before"]
        paces = HistogramMetricFamily("paceline_step_pace", text, labels=labels)
        for like, histogram in m.paces.items():
            paces.add_metric(self._alike(*like), buckets=histogram.buckets(), sum_value=histogram.sum)
        yield paces
        text = "Of those steps: by the profile, in the engine, and beside it in the scheduler and in messages."
        profiled = CounterMetricFamily("paceline_profiled_step_seconds", text, labels=[*labels, "part"])
        for like, sums in m.profiled.items():
            for part, value in zip(PROFILED, sums, strict=True):
                profiled.add_metric([*self._alike(*like), part], value)
        yield profiled
        text = "|predicted - measured| / measured of steps, where there is a profile."
        yield _histograms("paceline_step_prediction_error", text, ["group"], m.prediction)

    def _alike(self, group: int, width: int, others: bool, before: bool) -> list[str]:
        return [str(group), self._load[group].model, str(width), OTHERS[others], BEFORE[before]]

    def _loads(self) -> Iterator[Metric]:
        """Bytes over seconds are what a swap reaches."""
        labels = ["group", "model"]
        seconds = SummaryMetricFamily("paceline_load_seconds", "Loads while serving, with room for KV.", labels=labels)
        size = CounterMetricFamily("paceline_load_bytes", "Weights loaded while serving.", labels=labels)
        for group, load in enumerate(self._load):
            seconds.add_metric([str(group), load.model], load.loads, load.loads_s)
            size.add_metric([str(group), load.model], load.loads * load.weight_bytes)
        yield from (seconds, size)

    def _drafts(self, prefix: str) -> Iterator[Metric]:
        m, prefix, labels = self._metrics, prefix + "spec_decode_", ["group", "drafter"]
        for name, text, get in (
            ("num_drafts", "Decodes with a draft.", lambda one: one.drafted_at[0]),
            ("num_draft_tokens", "Tokens drafted.", lambda one: sum(one.drafted_at)),
            ("num_accepted_tokens", "Of those, emitted.", lambda one: sum(one.accepted_at)),
        ):
            values = {key: get(one) for key, one in m.drafts.items()}
            yield _family(CounterMetricFamily, prefix + name, text, labels, values)
        for name, text, field in (
            ("num_draft_tokens_per_pos", "Tokens drafted, by place in the draft.", "drafted_at"),
            ("num_accepted_tokens_per_pos", "Of those, emitted.", "accepted_at"),
            ("num_emitted_tokens_per_pos", "Tokens of decodes with a draft, by place among them.", "emitted_at"),
        ):
            values = {
                (*key, place): count
                for key, one in m.drafts.items()
                for place, count in enumerate(getattr(one, field))
                if one.drafted_at[place] or count
            }
            yield _family(CounterMetricFamily, prefix + name, text, [*labels, "position"], values)
        idle = {(group, reason): count for group, some in m.idle.items() for reason, count in some.items()}
        text = "Decodes without a draft, by reason."
        yield _family(CounterMetricFamily, prefix + "idle", text, ["group", "reason"], idle)
        lengths, yields = ({key: getattr(one, name) for key, one in m.drafts.items()} for name in ("lengths", "yields"))
        yield _histograms(prefix + "draft_length", "Tokens of a draft.", labels, lengths)
        yield _histograms(prefix + "tokens_per_step", "Tokens of a decode with a draft.", labels, yields)
        yield _family(CounterMetricFamily, prefix + "steps", "Steps with drafts.", ["group"], m.verified)
        seconds = {(group, part): value for group, sums in m.drafting_s.items() for part, value in sums.items()}
        text = "Seconds in the engine of steps with drafts: of drafting, and of all else."
        yield _family(CounterMetricFamily, prefix + "seconds", text, ["group", "part"], seconds)

    def _with_models(self, families: Iterable[Metric]) -> Iterator[Metric]:
        """Each sample with the model of its group, too."""
        for family in families:
            for sample in family.samples:
                sample.labels["model_name"] = self._load[int(sample.labels["group"])].model
            yield family

    def _named(self) -> dict[str, ModelMetrics]:
        """Metrics by model; sequences that no route told of, if any, under the empty name."""
        return {name: m for name, m in self._metrics.models.items() if name or m.generation_tokens}

    def _models(self, prefix: str, label: str, between: str) -> Iterator[Metric]:
        models = self._named()
        for field, text in (
            ("prompt_tokens", "Prompt tokens taken."),
            ("generation_tokens", "Tokens generated."),
            ("num_preemptions", "Sequences set back to be recomputed."),
        ):
            values = {name: getattr(m, field) for name, m in models.items()}
            yield _family(CounterMetricFamily, prefix + field, text, [label], values)
        labels = [label, "finished_reason"]
        success = CounterMetricFamily(prefix + "request_success", "Sequences by end.", labels=labels)
        for name, m in models.items():
            for reason, count in m.ended.items():
                success.add_metric([name, reason], count)
        yield success
        first, whole = prefix + "time_to_first_token_seconds", prefix + "e2e_request_latency_seconds"
        yield _histograms(first, "Arrival to first token.", [label], {n: m.first_token for n, m in models.items()})
        yield _histograms(prefix + between, "Between tokens.", [label], {n: m.between for n, m in models.items()})
        yield _histograms(whole, "Arrival to last token.", [label], {n: m.whole for n, m in models.items()})

    def _vllm_gauges(self) -> Iterator[Metric]:
        """By model, its groups summed up: vLLM counts per engine."""
        m, groups = self._metrics, defaultdict[str, list[int]](list)
        for group, load in enumerate(self._load):
            groups[load.model].append(group)
        for kind, name, text, get, total in (
            (GaugeMetricFamily, "num_requests_running", "Running.", lambda g: self._load[g].running, sum),
            (GaugeMetricFamily, "num_requests_waiting", "Waiting.", lambda g: self._load[g].waiting, sum),
            (GaugeMetricFamily, "kv_cache_usage_perc", "1 is full.", lambda g: usage(self._load[g]), max),
            (CounterMetricFamily, "prefix_cache_hits", "Prompt tokens found.", lambda g: m.cached.get(g, 0), sum),
        ):
            values = {model: total(map(get, some)) for model, some in groups.items()}
            yield _family(kind, "vllm:" + name, text, ["model_name"], values)
        queries = {name: model.looked_up for name, model in self._named().items()}
        text = "Prompt tokens looked up."
        yield _family(CounterMetricFamily, "vllm:prefix_cache_queries", text, ["model_name"], queries)
        between = {name: model.between for name, model in self._named().items()}
        yield _histograms("vllm:time_per_output_token_seconds", "Between tokens.", ["model_name"], between)


def _family(
    kind: type[CounterMetricFamily | GaugeMetricFamily],
    name: str,
    text: str,
    labels: list[str],
    values: Mapping[Any, float],
) -> Metric:
    family = kind(name, text, labels=labels)
    for key, value in values.items():
        family.add_metric(_labels(key), value)
    return family


def _histograms(name: str, text: str, labels: list[str], values: Mapping[Any, Histogram]) -> Metric:
    family = HistogramMetricFamily(name, text, labels=labels)
    for key, histogram in values.items():
        family.add_metric(_labels(key), buckets=histogram.buckets(), sum_value=histogram.sum)
    return family


def _labels(key: Any) -> list[str]:
    """One label, or a tuple of them."""
    return [str(label) for label in (key if isinstance(key, tuple) else (key,))]


def usage(load: GroupLoad) -> float:
    return load.blocks_used / load.blocks_total if load.blocks_total else 0.0


def exposition(metrics: Metrics, load: Seq[GroupLoad], vllm: bool) -> bytes:
    """All metrics in Prometheus' text format; `load` by group."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Samples(metrics, load, vllm))
    return generate_latest(registry)
