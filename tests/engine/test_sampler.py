"""The sampler against a slow float64 reference, on both backends; its randomness by joint chi-square tests."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.request import SamplingParams
from paceline.engine import keyed_random, sample_kernels, sampler
from paceline.engine.sampler import SamplingState, draw, prompt_logprobs, sample, to_log_probs

MASK32, MASK64 = (1 << 32) - 1, (1 << 64) - 1


@pytest.fixture(params=["kernels", "stock"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "stock":
        monkeypatch.setattr(sampler, "sample_kernels", None)
    return request.param


def noise(seed: int, choice: int, position: int, token: int) -> float:
    """The documented Gumbel noise, in Python integers."""
    key = keyed_random.position_key(keyed_random.stream_key(seed, choice), position)
    x = token ^ (key & MASK32)
    x = ((x ^ (x >> 17)) * 0xED5AD4BB) & MASK32
    x = ((x ^ (x >> 11)) + (key >> 32)) & MASK32
    x = (x * 0xAC4C1B51) & MASK32
    x = ((x ^ (x >> 15)) * 0x31848BAB) & MASK32
    x ^= x >> 14
    return -math.log(-math.log1p(-(2**32 - x - 0.5) / 2**32))


def penalised(
    logits: np.ndarray, params: SamplingParams, eos: tuple[int, ...], prompt: list[int], generated: list[int]
) -> np.ndarray:
    """Reference: the logits before the temperature."""
    out = logits.astype(np.float64)
    for token, bias in params.logit_bias:
        out[token] += bias
    if len(generated) < params.min_tokens:
        for token in (*params.stop_token_ids, *(() if params.ignore_eos else eos)):
            out[token] = -np.inf
    for token in {*prompt, *generated}:
        out[token] *= 1 / params.repetition_penalty if out[token] > 0 else params.repetition_penalty
    for token in set(generated):
        out[token] -= params.frequency_penalty * generated.count(token) + params.presence_penalty
    return out


def survivors(logits: np.ndarray, params: SamplingParams) -> list[int]:
    """Reference: what the filters leave, likeliest first, lower ids first among equals."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    scaled = (logits - logits.max()) / params.temperature
    if params.min_p > 0:
        order = [token for token in order if scaled[token] >= math.log(params.min_p)]
    if params.top_k > 0:
        order = order[: params.top_k]
    mass = np.exp(scaled[order])
    above = np.concatenate([[0.0], np.cumsum(mass)[:-1]])
    return [t for i, t in enumerate(order) if i == 0 or params.top_p >= 1 or above[i] < params.top_p * mass.sum()]


def drawn(logits: np.ndarray, params: SamplingParams, position: int) -> int:
    """Reference: argmax of logits / T + G over the survivors."""
    if params.temperature < 1e-5:
        return int(logits.argmax())
    kept = sorted(survivors(logits, params))
    scaled = (logits - logits.max()) / params.temperature
    scores = [scaled[t] + noise(params.seed, params.choice, position, t) for t in kept]
    return kept[int(np.argmax(scores))]


def state(params: SamplingParams, vocab: int, prompt: tuple[int, ...] = ()) -> SamplingState:
    return SamplingState(params, vocab, (), prompt, ())


def random_logits(rows: int, vocab: int, seed: int = 0, rounded: bool = False) -> torch.Tensor:
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2.5
    return (logits * 2).round() / 2 + 0.0 if rounded else logits  # halves: many ties


FILTERS = {
    "greedy": {"temperature": 0.0},
    "almost_greedy": {"temperature": 9e-6},
    "plain": {},
    "cool": {"temperature": 0.3},
    "hot": {"temperature": 4.0},
    "top_p": {"top_p": 0.9},
    "low_top_p": {"top_p": 0.31, "temperature": 1.7},
    "no_top_p": {"top_p": 1e-9},
    "top_k_1": {"top_k": 1},
    "top_k": {"top_k": 5},
    "large_top_k": {"top_k": 150},
    "min_p": {"min_p": 0.07},
    "top_k_min_p": {"top_k": 12, "min_p": 0.3, "temperature": 1.4},
    "top_k_top_p": {"top_k": 40, "top_p": 0.83},
    "min_p_top_p": {"min_p": 0.003, "top_p": 0.77, "temperature": 1.3},
    "all": {"min_p": 0.01, "top_k": 9, "top_p": 0.71, "temperature": 0.8},
}


@pytest.mark.parametrize("rounded", [False, True], ids=["continuous", "ties"])
@pytest.mark.parametrize("name", FILTERS)
def test_filters_and_temperature(backend: str, name: str, rounded: bool) -> None:
    for vocab in (3, 131, 1500):
        logits = random_logits(8, vocab, vocab, rounded)
        params = [SamplingParams(seed=17 * i - 20, choice=i % 3, **FILTERS[name]) for i in range(8)]
        positions = [1000 * i for i in range(8)]
        tokens, logprobs = sample(logits, [state(p, vocab) for p in params], positions)
        rows = logits.double().numpy()
        assert tokens == [drawn(rows[i], params[i], positions[i]) for i in range(8)]
        assert logprobs == [None] * 8


@pytest.mark.parametrize("rounded", [False, True], ids=["continuous", "ties"])
@pytest.mark.parametrize("name", FILTERS)
def test_log_probabilities_are_of_what_is_drawn_from(backend: str, name: str, rounded: bool) -> None:
    for vocab in (3, 131, 1500):
        params = [SamplingParams(seed=17 * i - 20, **FILTERS[name]) for i in range(8)]
        states, positions = [state(p, vocab) for p in params], [1000 * i for i in range(8)]
        rows = random_logits(8, vocab, vocab, rounded)
        log_probs = rows.clone()
        to_log_probs(log_probs, states, [[]] * 8)
        for row, got in zip(rows.double().numpy(), log_probs.double().numpy(), strict=True):
            kept = [int(row.argmax())] if params[0].temperature < 1e-5 else survivors(row, params[0])
            assert set(np.flatnonzero(got > -np.inf)) == set(kept)
            scaled = row[kept] / max(params[0].temperature, 1e-5)
            assert got[kept] == pytest.approx(scaled - np.logaddexp.reduce(scaled), abs=1e-5)
        assert draw(log_probs, [s.stream for s in states], positions) == sample(rows, states, positions)[0]


PENALTIES = {
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.75},
    "negative": {"frequency_penalty": -0.5, "presence_penalty": -1.0},
    "repetition": {"repetition_penalty": 1.7},
    "bias": {"logit_bias": ((3, 4.5), (7, -100.0), (0, 2.0))},
    "min_tokens": {"min_tokens": 6, "stop_token_ids": (1, 4)},
    "min_tokens_ignore_eos": {"min_tokens": 6, "stop_token_ids": (4,), "ignore_eos": True},
    "all": {
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.2,
        "logit_bias": ((2, 5.0), (5, 1.0)),
        "min_tokens": 3,
        "stop_token_ids": (2,),
        "top_p": 0.9,
    },
}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", PENALTIES)
def test_penalties_token_by_token(backend: str, name: str, temperature: float) -> None:
    vocab, eos, prompt = 12, (5, 6), [1, 1, 2, 9]
    params = SamplingParams(temperature=temperature, seed=3, **PENALTIES[name])
    states = [SamplingState(params, vocab, eos, prompt, [])]
    generated: list[int] = []
    for step in range(40):
        logits = random_logits(1, vocab, step)
        before = logits.clone()
        (token,), _ = sample(logits, states, [step])
        row = penalised(logits[0].numpy(), params, eos, prompt, generated)
        assert token == drawn(row, params, step)
        assert torch.equal(logits, before)
        recovered = [SamplingState(params, vocab, eos, prompt, generated)]  # the engine was lost and restarted
        assert sample(logits, recovered, [step])[0] == [token]
        generated.append(token)
        states[0].observe(token)


@pytest.mark.parametrize("name", PENALTIES)
def test_each_row_knows_the_drafted_tokens_before_it(backend: str, name: str) -> None:
    vocab, eos, prompt, generated, draft = 12, (5, 6), [1, 1, 2, 9], [3, 9], [7, 3, 7, 1, 7]
    params = SamplingParams(seed=3, **PENALTIES[name])
    one = SamplingState(params, vocab, eos, prompt, generated)
    rows = random_logits(len(draft) + 1, vocab)
    got = rows.clone()
    to_log_probs(got, [one], [draft])
    for n, row in enumerate(rows):
        behind = row[None].clone()
        to_log_probs(behind, [SamplingState(params, vocab, eos, prompt, generated + draft[:n])], [[]])
        assert torch.equal(got[n], behind[0])
    again = rows.clone()  # and the state has forgotten them
    to_log_probs(again, [one], [draft])
    assert torch.equal(got, again)


@given(st.lists(st.integers(0, 9), max_size=12), st.lists(st.integers(-1, 10), max_size=12))
def test_what_is_forgotten_leaves_no_trace(known: list[int], drafted: list[int]) -> None:
    params = SamplingParams(presence_penalty=0.4, frequency_penalty=0.3, repetition_penalty=1.2)
    one, other = (SamplingState(params, 10, (), (1, 1, 2), known) for _ in range(2))
    for token in drafted:
        one.observe(token)
    for token in reversed(drafted):
        one.forget(token)
    for token in known:  # both go on
        one.observe(token)
        other.observe(token)
    rows = [np.arange(10, dtype=np.float32) - 4 for _ in range(2)]
    for row, penalised_state in zip(rows, (one, other), strict=True):
        penalised_state.penalties.apply(row)
    assert rows[0].tolist() == rows[1].tolist() and one.penalties.generated == other.penalties.generated


def test_many_distinct_tokens_are_counted() -> None:
    params = SamplingParams(temperature=0.0, presence_penalty=1.0)
    one = state(params, 1000)
    for token in range(999):
        one.observe(token)
    assert sample(torch.zeros(1, 1000), [one], [0])[0] == [999]


def test_ids_outside_the_vocabulary_change_nothing(backend: str) -> None:
    params = SamplingParams(
        temperature=0.0, repetition_penalty=2.0, logit_bias=((99, 5.0),), stop_token_ids=(98,), min_tokens=1
    )
    one = SamplingState(params, 4, (97,), (96, -1), (95,))
    assert sample(torch.tensor([[0.0, 1.0, 2.0, 3.0]]), [one], [0])[0] == [3]


def test_greedy_takes_the_lowest_of_equals(backend: str) -> None:
    logits = torch.tensor([[1.0, 7.0, 7.0, 0.0], [-0.0, 0.0, -1.0, -1.0]])
    greedy = state(SamplingParams(temperature=0.0), 4)
    assert sample(logits, [greedy, greedy], [0, 0])[0] == [1, 0]
    if backend == "kernels":  # the argmax of a mixed batch is another path than that of a greedy one
        mixed = [greedy, greedy, state(SamplingParams(), 4)]
        assert sample(torch.cat([logits, logits[:1]]), mixed, [0, 0, 0])[0][:2] == [1, 0]


def test_a_flat_distribution_is_cut_in_id_order(backend: str) -> None:
    n, vocab = 200, 400
    for params, kept in ((SamplingParams(top_p=0.1), 40), (SamplingParams(top_k=3), 3)):
        states = [state(replace(params, seed=i), vocab) for i in range(n)]
        tokens = sample(torch.zeros(n, vocab), states, [0] * n)[0]
        assert max(tokens) < kept <= max(tokens) + 4


VALUES = st.sampled_from([-math.inf, -1e30, -4.0, 0.0, 1.0, 1.5, 1.5000001, 88.0])


@settings(deadline=None, max_examples=300)
@given(
    st.lists(VALUES, min_size=1, max_size=200),
    st.sampled_from([0.01, 1.0, 30.0]),
    st.sampled_from([1e-6, 0.37, 0.93, 1.0]),
    st.sampled_from([0.0, 0.013, 0.7, 1.0]),
    st.integers(0, 70),
    st.integers(0, 2**64 - 1),
)
def test_ties_infinities_and_extremes(
    values: list[float], temperature: float, top_p: float, min_p: float, top_k: int, seed: int
) -> None:
    params = SamplingParams(temperature=temperature, top_p=top_p, min_p=min_p, top_k=top_k, seed=seed)
    logits = torch.tensor([values])
    (token,), _ = sample(logits, [state(params, len(values))], [7])
    if max(values) == -math.inf:
        assert token == -1
    else:
        assert token == drawn(logits[0].double().numpy(), params, 7)


def test_results_do_not_depend_on_the_batch(backend: str) -> None:
    vocab = 700
    kinds = [*FILTERS.values(), *({k: v for k, v in p.items() if k != "top_p"} for p in PENALTIES.values())]
    params = [SamplingParams(seed=i, logprobs=i % 4, **kinds[i % len(kinds)]) for i in range(40)]
    logits, states = random_logits(40, vocab), [SamplingState(p, vocab, (5,), (1, 2), (3,)) for p in params]
    together = sample(logits, states, list(range(40)))
    for i in range(40):
        token, logprobs = sample(logits[i : i + 1], [states[i]], [i])
        assert (token[0], logprobs[0]) == (together[0][i], together[1][i])


def test_backends_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    vocab = 5000
    params = [SamplingParams(seed=i, logprobs=5, **FILTERS[n]) for i, n in enumerate(FILTERS)]
    logits, states = random_logits(len(params), vocab), [state(p, vocab) for p in params]
    tokens, logprobs = sample(logits, states, list(range(len(params))))
    monkeypatch.setattr(sampler, "sample_kernels", None)
    stock_tokens, stock_logprobs = sample(logits, states, list(range(len(params))))
    assert tokens == stock_tokens
    for ours, stock in zip(logprobs, stock_logprobs, strict=True):
        assert (ours.token, ours.rank, ours.top_ids) == (stock.token, stock.rank, stock.top_ids)
        assert ours.top_logprobs == pytest.approx(stock.top_logprobs, abs=1e-6)


def test_a_broken_row_fails_alone(backend: str) -> None:
    good = random_logits(1, 300)[0]
    broken = [good.clone() for _ in range(5)]
    broken[0][17] = math.nan
    broken[1][299] = -torch.tensor(math.nan)
    broken[2][5] = math.inf
    broken[3][:] = -math.inf
    broken[4][:] = math.nan
    for params in ({"temperature": 0.0}, {}, {"top_p": 0.5}, {"top_k": 4}, {"min_p": 0.1}):
        one = state(SamplingParams(logprobs=2, presence_penalty=0.1, **params), 300)
        tokens, logprobs = sample(torch.stack([good, *broken, good]), [one] * 7, [3] * 7)
        assert tokens[1:6] == [-1] * 5 and logprobs[1:6] == [None] * 5
        assert tokens[0] == tokens[6] >= 0 and logprobs[0] == logprobs[6] != None  # noqa: E711
        log_probs = torch.stack([good, *broken, good])
        to_log_probs(log_probs, [one] * 7, [[]] * 7)
        assert log_probs[1:6].isnan().all() and torch.equal(log_probs[0], log_probs[6])
        assert draw(log_probs, [one.stream] * 7, [3] * 7)[1:6] == [-1] * 5
    entries = prompt_logprobs(torch.stack([good, *broken]), [0] * 6, 2)
    assert [entry.token for entry in entries] == [0, -1, -1, -1, -1, -1]
    assert entries[1].top_ids == [] and math.isnan(entries[1].logprob)


@pytest.mark.parametrize("rounded", [False, True], ids=["continuous", "ties"])
def test_logprobs_are_of_the_raw_distribution(backend: str, rounded: bool) -> None:
    vocab = 600
    logits = random_logits(6, vocab, 5, rounded)
    tops = [0, 1, 5, 20, None, 700]
    params = [SamplingParams(seed=i, logprobs=top, logit_bias=((i, 8.0),), top_k=4) for i, top in enumerate(tops)]
    tokens, logprobs = sample(logits, [state(p, vocab) for p in params], [0] * 6)
    rows = logits.double().numpy()
    exact = rows - np.log(np.exp(rows).sum(axis=1, keepdims=True))
    assert logprobs[4] is None
    for i in (0, 1, 2, 3, 5):
        entry, row, n = logprobs[i], exact[i], min(tops[i], vocab)
        assert entry.token == tokens[i]
        assert entry.logprob == pytest.approx(row[tokens[i]], abs=1e-6)
        assert entry.rank == 1 + (rows[i] > rows[i][tokens[i]]).sum()
        assert entry.top_ids == sorted(range(vocab), key=lambda t, i=i: (-rows[i][t], t))[:n]
        assert entry.top_logprobs == pytest.approx(row[entry.top_ids], abs=1e-6)


def test_prompt_logprobs(backend: str) -> None:
    logits, tokens = random_logits(9, 50), list(range(9))
    entries = prompt_logprobs(logits, tokens, 3)
    exact = logits.double().log_softmax(1)
    assert [entry.token for entry in entries] == tokens
    assert [entry.logprob for entry in entries] == pytest.approx(exact.diagonal().tolist(), abs=1e-6)
    assert [entry.top_ids for entry in entries] == exact.topk(3).indices.tolist()
    assert prompt_logprobs(logits[:0], [], 3) == []
    assert sample(logits[:0], [], []) == ([], [])


def test_any_float_layout_is_read(backend: str) -> None:
    logits = random_logits(100, 4).t()  # not contiguous
    states = [state(SamplingParams(seed=i, logprobs=1), 100) for i in range(4)]
    assert sample(logits, states, [0] * 4) == sample(logits.contiguous(), states, [0] * 4)
    half = logits.bfloat16()
    assert sample(half, states, [0] * 4) == sample(half.float(), states, [0] * 4)


def test_warm_up() -> None:
    sampler.warm_up(100)


# Randomness


def test_three_writings_of_the_noise_agree() -> None:
    ids = [0, 1, 2, 31999, 151935, 262143]
    for seed, choice, position in ((0, 0, 0), (2**64 - 1, 3, 131071), (-5, 0, 7)):
        stream = keyed_random.stream_key(seed, choice)
        key = keyed_random.position_key(stream, position)
        assert sample_kernels._position_key(np.uint64(stream), position) == key
        low, high = np.uint32(key & MASK32), np.uint32(key >> 32)
        exact = [noise(seed, choice, position, token) for token in ids]
        kernels = [sample_kernels._gumbel(sample_kernels._token_hash(low, high, np.uint32(t))) for t in ids]
        assert kernels == pytest.approx(exact, rel=1e-12)
        assert keyed_random.gumbel([key], torch.tensor(ids))[0].tolist() == pytest.approx(exact, rel=1e-12)


def test_the_bound_of_the_noise_is_a_bound() -> None:
    edges = [(1 << n) + d for n in range(33) for d in (-2, -1, 0, 1)]
    numbers = [h & MASK32 for h in edges] + [MASK32 - (h & MASK32) for h in edges]
    numbers += np.random.default_rng(0).integers(0, 1 << 32, 20000).tolist()
    for h in numbers:
        exact = sample_kernels._gumbel(np.uint32(h))
        assert -3.2 < exact < 23
        assert sample_kernels._gumbel_bound(np.uint32(h)) + sample_kernels.SLACK / 2 > exact


def test_a_weight_is_right_to_rounding() -> None:
    numbers = np.concatenate([-np.geomspace(1e-8, 87, 5000), [0.0]]).astype(np.float32)
    weights = np.array([sample_kernels._exp(x) for x in numbers], np.float64)
    exact = np.exp(numbers.astype(np.float64))
    assert (np.abs(weights / exact - 1) < 1e-7 * (1 - numbers)).all() and weights[-1] == 1
    assert all(sample_kernels._exp(np.float32(x)) < 2e-38 for x in (-88, -1e30, -np.inf))


@pytest.mark.parametrize("shift", [-9.0, 0.0, 9.0])
def test_the_largest_of_each_block_whatever_the_signs(shift: float) -> None:
    row = np.random.default_rng(1).standard_normal(1000).astype(np.float32) + np.float32(shift)
    row[64:128], row[130], row[200] = -np.inf, -0.0, 0.0
    maxima = np.empty(16, np.int32)
    for odd in (None, np.inf, np.nan, -np.nan):
        row[777] = row[777] if odd is None else odd
        key, has_nan = sample_kernels._summary(row.view(np.int32), maxima)
        peak = np.int32(sample_kernels._flip(key)).view(np.float32)
        assert has_nan == (odd is not None and np.isnan(odd))
        assert has_nan or peak == row.max()
    blocks = [row[n : n + 64] for n in range(0, 1000, 64)]
    for block, largest in zip(blocks, maxima, strict=True):
        assert np.isnan(block).any() or np.int32(sample_kernels._flip(largest)).view(np.float32) == block.max()


PROBABILITIES = np.array([0.3, 0.22, 0.16, 0.12, 0.09, 0.06, 0.03, 0.02])


def draws(seeds: list[int], choices: list[int], positions: list[int]) -> np.ndarray:
    logits = torch.tensor(np.log(PROBABILITIES), dtype=torch.float32).repeat(len(seeds), 1)
    states = [state(SamplingParams(seed=s, choice=c), 8) for s, c in zip(seeds, choices, strict=True)]
    return np.array(sample(logits, states, positions)[0])


def assert_distributed(counts: np.ndarray, probabilities: np.ndarray) -> None:
    """Pearson's chi-square at some 4.5 standard deviations."""
    expected = counts.sum() * probabilities
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = counts.size - 1
    assert statistic < freedom + 4.5 * math.sqrt(2 * freedom) + 5


N = 15_000
BITS = [1 << (i % 64) for i in range(N)]
STREAMS = {  # pairs of (seed, choice, position) that differ by one thing
    "positions": lambda i: ((5, 0, i), (5, 0, i + 1)),
    "seeds": lambda i: ((i, 0, 9), (i + 1, 0, 9)),
    "choices": lambda i: ((8, i, 2), (8, i + 1, 2)),
    "choices_of_seeds": lambda i: ((i, 0, 0), (i, 1, 0)),
    "seed_against_position": lambda i: ((i + 1, 0, i), (i, 0, i + 1)),
    "seed_against_choice": lambda i: ((i + 1, 0, 4), (i, 1, 4)),
    "seed_bits": lambda i: ((i, 0, i), (i ^ BITS[i], 0, i)),
    "far_positions": lambda i: ((5, 0, i), (5, 0, i + 4096)),
}


@pytest.mark.parametrize("name", STREAMS)
def test_neighbouring_draws_are_independent(name: str) -> None:
    """The joint distribution, not only the marginals: one uniform for every position passes those."""
    first, second = zip(*(STREAMS[name](i) for i in range(N)), strict=True)
    a, b = (draws(*map(list, zip(*keys, strict=True))) for keys in (first, second))
    joint = np.bincount(a * 8 + b, minlength=64)
    assert_distributed(joint, np.outer(PROBABILITIES, PROBABILITIES).ravel())
    triples = np.bincount(a[:-1] * 8 + a[1:], minlength=64)  # and along the stream itself
    assert_distributed(triples, np.outer(PROBABILITIES, PROBABILITIES).ravel())


def test_large_vocabularies_are_drawn_evenly() -> None:
    vocab, n = 4096, 4000
    tokens = np.array(sample(torch.zeros(n, vocab), [state(SamplingParams(seed=11), vocab)] * n, list(range(n)))[0])
    assert_distributed(np.bincount(tokens % 16, minlength=16), np.full(16, 1 / 16))
    assert_distributed(np.bincount(tokens // 256, minlength=16), np.full(16, 1 / 16))
    assert_distributed(np.bincount(tokens[:-1] // 512 * 8 + tokens[1:] // 512, minlength=64), np.full(64, 1 / 64))


def test_a_filtered_draw_follows_the_renormalised_rest() -> None:
    logits = torch.tensor(np.log(PROBABILITIES), dtype=torch.float32).repeat(N, 1)
    states = [state(SamplingParams(seed=1, top_p=0.7, top_k=5, temperature=2.0), 8)] * N
    counts = np.bincount(sample(logits, states, list(range(N)))[0], minlength=8)
    kept = np.sqrt(PROBABILITIES)[:5]
    kept = kept[: 1 + int((np.cumsum(kept) < 0.7 * kept.sum()).sum())]
    assert counts[len(kept) :].sum() == 0
    assert_distributed(counts[: len(kept)], kept / kept.sum())
