"""lm-eval's `local-completions`, offline: the tokenizer comes from /tokenizer_info, scores from echo with logprobs."""

import json
import subprocess
import sys

import pytest

from paceline.engine.tokenizer import Tokenizer
from tests.server.conftest import in_thread

SCRIPT = """
import json, sys
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI
url, pairs = sys.argv[1], json.loads(sys.argv[2])
model = LocalCompletionsAPI(base_url=url + "/v1/completions", model="tiny", batch_size=2, max_length=200)
assert model.tokenizer_backend == "remote"
scores = model.loglikelihood([Instance("loglikelihood", {}, tuple(pair), i) for i, pair in enumerate(pairs)])
texts = model.generate_until([Instance("generate_until", {}, ("hello", {"until": ["e"], "max_gen_toks": 9}), 0)])
print(json.dumps([scores, texts]))
"""


@pytest.mark.clients
def test_scores_are_those_of_the_engine(tokenizer: Tokenizer) -> None:
    pairs = [("hello", " name"), ("the quick", " brown fox")]
    with in_thread(tokenizer) as server:
        command = [sys.executable, "-c", SCRIPT, server.url, json.dumps(pairs)]
        run = subprocess.run(command, capture_output=True, text=True, timeout=100)
        assert run.returncode == 0, run.stderr[-3000:]
        scores, texts = json.loads(run.stdout.splitlines()[-1])
        for (context, continuation), (score, greedy) in zip(pairs, scores, strict=True):
            start = len(tokenizer.encode(context, False))
            tokens = tokenizer.encode(context + continuation, False)[start:]
            assert score == pytest.approx(sum(server.fleet.logprob(token, 1).logprob for token in tokens))
            assert greedy is False
        assert len(texts) == 1 and "e" not in texts[0]
