"""`paceline serve` with more models than the memory of its devices holds: nobody notices, but for the time."""

import json
import random
import shutil
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import openai
import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.cli.groups import OVERHEAD
from paceline.cli.sources import BUILTIN
from paceline.core.cluster import KV_SHARE, Parallel
from paceline.core.request import SamplingParams
from paceline.engine.config import ModelConfig
from paceline.engine.precision import precision
from paceline.engine.runner import ModelRunner
from paceline.engine.tokenizer import Tokenizer
from tests.engine.test_parallel import alone
from tests.system.server import Server

NAMES, HELD = tuple("abcdef"), 3
# the shape, clients, requests: with more clients than places models wait for each other
RUNS = [(Parallel(), 3, 18), *(pytest.param(Parallel(2 - n, 1), 5, 60, marks=pytest.mark.slow) for n in range(2))]
LOADS = ("seconds_count", "seconds_sum", "bytes_total")
GREEDY = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
CODER = ModelConfig.load(BUILTIN / "coder")
HELD_IN = precision("cpu", "auto", "none", BUILTIN / "coder").weights
WEIGHTS = CODER.weight_bytes(HELD_IN) + CODER.table_bytes


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> tuple[dict[str, Path], dict[str, list[tuple[list[int], SamplingParams, str]]]]:
    """Six checkpoints with weights of their own, and what each makes of its requests when it is alone."""
    folder, paths, cases = tmp_path_factory.mktemp("models"), {}, {}
    tokenizer = Tokenizer.load(BUILTIN / "coder")
    for number, name in enumerate(NAMES):
        paths[name] = shutil.copytree(BUILTIN / "coder", folder / name)
        weights, noise = load_file(paths[name] / "model.safetensors"), torch.Generator().manual_seed(number)
        for one in weights.values():
            one += 0.1 * one.abs().mean() * torch.randn(one.shape, generator=noise).to(one.dtype)
        save_file(weights, paths[name] / "model.safetensors", {"format": "pt"})
        asked = [
            ([10 + (7 * number + 11 * i * j) % 900 for j in range(20 + 30 * i)], params)
            for i in range(2)
            for params in (GREEDY, replace(GREEDY, temperature=0.9, seed=i))
        ]
        runner = ModelRunner.load(paths[name], max_batch_tokens=512, max_batch=8, num_blocks=100)
        tokens = alone(runner, asked)
        cases[name] = [(*one, tokenizer.decode(own, True)) for one, own in zip(asked, tokens, strict=True)]
    return paths, cases


def peak_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("parallel", "clients", "count"), RUNS, ids=str)
def test_six_models_where_three_fit_serve_zipf_traffic_with_the_tokens_of_each_alone(
    tmp_path, models, parallel, clients, count
):
    paths, cases = models
    assert len({tuple(text for *_, text in some) for some in cases.values()}) == len(NAMES), "they differ"
    own = CODER.weight_bytes(HELD_IN) / parallel.devices + CODER.table_bytes
    memory = OVERHEAD + int((HELD + 0.5) * own / (1 - KV_SHARE))
    entries = [f"  - {{name: {name}, source: {path}}}\n" for name, path in paths.items()]
    (tmp_path / "fleet.yaml").write_text(f"models:\n{''.join(entries)}cluster: {{memory: {memory}}}\n")
    shape = {"pipeline": parallel.pipeline, "tensor": parallel.tensor}
    group = {"devices": list(range(parallel.devices)), "parallel": shape, "models": NAMES}
    (tmp_path / "placement.json").write_text(json.dumps({"groups": [group]}))
    rng, weights = random.Random(3), [1 / (1 + rank) for rank in range(len(NAMES))]
    drawn = [(name, rng.choice(cases[name])) for name in rng.choices(NAMES, weights, k=count)]
    with (
        Server(str(tmp_path / "fleet.yaml"), "--placement", str(tmp_path / "placement.json")) as server,
        openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client,
        ThreadPoolExecutor(clients) as pool,
    ):
        states = {model["id"]: model["state"] for model in json.loads(server.get("/v1/models")[1])["data"]}
        assert sorted(states.values()) == ["cold"] * HELD + ["ready"] * HELD

        def ask(one) -> str:
            name, (prompt, params, _) = one
            return client.completions.create(
                model=name, prompt=prompt, max_tokens=params.max_tokens, temperature=params.temperature,
                seed=params.seed, extra_body={"ignore_eos": True},
            ).choices[0].text  # fmt: skip

        got = list(pool.map(ask, drawn))
        wrong = defaultdict(int)
        for text, (name, (*_, expected)) in zip(got, drawn, strict=True):
            wrong[name] += text != expected
        assert not any(wrong.values()), wrong
        loads, seconds, size = map(server.metric, (f"paceline_load_{what}" for what in LOADS))
        assert loads >= 5 and seconds > 0 and size == pytest.approx(loads * WEIGHTS, rel=0.01)
        assert len(server.workers()) == parallel.devices
        assert max(map(peak_bytes, server.workers())) < memory, "as much as the fleet file gives them"
