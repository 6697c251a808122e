"""`plan`, `simulate`, `trace`, from files to files; what is wrong with them is told in one line."""

import csv
import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from paceline.cli import fleet_file, profile_cache
from paceline.cli.groups import held_of, plan
from paceline.cli.placement_file import load_placement
from paceline.cli.planning import _from_config, planned, traffic
from paceline.core.cluster import Parallel
from paceline.engine.config import KEPT_BFLOAT16, ModelConfig
from paceline.engine.load import weight_bytes
from paceline.engine.parallel import Place
from paceline.latency.profile import Percentiles, Profile
from paceline.latency.roofline import Roofline
from paceline.latency.step_time import StepTime
from paceline.placement.search import part, split_cells, uniform
from paceline.placement.search import plan as search
from paceline.processor import HAS_TILES
from paceline.simulator.drafts import SimulatedDrafts
from paceline.speculation.costs import Costs
from tests.cli import command
from tests.engine import checkpoints

GIB = 2**30
SHAPES = [(1, 1), (2, 1), (1, 2)]


def profile(seconds: dict[str, float], weight: int = 2 * GIB) -> dict:
    def shapes(whole: float) -> list[dict]:
        return [
            {"pipeline": p, "tensor": t, "stage_weight_bytes": [weight // (p * t)] * p,
             "stage_latency": {"1": [whole / (p * t) * (1.05 if p * t > 1 else 1)] * p}}
            for p, t in SHAPES
        ]  # fmt: skip

    models = {name: {"parallel": shapes(whole)} for name, whole in seconds.items()}
    return {"models": models, "device": "made up", "error": {"p50": 0.01, "p95": 0.04}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "profile.json").write_text(json.dumps(profile({"small": 0.1, "large": 0.3})))
    (tmp_path / "fleet.yaml").write_text(
        "models:\n"
        "  - {name: a, source: 'profile:small', slo: {deadline: 0.5}, workload: {rate: 4.0, cv: 3.0}}\n"
        "  - {name: b, source: 'profile:small', slo: {deadline: 0.5}, workload: {rate: 2.0, cv: 3.0}}\n"
        "  - {name: c, source: 'profile:large', slo: {deadline: 1.5}, workload: {rate: 1.0}}\n"
        "cluster: {devices: 4, memory: 5GiB}\n"
    )
    return tmp_path


def paceline(folder: Path, *arguments: str, code: int = 0) -> str:
    done = command.paceline(*arguments, cwd=folder)
    assert done.returncode == code, done.stderr
    return done.stdout if code == 0 else done.stderr


@pytest.mark.parametrize("dispatch", ["finish", "deadline"])
def test_from_workloads_to_outcomes(folder, dispatch):
    known = ["--profile", "profile.json", "--dispatch", dispatch]
    table = paceline(folder, "trace", "make", "fleet.yaml", "--duration", "60", "--out", "trace.csv")
    assert "requests in" in table
    options = ["--trace", "trace.csv", "--out", "p.json", "--effort", "200000"]
    told = paceline(folder, "plan", "fleet.yaml", *known, *options)
    for words in ("attainment", "why these groups", "instead of all of it", "CPU seconds", "P95 4.0%", "±"):
        assert words in told
    placement = json.loads((folder / "p.json").read_text())
    assert set(placement["groups"][0]) == {"devices", "parallel", "models"}
    assert {model for group in placement["groups"] for model in group["models"]} == {"a", "b", "c"}
    paceline(folder, "simulate", "fleet.yaml", *known, "--placement", "p.json", "--trace", "trace.csv", "--out", "r",
             "--plot")  # fmt: skip
    summary = json.loads((folder / "r/report.json").read_text())
    with (folder / "r/requests.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert summary["requests"] == len(rows) and summary["attainment"] > 0.9
    assert sum(row["slo_met"] == "true" for row in rows) / len(rows) == pytest.approx(summary["attainment"])
    assert [device["device"] for device in summary["devices"]] == [0, 1, 2, 3]
    assert (folder / "r/timeline.png").stat().st_size > 5000
    assert f"{summary['attainment']:.2%}" in told  # as planned
    known[-1] = "luck"
    assert "dispatch: 'luck' is not one of last_stage, finish" in paceline(folder, "plan", "fleet.yaml", *known, code=2)


def test_names_are_printed_as_they_are(folder):
    """Not as Rich's markup."""
    text = (folder / "fleet.yaml").read_text()
    for old, new in (("name: a,", "name: 'a[int8]',"), ("name: b,", "name: 'b[/x]',")):
        text = text.replace(old, new)
    (folder / "fleet.yaml").write_text(text)
    known = ["fleet.yaml", "--profile", "profile.json", "--trace", "t.csv"]
    tables = [paceline(folder, "trace", "make", "fleet.yaml", "--duration", "60", "--out", "t.csv")]
    tables.append(paceline(folder, "trace", "show", "t.csv"))
    tables.append(paceline(folder, "trace", "rescale", "t.csv", "--out", "more.csv"))
    tables.append(paceline(folder, "plan", *known, "--out", "p.json", "--effort", "20000"))
    tables.append(paceline(folder, "simulate", *known, "--placement", "p.json", "--out", "r"))
    few = command.paceline("plan", *known, "--effort", "2000", "--devices", "1", "--memory", "3GiB", cwd=folder)
    assert "not placed: " in few.stderr
    assert all("a[int8]" in table and "b[/x]" in table for table in [*tables, few.stdout + few.stderr])


def test_watching_survives_a_server_that_fails_and_says_what_would_change(folder, monkeypatch):
    rows = "".join(f"{0.05 * i:.3f},{'ab'[i % 2]},5,0\n" for i in range(80))
    trace = "arrival,model,prompt_tokens,output_tokens\n"
    alone = {"groups": [{"devices": [0], "parallel": {}, "models": ["a", "b", "c"]}]}
    answers = [(200, trace), (503, "")]  # of /trace, one after the other; None: there is no server

    class Server(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = {"/trace": answers.pop(0) if answers else (200, trace + rows), "/placement": placed}
            status, body = known[self.path]
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: object) -> None:
            pass

    def sleep(_: float) -> None:
        nonlocal placed
        slept.append(len(answers))
        if len(slept) == 3:
            placed = 200, (folder / "p.json").read_text()
        elif len(slept) == 4:
            raise SystemExit(0)

    placed, slept = (200, json.dumps(alone)), []
    clock = SimpleNamespace(sleep=sleep, perf_counter=time.perf_counter, process_time=time.process_time)
    monkeypatch.setattr("paceline.cli.plan.time", clock)
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        options = ["--profile", "profile.json", "--out", "p.json", "--effort", "20000", "--quiet", "--watch", url]
        done = command.paceline("plan", "fleet.yaml", *options, cwd=folder)
        server.shutdown()
    assert done.returncode == 0 and len(slept) == 4, done.stderr
    assert "0 requests so far" in done.stderr and "503" in done.stderr and "trying again in 60 s" in done.stderr
    assert "of what runs now, by these groups:" in done.stdout and "  - (1,1): a b c" in done.stdout
    assert "this is what runs now" in done.stdout.split("  - (1,1): a b c")[1]


def test_traces_are_described_and_rescaled(folder):
    paceline(folder, "trace", "make", "fleet.yaml", "--total-rate", "20", "--cv", "2", "--out", "t.csv")
    shown = paceline(folder, "trace", "show", "t.csv")
    assert "requests/s" in shown and "CV" in shown
    paceline(folder, "trace", "rescale", "t.csv", "--rate", "2", "--out", "more.csv")
    counts = [len((folder / name).read_text().splitlines()) for name in ("t.csv", "more.csv")]
    assert counts[1] == pytest.approx(2 * counts[0], rel=0.4)


def requests(path: Path) -> list[tuple[str, int, int]]:
    with path.open() as file:
        return [(row["model"], int(row["prompt_tokens"]), int(row["output_tokens"])) for row in csv.DictReader(file)]


def test_lengths_are_drawn_together_from_a_recording(folder):
    step = {"linear": [0.01] * 20, "emit": 0.0, "decode": 0.0, "decode_context": 0.0, "chunk": 0.0,
            "chunk_context": 0.0, "chunk_pair": 0.0}  # fmt: skip
    shapes = {"parallel": [{"stage_weight_bytes": [GIB]}], "step_time": step}
    (folder / "profile.json").write_text(json.dumps(profile({"small": 0.1}) | {"models": {
        **profile({"small": 0.1})["models"], "llm": shapes}}))  # fmt: skip
    (folder / "fleet.yaml").write_text(
        "models:\n  - {name: a, source: 'profile:llm', workload: {rate: 9.0}}\n"
        "  - {name: b, source: 'profile:small', workload: {rate: 9.0}}\n"
    )
    pairs = [(100, 7), (200, 3), (4000, 90)]
    rows = "".join(f"{i},x,{prompt},{output}\n" for i, (prompt, output) in enumerate(pairs))
    (folder / "lengths.csv").write_text("arrival,model,prompt_tokens,output_tokens\n" + rows)
    options = ["--lengths", "lengths.csv", "--duration", "30", "--out", "t.csv"]
    paceline(folder, "trace", "make", "fleet.yaml", *options)
    made = requests(folder / "t.csv")
    assert {(prompt, output) for model, prompt, output in made if model == "a"} == set(pairs)
    told = paceline(folder, "trace", "make", "fleet.yaml", "--recorded", "t.csv", *options, code=2)
    assert "recorded" in told and "--lengths" in told


def test_lengths_of_a_recording_are_those_of_models_that_generate(folder):
    """Models with a deadline are one-shot: they keep the prompts, and have no output."""
    (folder / "recorded.csv").write_text(
        "arrived_at,num_prefill_tokens,num_decode_tokens\n" + "".join(f"{i},{100 + i},{1 + i}\n" for i in range(50))
    )
    text = (folder / "fleet.yaml").read_text().replace("slo: {deadline: 1.5}, workload: {rate: 1", "workload: {rate: 4")
    (folder / "fleet.yaml").write_text(text)
    for option in ("--recorded", "--lengths"):
        paceline(folder, "trace", "make", "fleet.yaml", option, "recorded.csv", "--out", "t.csv")
        made = requests(folder / "t.csv")
        assert {model for model, _, _ in made} == {"a", "b", "c"}
        assert all(100 <= prompt < 150 and output == (prompt - 99) * (model == "c") for model, prompt, output in made)


@pytest.mark.slow
def test_models_of_a_full_device_come_from_host_memory(folder):
    fleet = (folder / "fleet.yaml").read_text().replace("rate: 4.0, cv: 3.0", "rate: 0.2")
    full = fleet.replace("devices: 4, memory: 5GiB", "devices: 1, memory: 3GiB")
    for text, served in ((full, False), (full.replace("3GiB", "3GiB, load_bandwidth: 40GiB"), True)):
        (folder / "fleet.yaml").write_text(text)
        options = ["--profile", "profile.json", "--out", "p.json", "--duration", "60", "--effort", "20000", "--quiet"]
        paceline(folder, "plan", "fleet.yaml", *options)
        placed = {model for group in json.loads((folder / "p.json").read_text())["groups"] for model in group["models"]}
        assert (placed == {"a", "b", "c"}) == served
    paceline(folder, "trace", "make", "fleet.yaml", "--duration", "60", "--out", "t.csv")
    paceline(folder, "simulate", "fleet.yaml", "--profile", "profile.json", "--placement", "p.json", "--trace", "t.csv",
             "--out", "r")  # fmt: skip
    assert json.loads((folder / "r/report.json").read_text())["attainment"] > 0.7
    (folder / "fleet.yaml").write_text(full.replace("3GiB", "3GiB, load_bandwidth: fast"))
    assert "load_bandwidth: 'fast' is not a size" in paceline(folder, "plan", "fleet.yaml", *options, code=2)


def test_one_shot_models_have_no_output_and_recordings_are_a_models_own(folder):
    (folder / "more.csv").write_text(
        "arrival,model,prompt_tokens,output_tokens\n" + "".join(f"{i},{'ab'[i % 3 == 0]},5,0\n" for i in range(30))
    )
    text = (folder / "fleet.yaml").read_text()
    for rate in ("rate: 4.0, cv: 3.0", "rate: 2.0, cv: 3.0"):
        text = text.replace(rate, "trace: more.csv")
    (folder / "fleet.yaml").write_text(text)
    paceline(folder, "trace", "make", "fleet.yaml", "--duration", "100", "--out", "t.csv")
    with (folder / "t.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["output_tokens"] for row in rows} == {"0"}
    assert [sum(row["model"] == name for row in rows) for name in "ab"] == [20, 10]
    assert sum(row["model"] == "c" for row in rows) > 50


def edited(folder: Path, old: str, new: str) -> list[str]:
    text = (folder / "fleet.yaml").read_text()
    assert old in text
    (folder / "fleet.yaml").write_text(text.replace(old, new))
    return ["plan", "fleet.yaml", "--profile", "profile.json"]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("memory: 5GiB", "memory: 900MiB", "memory: 'a' fits nowhere on 4 devices with 0.88 GiB"),
        ("rate: 4.0", "rate: .inf", "workload.rate: Input should be a finite number"),
        ("rate: 4.0", "rate: 4.0, trace: t.csv", "workload: Value error, rate and trace: one of them"),
        ("rate: 4.0", "rate: 4.0, acceptance: 0.5", "workload.acceptance: is only allowed with a speculation.drafter"),
        ("rate: 4.0, cv: 3.0}", "acceptance: 0.5}, speculation: {drafter: ngram}", "'a' is one-shot, and drafts noth"),
        ("rate: 4.0", "rate: -4.0", "workload.rate: Input should be greater than or equal to 0"),
        ("deadline: 1.5", "deadline: 0.1", "slo.deadline: 'c' takes 0.1575 s in its fastest shape that fits"),
        ("profile:large", "profile:huge", "model 'c': no 'huge' in a profile; it has small, large"),
        ("devices: 4", "devices: 0", "cluster.devices: "),
        ("devices: 4", "device: 4", "cluster.device: unknown key; did you mean 'devices'"),
        ("devices: 4", "devices: 99999999999", "devices: 99999999999 are more than the 65536"),
        ("memory: 5GiB", "memory: lots", "memory: 'lots' is not a size"),
    ],
)
def test_mistakes_in_a_fleet_to_plan(folder, old, new, words):
    assert words in paceline(folder, *edited(folder, old, new), code=2)


def test_what_cannot_be_written_is_told_before_it_is_planned(folder, monkeypatch):
    monkeypatch.setattr("paceline.cli.plan.make", None)
    assert "out: .: cannot be written to" in paceline(folder, "plan", "fleet.yaml", "--out", ".", code=2)
    (folder / "p.json").touch()
    monkeypatch.setattr("os.access", lambda path, mode: mode != os.W_OK or Path(path).name != "p.json")
    assert "out: p.json: cannot be written to" in paceline(folder, "plan", "fleet.yaml", "--out", "p.json", code=2)


def test_a_file_that_fails_meanwhile_is_one_line(folder, monkeypatch):
    def save(trace, path) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr("paceline.workload.trace.Trace.save", save)
    told = paceline(folder, "trace", "make", "fleet.yaml", "--out", "t.csv", code=1)
    assert told == "paceline: t.csv: No space left on device\n"


def test_what_cannot_be_printed(folder):
    """A full disk is one line, a letter that the locale does not have a question mark."""
    (folder / "t.csv").write_text("arrival,model,prompt_tokens,output_tokens\n0,é,1,0\n", encoding="utf-8")
    command = [sys.executable, "-m", "paceline.cli.main", "trace", "show", "t.csv"]
    usual = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=folder, env=usual)
    assert (done.returncode, done.stderr) == (1, "paceline: No space left on device\n")
    ascii_only = usual | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=ascii_only)
    assert (done.returncode, done.stderr) == (0, "") and "\n?  " in done.stdout


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("t.csv", "arrival,model,prompt_tokens,output_tokens\n1,x,1,0\n", "trace: model 'x' is not in the fleet"),
        ("p.json", '{"groups": [{"devices": [0], "parallel": {}, "models": ["x"]}]}', "groups.0.models: no model 'x'"),
        ("p.json", '{"groups": [{"devices": [-3], "parallel": {}, "models": []}]}', "groups.0.devices: -3 is not at"),
        ("p.json", '{"groups": [{"devices": [9], "parallel": {}, "models": ["a"]}]}', "device 9 is not one of"),
        ("p.json", '{"groups": [{"devices": [0], "parallel": {}, "models": ["a", "b", "c"]}]}', "weights are more"),
        ("p.json", '{"groups": [{"devices": [0], "shape": 3}]}', "placement: p.json: Object contains unknown field"),
    ],
)
def test_mistakes_in_what_is_simulated(folder, name, text, words):
    (folder / "t.csv").write_text("arrival,model,prompt_tokens,output_tokens\n1,a,1,0\n")
    (folder / "p.json").write_text('{"groups": [{"devices": [0], "parallel": {}, "models": ["a"]}]}')
    (folder / name).write_text(text)
    arguments = ["--profile", "profile.json", "--placement", "p.json", "--trace", "t.csv", "--out", "r"]
    assert words in paceline(folder, "simulate", "fleet.yaml", *arguments, code=2)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("p.json", '{"groups": [{"devices": [0], "parallel": {}, "models": ["\xe9"]}]}'),
        ("profile.json", '{"models": {}, "device": "\xe9"}'),
    ],
)
def test_a_file_in_another_encoding_is_named(folder, name, text):
    (folder / "p.json").write_text('{"groups": [{"devices": [0], "parallel": {}, "models": ["a"]}]}')
    (folder / name).write_bytes(text.encode("latin-1"))
    arguments = ["--profile", "profile.json", "--placement", "p.json", "--trace", "t.csv", "--out", "r"]
    assert name in paceline(folder, "simulate", "fleet.yaml", *arguments, code=2)


def test_models_with_steps_are_planned_by_simulating_them(folder):
    step = {"linear": [0.01 + 1e-5 * n for n in range(300)], "emit": 0.0, "decode": 0.0, "decode_context": 0.0,
            "chunk": 0.0, "chunk_context": 0.0, "chunk_pair": 0.0}  # fmt: skip
    entry = {"parallel": [{"stage_weight_bytes": [GIB]}], "step_time": step, "roofline": {"kv_bytes": 1000}}
    (folder / "profile.json").write_text(json.dumps({"models": {"llm": entry}}))
    (folder / "fleet.yaml").write_text(
        "models:\n  - {name: a, source: 'profile:llm', slo: {ttft: 0.3, tbt: 0.05}, workload: {rate: 2.0, cv: 2.0}}\n"
        "  - {name: b, source: 'profile:llm', slo: {ttft: 0.3, tbt: 0.05}, workload: {rate: 2.0, cv: 2.0}}\n"
        "cluster: {devices: 1, memory: 1GiB}\n"
    )
    instead = ("--devices", "2", "--memory", "3GiB")
    told = paceline(folder, "plan", "fleet.yaml", "--profile", "profile.json", "--out", "p.json", "--duration", "15",
                    "--seeds", "1", "--quiet", *instead)  # fmt: skip
    assert "100.00%" in told
    fleet = fleet_file.load(folder / "fleet.yaml")
    known = planned(fleet, folder / "profile.json")
    trace = traffic(fleet, known, None, 15.0, 0)
    assert known.stepwise and set(trace.outputs) == {64}
    narrow = paceline(folder, "plan", "fleet.yaml", "--profile", "profile.json", "--duration", "15", "--seeds", "1",
                      "--quiet", *instead, "--token-budget", "2")  # fmt: skip
    assert "100.00%" not in narrow, "256 tokens of a prompt take 128 steps of 10 ms"
    assert load_placement(folder / "p.json").hosts("a")


def test_a_fleet_of_encoders_is_simulated_as_it_is_served(folder):
    """By steps, with texts as long as they are; not as AlpaServe's models, which have one latency each."""
    lengths = {"16": {"1": [0.02]}, "256": {"1": [0.1]}}
    shape = {"stage_weight_bytes": [GIB], "stage_latency": {"1": [0.1]}, "prompt_tokens": 256, "by_length": lengths}
    (folder / "profile.json").write_text(json.dumps({"models": {"bert": {"parallel": [shape]}}}))
    (folder / "fleet.yaml").write_text(
        "models: [{name: a, source: 'profile:bert', slo: {deadline: 1.0}, workload: {rate: 1.0}}]\n"
        "cluster: {devices: 1, memory: 2GiB}\n"
    )
    (folder / "p.json").write_text('{"groups": [{"devices": [0], "parallel": {}, "models": ["a"]}]}')
    (folder / "t.csv").write_text("arrival,model,prompt_tokens,output_tokens\n0,a,16,0\n1,a,256,0\n2,a,136,0\n")
    paceline(folder, "simulate", "fleet.yaml", "--profile", "profile.json", "--placement", "p.json", "--trace", "t.csv",
             "--out", "r")  # fmt: skip
    rows = [*csv.DictReader((folder / "r/requests.csv").read_text().splitlines())]
    took = [float(row["finish"]) - float(row["arrival"]) for row in rows]
    assert took == pytest.approx([0.02, 0.1, 0.06], abs=1e-3)


def test_steps_are_simulated_by_the_policy_and_as_wide_as_asked_for(folder):
    """A long prompt beside a decode: whole it stalls the decode once, in narrow chunks never for long."""
    linear, zero = (
        [0.01 + 1e-4 * n for n in range(600)],
        dict.fromkeys(("emit", "decode", "decode_context", "chunk", "chunk_context", "chunk_pair"), 0.0),
    )
    entry = {"parallel": [{"stage_weight_bytes": [GIB]}], "step_time": {"linear": linear, **zero}}
    (folder / "profile.json").write_text(json.dumps({"models": {"llm": entry}}))
    (folder / "fleet.yaml").write_text(
        "models: [{name: a, source: 'profile:llm'}]\ncluster: {devices: 1, memory: 5GiB}\n"
    )
    (folder / "p.json").write_text('{"groups": [{"devices": [0], "parallel": {}, "models": ["a"]}]}')
    (folder / "t.csv").write_text("arrival,model,prompt_tokens,output_tokens\n0,a,10,20\n0.05,a,500,2\n")
    arguments = ["--profile", "profile.json", "--placement", "p.json", "--trace", "t.csv", "--out", "r"]

    def slowest(*options: str) -> float:
        paceline(folder, "simulate", "fleet.yaml", *arguments, *options)
        return json.loads((folder / "r/report.json").read_text())["tbt"]["p99"]

    narrow, narrower = slowest("--token-budget", "64"), slowest("--token-budget", "8")
    assert slowest("--policy", "orca") > 0.05 > 0.018 > narrow > narrower
    assert slowest("--policy", "vllm", "--token-budget", "64") == slowest("--policy", "prefill_first")


@pytest.mark.parametrize("command", ["simulate", "plan"])
def test_a_policy_that_nobody_knows_is_told_with_those_that_are(folder, command):
    files = ["--placement", "p.json", "--trace", "t.csv", "--out", "r"] if command == "simulate" else []
    (folder / "p.json").write_text('{"groups": [{"devices": [0], "parallel": {}, "models": ["a"]}]}')
    told = paceline(folder, command, "fleet.yaml", "--profile", "profile.json", *files, "--policy", "fastest", code=2)
    assert "policy: 'fastest' is not one of chunked_prefill_only, ft," in told and not (folder / "r").exists()


def test_drafts_are_simulated_where_the_workload_says_how_good_they_are(folder):
    step = {"linear": [0.0, *(0.01 + 1e-5 * n for n in range(300))], "emit": 0.0, "decode": 0.0, "decode_context": 0.0,
            "chunk": 0.0, "chunk_context": 0.0, "chunk_pair": 0.0}  # fmt: skip
    entry = {"parallel": [{"stage_weight_bytes": [GIB]}], "step_time": step, "roofline": {"kv_bytes": 1000}}
    (folder / "profile.json").write_text(json.dumps({"models": {"llm": entry}}))
    (folder / "p.json").write_text('{"groups": [{"devices": [0], "parallel": {}, "models": ["a"]}]}')
    (folder / "t.csv").write_text(
        "arrival,model,prompt_tokens,output_tokens\n" + "".join(f"{2 * i},a,50,101\n" for i in range(20))
    )
    arguments = ["--profile", "profile.json", "--placement", "p.json", "--trace", "t.csv", "--out", "r"]

    def latency(workload: str) -> float:
        model = f"{{name: a, source: 'profile:llm', workload: {{{workload}}}, speculation: {{drafter: ngram}}}}"
        (folder / "fleet.yaml").write_text(f"models: [{model}]\ncluster: {{devices: 1, memory: 2GiB}}\n")
        paceline(folder, "simulate", "fleet.yaml", *arguments)
        return json.loads((folder / "r/report.json").read_text())["latency"]["p50"]

    alone = latency("rate: 1.0")
    assert latency("acceptance: 1.0") < alone / 4, "five tokens a step, but the last"
    assert latency("acceptance: 0.0") < alone * 1.02, "it finds out that drafts do not pay"


@pytest.mark.parametrize(
    ("quantization", "kv_cache_dtype", "held", "options"),
    [
        ("int8", "auto", "float16", " --quantization int8"),
        ("int8", "float32", "float32", " --quantization int8 --kv-cache-dtype float32"),
        ("none", "float16", "float16", " --kv-cache-dtype float16"),
    ],
)
def test_a_simulated_draft_model_takes_its_time_and_memory(
    folder, monkeypatch, quantization, kv_cache_dtype, held, options
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    checkpoints.save("llama2", folder / "draft")
    step = StepTime((0.0, *(0.01 + 1e-5 * n for n in range(300))), 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    entry = {"parallel": [{"stage_weight_bytes": [GIB], "working_bytes": GIB}], "step_time": asdict(step)}
    (folder / "profile.json").write_text(json.dumps({"models": {"llm": entry}}))
    drafter = f"speculation: {{drafter: {folder / 'draft'}, max_draft_tokens: 3, quantization: {quantization}}}"
    own = f"kv_cache_dtype: {kv_cache_dtype}, workload: {{rate: 1.0, acceptance: 0.8}}"
    model = f"{{name: a, source: 'profile:llm', {own}, {drafter}}}"
    (folder / "fleet.yaml").write_text(f"models: [{model}]\ncluster: {{devices: 2, memory: 4GiB}}\n")
    fleet = fleet_file.load(folder / "fleet.yaml")
    with pytest.raises(ValueError, match=f"speculation.drafter: .*/draft has no profile .*/draft{options}` first"):
        planned(fleet, folder / "profile.json")
    small, none = StepTime((0.0, 0.001), 0.0, 2e-5, 3e-9, 0.0, 0.0, 0.0), Percentiles(0.0, 0.0)
    floor = Roofline(64, 1, 1, 1, 8, 1e9, 1e9)
    known = Profile(small, ((1, 1),), (), 1, none, none, {1: 0.001}, floor)
    device = profile_cache.Device.here(profile_cache.threads_of(2), kv_cache_dtype=kv_cache_dtype)
    profile_cache.save(profile_cache.cache_file(folder / "draft", quantization, device), "draft", known, device)
    (model,) = planned(fleet, folder / "profile.json").models
    assert model.drafts == SimulatedDrafts(3, 0.8, Costs((0.0, 0.001), 2e-5, 3e-9))
    stages = {str(p): shape.stage_weight_bytes for p, shape in model.table.shapes.items() if p.devices <= 2}
    config = ModelConfig.load(folder / "draft")
    weight = config.weight_bytes(quantization) + config.table_bytes
    assert stages == {"(1,1)": (GIB + weight,), "(2,1)": (GIB // 2 + weight, GIB // 2)}
    assert set(model.draft_kv_bytes.values()) == {config.kv_bytes_per_token(held)}
    assert model.share(Parallel(2)) == 0.5
    assert model.table.shapes[Parallel(2)].working_bytes == GIB


def test_memory_of_drafters_is_planned_whether_or_not_they_are_simulated(folder):
    """Of a group of several devices the first holds layers and head to exit early; one has them anyway."""
    checkpoints.save("llama2", folder / "llm")
    step = StepTime((0.0, *(0.01 + 1e-5 * n for n in range(300))), 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    entry = {"parallel": [{"stage_weight_bytes": [GIB]}], "step_time": asdict(step)}
    (folder / "profile.json").write_text(json.dumps({"models": {"a": entry}}))

    def memory(drafter: str) -> tuple[dict[str, int], dict[str, int]]:
        model = f"{{name: a, source: {folder / 'llm'}, workload: {{rate: 1.0}}, speculation: {{drafter: {drafter}}}}}"
        (folder / "fleet.yaml").write_text(f"models: [{model}]\ncluster: {{devices: 2, memory: 4GiB}}\n")
        (found,) = planned(fleet_file.load(folder / "fleet.yaml"), folder / "profile.json").models
        shapes = found.table.shapes.items()
        more = {str(p): sum(shape.stage_weight_bytes) - GIB for p, shape in shapes if p.devices <= 2}
        return more, {str(p): size for p, size in found.draft_kv_bytes.items() if p.devices <= 2}

    config = ModelConfig.load(folder / "llm")
    target = folder / "llm"

    def held(parallel: Parallel, **drafts: str) -> int:
        """As the engine counts it."""
        return weight_bytes(target, Place(parallel), **drafts) - weight_bytes(target, Place(parallel))

    whole = held(Parallel(), drafter=str(target), draft_quantization="int8")
    part = held(Parallel(2), drafter="early_exit", early_exit_layers=1)
    assert whole == config.weight_bytes("int8") + config.table_bytes > config.weight_bytes("int8")
    assert memory("ngram") == ({"(1,1)": 0, "(2,1)": 0}, {})
    assert memory("early_exit") == ({"(1,1)": 0, "(2,1)": part}, {"(2,1)": config.first(1).kv_bytes_per_token()})
    kv_bytes = config.kv_bytes_per_token("float16")
    assert memory(str(folder / "llm")) == ({"(1,1)": whole, "(2,1)": whole}, {"(1,1)": kv_bytes, "(2,1)": kv_bytes})


def test_steps_take_memory_of_models_that_generate_too(folder):
    """What a plan leaves room for is what a simulation then needs."""
    step = {"linear": [0.01] * 300, "emit": 0.0, "decode": 0.0, "decode_context": 0.0, "chunk": 0.0,
            "chunk_context": 0.0, "chunk_pair": 0.0}  # fmt: skip

    def entry(weight: float, working: float) -> dict:
        sizes = {"stage_weight_bytes": [int(weight * GIB)], "working_bytes": int(working * GIB)}
        return {"parallel": [sizes], "step_time": step, "roofline": {"kv_bytes": 1000}}

    (folder / "profile.json").write_text(json.dumps({"models": {"x": entry(1.0, 1.5), "y": entry(1.0, 0.1)}}))
    (folder / "fleet.yaml").write_text(
        "models:\n  - {name: a, source: 'profile:x', slo: {ttft: 1.0}, workload: {rate: 1.0, output_tokens: 4}}\n"
        "  - {name: b, source: 'profile:y', slo: {ttft: 1.0}, workload: {rate: 0.0}}\n"
        "cluster: {devices: 1, memory: 4GiB}\n"
    )
    file = fleet_file.load(folder / "fleet.yaml")
    known = planned(file, folder / "profile.json")
    trace = traffic(file, known, None, 10.0, 0)
    problem = known.problem(trace)
    choice = search(problem, effort=1000)
    assert problem.placement(choice.shape, choice.member).groups[0].models == ("a",)
    assert choice.outcome.attainment == 1.0


def test_profile_sources_are_not_served(folder):
    assert "can be planned, not served" in paceline(folder, "serve", "fleet.yaml", code=2)


@pytest.mark.parametrize(
    ("quantization", "held", "dtype"),
    [("none", "none", torch.float32), ("int8", "int8", torch.float32), ("none", KEPT_BFLOAT16, torch.bfloat16)],
)
def test_stages_hold_all_experts_and_compute_some(tmp_path, quantization, held, dtype):
    """A checkpoint in bfloat16 stays it, where a processor has instructions enough to read it."""
    checkpoints.save("qwen3-moe-every-other", tmp_path, dtype)
    config, held = ModelConfig.load(tmp_path), held if HAS_TILES else quantization
    entry = fleet_file.Entry(name="a", source=str(tmp_path), quantization=quantization)
    shapes = _from_config(entry, tmp_path, 0).shapes
    rows = config.vocab_size
    head = {"none": 4, KEPT_BFLOAT16: 2, "int8": 1}[held] * rows * config.hidden + 8 * rows * (held == "int8")
    dense, sparse, after = (config.layer_bytes(layer, held) for layer in range(3))
    assert head + dense + sparse + after == config.weight_bytes(held) - 4 * config.hidden
    assert shapes[Parallel()].stage_weight_bytes == (config.table_bytes + head + dense + sparse + after,)
    (seconds,) = shapes[Parallel()].stage_latency[1]
    idle = config.layer_bytes(1, held, 2) - config.layer_bytes(1, held, 0)  # 4 of 6 work
    assert dense == after and seconds == head + 2 * dense + sparse - idle


def test_models_of_both_kinds_get_devices_though_their_latencies_are_alike(folder):
    """No group has both; without a split by kind the one-shot models take all groups before the other one comes."""
    known = profile({"small": 0.02})
    known["models"]["llm"] = known["models"]["small"] | {"step_time": asdict(StepTime((0.01,) * 300, *[0.0] * 6))}
    (folder / "profile.json").write_text(json.dumps(known))
    (folder / "fleet.yaml").write_text(
        "models:\n  - {name: a, source: 'profile:small', slo: {deadline: 1.0}, workload: {rate: 4.0}}\n"
        "  - {name: b, source: 'profile:small', slo: {deadline: 1.0}, workload: {rate: 4.0}}\n"
        "  - {name: c, source: 'profile:llm', slo: {ttft: 1.0}, workload: {rate: 1.0, output_tokens: 8}}\n"
        "cluster: {devices: 2, memory: 16GiB}\n"
    )
    file = fleet_file.load(folder / "fleet.yaml")
    groups = plan(file, planned(file, folder / "profile.json")).groups
    assert sorted(group.models for group in groups) == [("a", "b"), ("c",)]


def test_a_cell_is_planned_for_its_own_requests(folder):
    """Of a model in two cells each has half of the requests, and what was met is counted of those, whatever the kind
    of the models beside it."""
    step, known = StepTime(tuple(0.01 + 1e-4 * n for n in range(300)), 0.0, 1e-3, *[0.0] * 4), profile({"small": 0.02})
    known["models"]["llm"] = {"parallel": [{"stage_weight_bytes": [GIB]}], "step_time": asdict(step)}
    (folder / "profile.json").write_text(json.dumps(known))
    (folder / "fleet.yaml").write_text(
        "models:\n"
        "  - {name: a, source: 'profile:llm', slo: {ttft: 0.1}, workload: {rate: 90, output_tokens: 8}}\n"
        "  - {name: b, source: 'profile:llm', slo: {ttft: 0.1}, workload: {rate: 10, output_tokens: 8}}\n"
        "  - {name: c, source: 'profile:small', slo: {deadline: 1.0}, workload: {rate: 10}}\n"
        "cluster: {devices: 128, memory: 3GiB}\n"
    )
    file = fleet_file.load(folder / "fleet.yaml")
    fleet = planned(file, folder / "profile.json")
    problem = fleet.problem(traffic(file, fleet, None, 10.0, 0))
    cells = split_cells(problem)
    assert sum(mine[problem.models == 0].any() for mine, _ in cells) == 2
    for mine, devices in cells:
        some = part(problem, np.unique(problem.models[mine]), devices, mine)
        outcome = uniform(some, some.shapes.index(Parallel())).outcome
        assert (outcome.bad >= 0).all() and outcome.good.sum() > 0 and outcome.requests.sum() == mine.sum()
    assert search(problem, effort=4 * len(problem.times)).outcome.attainment > 0.9


@pytest.mark.parametrize(
    ("source", "pipelines"),
    [("builtin:coder", {1, 2, 4}), ("profile:llm", {1, 2, 4, 8, 16}), ("/nowhere/llm", {1, 2, 4, 8, 16})],
)
def test_a_model_is_cut_into_no_more_stages_than_its_files_can_be(folder, source, pipelines):
    """Four layers, embedding and head; of a model that is known by its profile alone nobody knows."""
    entry = {"parallel": [{"stage_weight_bytes": [GIB]}], "step_time": asdict(StepTime((0.0, 0.01), *[0.0] * 6))}
    (folder / "profile.json").write_text(json.dumps({"models": {"llm": entry}}))
    (folder / "fleet.yaml").write_text(f"models: [{{name: llm, source: '{source}'}}]\ncluster: {{devices: 16}}\n")
    (model,) = planned(fleet_file.load(folder / "fleet.yaml"), folder / "profile.json").models
    assert {parallel.pipeline for parallel in model.table.shapes} == pipelines


@pytest.mark.parametrize(("rate", "duration"), [("0.00001", None), ("0.2", "5")])
def test_models_that_are_rarely_used_are_planned_for(folder, rate, duration):
    """Traffic is as long as requests take to come; other seeds may have none in a duration that was asked for."""
    step = StepTime(tuple(0.01 + 1e-5 * n for n in range(300)), *[0.0] * 6)
    entry = {"parallel": [{"stage_weight_bytes": [GIB]}], "step_time": asdict(step)}
    (folder / "profile.json").write_text(json.dumps({"models": {"llm": entry}}))
    (folder / "fleet.yaml").write_text(
        f"models: [{{name: a, source: 'profile:llm', slo: {{ttft: 1.0}}, workload: {{rate: {rate}}}}}]\n"
        "cluster: {memory: 3GiB}\n"
    )
    options = ["--profile", "profile.json", "--effort", "0", *(["--duration", duration] if duration else [])]
    told = paceline(folder, "plan", "fleet.yaml", *options, "--seeds", "8")
    assert told.count("100.00% ± 0.00%") == 2
    if duration:
        told = paceline(folder, "plan", "fleet.yaml", *options[:-1], "1", code=2)
        assert "duration: has no requests, and there is nothing to plan for" in told
    else:
        file = fleet_file.load(folder / "fleet.yaml")
        assert plan(file, planned(file, folder / "profile.json")).hosts("a")


@pytest.mark.parametrize("sizes", [[2.5], [2.6], [1.2, 1.2], [1.5, 1.5], [1.0, 0.9, 0.6], [1.0, 0.9, 0.7]])
def test_a_device_holds_in_plans_and_simulations_what_it_holds_when_served(folder, sizes):
    """Beside the worker's own memory and what is for keys and values; here of models with next to none."""
    step = asdict(StepTime((0.0, *(0.01 + 1e-5 * n for n in range(300))), *[0.0] * 6))
    names = "abc"[: len(sizes)]
    known = {
        name: {"parallel": [{"stage_weight_bytes": [size * GIB]}], "step_time": step}
        for name, size in zip(names, sizes, strict=True)
    }
    (folder / "profile.json").write_text(json.dumps({"models": known}))
    models = "".join(f"  - {{name: {name}, source: 'profile:{name}', workload: {{rate: 1.0}}}}\n" for name in names)
    (folder / "fleet.yaml").write_text(f"models:\n{models}cluster: {{devices: 1, memory: 4GiB}}\n")
    (folder / "p.json").write_text(json.dumps({"groups": [{"devices": [0], "parallel": {}, "models": list(names)}]}))
    (folder / "t.csv").write_text("arrival,model,prompt_tokens,output_tokens\n0,a,9,2\n")
    try:
        held = held_of([size * GIB for size in sizes], 4 * GIB) is None
    except ValueError:
        held = False
    file = fleet_file.load(folder / "fleet.yaml")
    fleet = planned(file, folder / "profile.json")
    problem = fleet.problem(traffic(file, fleet, None, 10.0, 0))
    assert problem.fits(np.zeros(1, np.int64), np.ones((1, len(sizes)), bool)) == held
    options = ["--profile", "profile.json", "--placement", "p.json", "--trace", "t.csv", "--out", "r"]
    told = paceline(folder, "simulate", "fleet.yaml", *options, code=0 if held else 2)
    assert held or "25% for keys and values" in told
