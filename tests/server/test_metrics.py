"""Metrics: what the events and the steps say, under our names and under vLLM's."""

import re
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from paceline.core.events import Emitted, Event
from paceline.engine.tokenizer import Tokenizer
from paceline.runtime.api import IDLE, Drafted, GroupLoad, StepRecord
from paceline.server.app import ServerConfig
from paceline.server.metrics import Metrics, exposition
from tests.server.conftest import in_process


def samples(text: str) -> dict[str, float]:
    """{"name{label=value}": number} of an exposition, which must parse."""
    return {
        sample.name + "".join(f"{{{k}={v}}}" for k, v in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


LOAD = [GroupLoad(4, 3, blocks_used=80, blocks_total=160, model="tiny", loads=3, loads_s=0.6, weight_bytes=50)]


def tokens(time: float, **emitted: int) -> Event:
    return Event("tokens", time, 0, "0", sum(emitted.values()), Emitted(list(emitted), bytes(emitted.values())))


def observed() -> Metrics:
    metrics = Metrics()
    metrics.on_events([Event("accepted", 1.0, 0, "a"), Event("accepted", 1.0, 0, "b")])
    metrics.admitted("a", "tiny", 10)
    metrics.admitted("b", "tiny", 20, 0.75)
    metrics.on_events([Event("started", 1.1, 0, "0", 2), tokens(1.3, a=1)])
    metrics.on_step(StepRecord(0, 1.3, 30, 2, 8, 0.2, 0.01, 0.001, 0.002, 0.003))
    metrics.on_events([Event("preempted", 1.35, 0, "b"), tokens(1.5, a=2, b=1)])
    metrics.on_step(StepRecord(0, 1.5, 2, 2, 0, 0.1, 0.01, 0.001, 0.002, 0.003))
    metrics.on_events([Event("finished", 1.5, 0, "a", 3, "length"), Event("rejected", 1.6, 0, "c")])
    metrics.ended("tiny", "length")
    return metrics


@pytest.mark.parametrize("vllm", [False, True])
def test_what_is_counted(vllm: bool) -> None:
    found = samples(exposition(observed(), LOAD, vllm).decode())
    tiny = "{model=tiny}"
    assert found[f"paceline_prompt_tokens_total{tiny}"] == 30
    assert found[f"paceline_generation_tokens_total{tiny}"] == 4
    assert found[f"paceline_num_preemptions_total{tiny}"] == 1
    assert found["paceline_request_success_total{finished_reason=length}{model=tiny}"] == 1
    assert found[f"paceline_time_to_first_token_seconds_count{tiny}"] == 2
    assert found[f"paceline_time_to_first_token_seconds_sum{tiny}"] == pytest.approx(0.3 + 0.75)
    assert found[f"paceline_inter_token_seconds_count{tiny}"] == 2
    assert found[f"paceline_inter_token_seconds_sum{tiny}"] == pytest.approx(0.2)
    assert found["paceline_inter_token_seconds_bucket{le=0.1}{model=tiny}"] == 2
    assert found[f"paceline_e2e_request_latency_seconds_sum{tiny}"] == pytest.approx(0.5)
    assert found["paceline_running{group=0}"] == 3 and found["paceline_waiting{group=0}"] == 4
    assert found["paceline_kv_usage{group=0}"] == 0.5 and found["paceline_kv_blocks_used{group=0}"] == 80
    assert found["paceline_prefix_cache_hit_tokens_total{group=0}"] == 8
    assert found["paceline_steps_total{group=0}"] == 2
    assert found["paceline_rejected_total"] == 1
    assert found["paceline_load_seconds_count{group=0}{model=tiny}"] == 3
    assert found["paceline_load_seconds_sum{group=0}{model=tiny}"] == 0.6
    assert found["paceline_load_bytes_total{group=0}{model=tiny}"] == 150
    parts = {"forward": 0.3, "sample": 0.02, "schedule": 0.002, "messages": 0.004, "output": 0.006}
    for part, seconds in parts.items():
        assert found[f"paceline_step_seconds_total{{group=0}}{{part={part}}}"] == pytest.approx(seconds)
    assert any(name.startswith("vllm:") for name in found) == vllm


def test_a_prompt_whose_logprobs_are_asked_for_is_not_looked_up() -> None:
    metrics = observed()
    metrics.admitted("echo", "tiny", 100, cacheable=False)
    assert metrics.models["tiny"].prompt_tokens == 130 and metrics.models["tiny"].looked_up == 30


def test_the_same_under_vllms_names() -> None:
    found = samples(exposition(observed(), LOAD, True).decode())
    tiny = "{model_name=tiny}"
    assert found[f"vllm:num_requests_running{tiny}"] == 3 and found[f"vllm:num_requests_waiting{tiny}"] == 4
    assert found[f"vllm:kv_cache_usage_perc{tiny}"] == 0.5
    assert found[f"vllm:prompt_tokens_total{tiny}"] == 30 and found[f"vllm:generation_tokens_total{tiny}"] == 4
    assert found[f"vllm:num_preemptions_total{tiny}"] == 1
    assert found["vllm:request_success_total{finished_reason=length}{model_name=tiny}"] == 1
    assert found[f"vllm:prefix_cache_queries_total{tiny}"] == 30 and found[f"vllm:prefix_cache_hits_total{tiny}"] == 8
    for name in (
        "time_to_first_token_seconds",
        "time_per_output_token_seconds",
        "inter_token_latency_seconds",
        "e2e_request_latency_seconds",
    ):
        assert found[f"vllm:{name}_count{tiny}"] > 0


def test_each_of_vllms_names_has_a_sample_for_each_model() -> None:
    metrics = observed()
    metrics.admitted("t", "texts", 7, generates=False)  # of which nothing is looked up
    metrics.on_step(StepRecord(1, 1.6, 1, 1, 4, 0.1, 0.01, 0.001, 0.002, 0.003, drafts=[Drafted("", "ngram", 4, 2, 3)]))
    texts = GroupLoad(1, 2, blocks_used=16, blocks_total=160, model="texts")
    load = [*LOAD, replace(LOAD[0], blocks_used=120), texts]  # tiny has two groups
    text = exposition(metrics, load, True).decode()
    found = samples(text)
    for name, tiny, other in (
        ("num_requests_running", 6, 2), ("num_requests_waiting", 8, 1), ("kv_cache_usage_perc", 0.75, 0.1),
        ("prefix_cache_hits_total", 12, 0), ("prefix_cache_queries_total", 30, 0),
    ):  # fmt: skip
        assert [found[f"vllm:{name}{{model_name={one}}}"] for one in ("tiny", "texts")] == [tiny, other], name
    ours = [line for line in text.splitlines() if line.startswith("vllm:")]
    assert ours and all('model_name="t' in line for line in ours)
    assert found["vllm:spec_decode_num_drafts_total{drafter=ngram}{group=1}{model_name=tiny}"] == 1


async def test_metrics_of_a_running_server(tokenizer: Tokenizer) -> None:
    async with in_process(tokenizer, ServerConfig(metrics_compat="vllm")) as server:
        await server.client.post("/v1/completions", json={"prompt": [5, 6, 7], "max_tokens": 4, "n": 2})
        await server.client.post(
            "/v1/completions", json={"prompt": "x", "stop": ["e", "a", "o", "t"], "max_tokens": 200}
        )
        await server.client.get("/nope/" + "x" * 50)
        answer = await server.client.get("/metrics")
        assert re.match(r"text/plain; version=0\.0\.4", answer.headers["content-type"])
        found = samples(answer.text)
        assert found["paceline_http_requests_total{code=200}{route=/v1/completions}"] == 2
        assert found["paceline_http_requests_total{code=404}{route=other}"] == 1
        assert found["paceline_request_success_total{finished_reason=length}{model=tiny}"] == 2
        assert found["paceline_request_success_total{finished_reason=stop}{model=tiny}"] == 1
        assert found["paceline_prompt_tokens_total{model=tiny}"] == 6 + len(tokenizer.encode("x", True))
        assert found["vllm:time_to_first_token_seconds_count{model_name=tiny}"] == 3
        assert found["paceline_running{group=0}"] == 0


def test_predictions_are_compared_with_what_steps_took() -> None:
    metrics = observed()  # two steps without a prediction
    for predicted in (0.101, 0.08):
        metrics.on_step(StepRecord(0, 2.0, 2, 2, 0, 0.09, 0.01, 0.001, 0.002, 0.003, predicted))
    found = samples(exposition(metrics, LOAD, False).decode())
    name = "paceline_step_prediction_error"
    assert found[f"{name}_count{{group=0}}"] == 2 and found[f"{name}_sum{{group=0}}"] == pytest.approx(0.21)
    assert found[f"{name}_bucket{{group=0}}{{le=0.02}}"] == 1 and found[f"{name}_bucket{{group=0}}{{le=0.3}}"] == 2


@pytest.mark.parametrize("vllm", [False, True])
def test_drafts(vllm: bool) -> None:
    metrics = observed()
    drafts = [Drafted("", "ngram", 4, 2, 3), Drafted("", "ngram", 2, 2, 3), Drafted("", "model", 3, 0, 1)]
    idle = [Drafted(reason) for reason in ("error", "memory", "memory")]
    metrics.on_step(StepRecord(0, 2.0, 9, 6, 0, 0.1, 0.01, 0.001, 0.002, 0.003, draft_s=0.04, drafts=drafts + idle))
    metrics.on_step(StepRecord(0, 2.1, 9, 2, 0, 0.1, 0.01, 0.001, 0.002, 0.003, draft_s=0.02, drafts=idle[:2]))
    found = samples(exposition(metrics, LOAD, vllm).decode())
    found = {key.replace("{model_name=tiny}", ""): value for key, value in found.items()}
    name = ("vllm:" if vllm else "paceline_") + "spec_decode_"
    counted = {"num_drafts": (2, 1), "num_draft_tokens": (6, 3), "num_accepted_tokens": (4, 0)}
    for key, by in counted.items():
        assert tuple(found[f"{name}{key}_total{{drafter={one}}}{{group=0}}"] for one in ("ngram", "model")) == by
    places = {
        field: [
            found.get(f"{name}num_{field}_tokens_per_pos_total{{drafter=ngram}}{{group=0}}{{position={i}}}")
            for i in range(5)
        ]
        for field in ("draft", "accepted", "emitted")
    }
    assert places == {"draft": [2, 2, 1, 1, None], "accepted": [2, 2, 0, 0, None], "emitted": [2, 2, 2, 0, None]}
    reasons = {reason: found[f"{name}idle_total{{group=0}}{{reason={reason}}}"] for reason in IDLE}
    assert reasons == dict.fromkeys(IDLE, 0) | {"error": 2, "memory": 3}
    assert found[f"{name}draft_length_bucket{{drafter=ngram}}{{group=0}}{{le=2.0}}"] == 1
    assert found[f"{name}tokens_per_step_sum{{drafter=ngram}}{{group=0}}"] == 6
    assert found[f"{name}tokens_per_step_bucket{{drafter=model}}{{group=0}}{{le=1.0}}"] == 1
    assert found[f"{name}steps_total{{group=0}}"] == 1
    assert found[f"{name}seconds_total{{group=0}}{{part=draft}}"] == pytest.approx(0.04)
    assert found[f"{name}seconds_total{{group=0}}{{part=verify}}"] == pytest.approx(0.07)
    assert found["paceline_step_seconds_total{group=0}{part=draft}"] == pytest.approx(0.06)
    text = exposition(metrics, LOAD, vllm).decode()
    ours = re.findall(rf"^# (HELP|TYPE) ({name}\w+) .", text, re.M)
    assert {key for kind, key in ours if kind == "HELP"} == {key for kind, key in ours if kind == "TYPE"}
