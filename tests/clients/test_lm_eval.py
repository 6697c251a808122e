"""lm-eval's `local-completions` against the real server, offline: what it computes equals what the model computes."""

import pytest

from tests.system.conftest import server  # noqa: F401

pytestmark = pytest.mark.clients


@pytest.mark.filterwarnings("ignore")
def test_local_completions_scores_text(server):  # noqa: F811
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    model = LocalCompletionsAPI(
        model="coder",
        base_url=server.url + "/v1/completions",
        tokenizer_backend="remote",
        max_retries=1,
        num_concurrent=1,
    )
    pairs = [("import ", "os\n"), ("import ", "zzqy\n"), ("def f(x):\n    ", "return x\n")]
    instances = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
    scores = model.loglikelihood(instances)
    assert scores[0][0] > scores[1][0], "real code is likelier than noise"
    assert all(score < 0 for score, _ in scores)
    options = {"until": ["\n\n"], "max_gen_toks": 16, "temperature": 0}
    generated = model.generate_until([Instance("generate_until", {}, ("def add(a, b):\n", options), 0)])
    assert isinstance(generated[0], str)
