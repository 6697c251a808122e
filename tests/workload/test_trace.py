"""Trace files: what is written is read; mistakes are named with their row."""

import numpy as np
import pytest

from paceline.workload.arrivals import gamma, rate_and_cv
from paceline.workload.trace import Trace, joint_lengths, load, spread
from tests.reference import root


def made() -> Trace:
    streams = {"a": gamma(5, 2, 20, 1), "b": gamma(2, 1, 20, 2)}
    return Trace.of(streams, lambda name, count: ([10 + len(name)] * count, range(count)))


def test_what_is_written_is_read(tmp_path):
    trace, path = made(), tmp_path / "trace.csv"
    trace.save(path)
    again = load(path)
    columns = ("arrivals", "models", "prompts", "outputs")
    assert all((getattr(trace, name) == getattr(again.named(trace.names), name)).all() for name in columns)
    assert path.read_text().splitlines()[0] == "arrival,model,prompt_tokens,output_tokens"


def test_more_columns_and_any_order_are_allowed(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("user,output_tokens,model,arrival,prompt_tokens\nx,3,b,2.5,7\n\ny,4,a,1,8\n")
    trace = load(path)
    assert trace.arrivals.tolist() == [1, 2.5] and [trace.names[m] for m in trace.models] == ["a", "b"]
    assert trace.prompts.tolist() == [8, 7] and trace.outputs.tolist() == [4, 3]


def test_a_file_of_a_spreadsheet(tmp_path):
    path = tmp_path / "t.csv"
    path.write_bytes("\ufeffarrival,model,prompt_tokens,output_tokens\r\n1,\"a\",2,3\r\n".encode())
    assert load(path).describe()[0][:2] == ("a", 1)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("arrival,model,prompt_tokens\n", "no column 'output_tokens'; needed are arrival, model"),
        ("", "no column 'arrival'"),
        ("arrival,model,prompt_tokens,output_tokens\n1,a,2,3\n2,a,x,3\n", "row 3: prompt_tokens 'x' is not a whole"),
        ("\narrival,model,prompt_tokens,output_tokens\n1,a,2,3\n\n\n2,a,3.0,3\n", "row 6: prompt_tokens '3.0' is"),
        ("arrival, model, prompt_tokens, output_tokens\n", "no column 'model'; .*there are 'arrival', ' model', "),
        ("arrival,model,prompt_tokens,output_tokens\n-1,a,2,3\n", "row 2: arrival '-1' is not at least 0"),
        ("arrival,model,prompt_tokens,output_tokens\nnan,a,2,3\n", "row 2: arrival 'nan' is not at least 0"),
        ("arrival,model,prompt_tokens,output_tokens\n1,a,2\n", "row 2 has no 'output_tokens'"),
    ],
)
def test_mistakes_are_named(tmp_path, text, words):
    path = tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=words) as error:
        load(path)
    assert "\n" not in str(error.value) and "t.csv" in str(error.value)


def test_a_model_that_the_fleet_does_not_have_is_named():
    with pytest.raises(ValueError, match="model 'b' is not in the fleet; it has a, c"):
        made().named(["a", "c"])


def test_lengths_are_drawn_in_pairs():
    pairs = [(100, 1), (7, 900)]
    prompts, outputs = joint_lengths(pairs, 3)("a", 500)
    assert set(zip(prompts.tolist(), outputs.tolist(), strict=True)) == set(pairs)


def recording(*arrivals: float) -> Trace:
    count = len(arrivals)
    lengths = np.full(count, 5)
    return Trace(np.array(arrivals), np.zeros(count, np.int32), lengths, lengths, ("service",))


def test_a_recording_that_begins_late_has_the_rate_that_is_asked_for():
    for times in ((1000.0, 1001.0), (1000.0, 1000.5, 1002.0)):
        assert len(spread(recording(*times), ["a"], [1.0], 300.0, seed=0)) == pytest.approx(300, abs=2)
    with pytest.raises(ValueError, match="two requests at different times"):
        spread(recording(5.0, 5.0, 5.0), ["a"], [1.0], 10.0, seed=0)


@pytest.mark.skipif(not (root() / "sarathi/traces").is_dir(), reason="the Azure traces are not here")
def test_the_azure_traces_become_traces_of_several_models():
    recorded = load(root() / "sarathi/traces/azure_2023_conv.csv", "service")
    assert recorded.names == ("service",) and len(recorded) > 5000 and recorded.prompts[0] == 374
    trace = spread(recorded, ["a", "b"], [8.0, 2.0], 200.0, seed=5)
    shares = np.bincount(trace.models)
    assert shares[0] / shares[1] == pytest.approx(4, rel=0.25) and 190 < trace.arrivals[-1] < 200
    _, burstiness = rate_and_cv(recorded.arrivals)
    assert rate_and_cv(trace.arrivals[trace.models == 0])[1] == pytest.approx(burstiness, rel=0.3)
    known = set(zip(recorded.prompts.tolist(), recorded.outputs.tolist(), strict=True))
    assert set(zip(trace.prompts.tolist(), trace.outputs.tolist(), strict=True)) <= known
    with pytest.raises(ValueError, match="two requests"):
        spread(recorded.between(0, 0), ["a"], [1.0], 10, 0)
