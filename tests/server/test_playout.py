"""When the tokens of a stream go out, in virtual time."""

import asyncio
from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.request import SamplingParams
from paceline.engine.tokenizer import Tokenizer
from paceline.server.errors import ApiError
from paceline.server.generation import Entry, Generation, Job, Prompt, TextOptions
from paceline.server.metrics import Metrics
from paceline.server.playout import Playout
from tests.server.conftest import in_process
from tests.server.fake_fleet import FakeFleet
from tests.server.test_streaming import ROUTES, TOKENIZER, stream, texts

Steps = list[tuple[float, int]]  # seconds, and what each yields


def played(steps: Steps, late_s: float = 0.0) -> tuple[list[float], list[float]]:
    """When each part came, and when it went; up to so much later than it was due if that was between steps, since they
    take all cores."""
    random = Random(0)
    playout, now, held = Playout(), 0.0, 0
    came: list[float] = []
    went: list[float] = []
    for i, (took, parts) in enumerate(steps):
        now += took
        came, held = came + [now] * parts, held + parts
        playout.come(now, held)
        if i == len(steps) - 1:
            return came, went + [now] * held
        at = now
        while held:
            when, some = playout.due(held)
            at = max(at, when + (random.uniform(0, late_s) if when > now else 0))
            if at >= now + steps[i + 1][0]:
                break
            assert 1 <= some <= held
            playout.sent(at, some)
            went, held = went + [at] * some, held - some
    return came, went


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.floats(0.0, 5.0), st.integers(0, 17)), min_size=1, max_size=40))
def test_parts_go_in_order_none_before_it_came_and_all_by_the_end(steps: Steps) -> None:
    came, went = played(steps)
    assert len(went) == len(came) and went == sorted(went)
    assert all(a <= b for a, b in zip(came, went, strict=True))
    if came:
        assert went[0] == came[0]


@pytest.mark.parametrize("yields", [[3], [1, 3, 5], [8, 1], [2, 1, 1]])
@pytest.mark.parametrize("step_s", [0.03, 0.2])
def test_what_comes_together_goes_evenly_and_soon(yields: list[int], step_s: float) -> None:
    came, went = played([(step_s, 1)] + [(step_s, yields[i % len(yields)]) for i in range(60)])
    last = came.index(came[-1])  # those of the last step go with it
    late = [b - a for a, b in zip(came, went, strict=True)]
    gaps = sorted(b - a for a, b in pairwise(went[20:last]))
    assert gaps[-1] <= 1.01 * step_s and (len(yields) > 1 or gaps[-1] <= 0.6 * step_s)
    assert len(set(went)) > 1.25 * len(set(came))
    assert sum(late) / len(late) < 1.7 * step_s and max(late) < 3.5 * step_s


def test_what_long_steps_yield_lasts_over_short_ones_and_the_next_long_one() -> None:
    """As of sixteen streams: steps without drafts between those that verify eight for each."""
    random = Random(1)
    steps = [random.choice([(0.06, 1), (0.15, random.randint(5, 9))]) for _ in range(200)]
    came, went = played(steps)
    gaps = [sorted(b - a for a, b in pairwise(some[30:-9])) for some in (came, went)]
    common = [some[int(0.99 * len(some))] for some in gaps]
    assert common[0] > 0.14 and common[1] < 0.065 and gaps[1][-1] < 0.09
    assert sum(b - a for a, b in zip(came, went, strict=True)) / len(came) < 0.2


def drafted(count: int, step_s: float, kept: float, seed: int = 1) -> Steps:
    """Steps that verify eight drafted tokens, each of which stays with that probability, and some of prompts alone."""
    random, steps = Random(seed), list[tuple[float, int]]()
    for _ in range(count):
        stay = next((i for i in range(8) if random.random() > kept), 8)
        steps.append((step_s * random.uniform(0.9, 1.2), 1 + stay) if random.random() < 0.8 else (step_s / 3, 1))
    return steps


def p99(times: list[float]) -> float:
    gaps = sorted(b - a for a, b in pairwise(times))
    return gaps[int(0.99 * len(gaps))]


def test_where_steps_are_short_and_messages_late_gaps_are_not_longer_than_steps() -> None:
    came, went = played(drafted(400, 0.0075, 0.95), late_s=0.004)
    assert p99(went) < 0.9 * p99(came)


@pytest.mark.parametrize("kept", [0.6, 0.7, 0.8])
def test_however_few_of_a_wide_step_stay_tokens_go_at_their_mean_pace(kept: float) -> None:
    came, went = played(drafted(800, 0.06, kept), late_s=0.004)
    mean = came[-1] / len(came)
    assert p99(came) > 2.7 * mean and p99(went) < 2.35 * mean
    assert sum(b - a for a, b in zip(came, went, strict=True)) / len(came) < 0.11


def test_where_a_step_yields_one_nothing_is_held() -> None:
    came, went = played([(0.02 + 0.01 * (i % 3), 1) for i in range(30)])
    assert went == came


@pytest.mark.parametrize("stall", [1, 20])
def test_a_stall_does_not_slow_what_follows(stall: int) -> None:
    stalled = [(5.0 if i == stall else 0.03, 3) for i in range(60)]
    came, went = played(stalled)
    since = 3 * (stall + 4)
    assert max(b - a for a, b in pairwise(went[since:])) < 0.031
    assert max(b - a for a, b in zip(came[since:], went[since:], strict=True)) < 0.12


def test_two_steps_at_once_are_no_short_step() -> None:
    """A clock that counts milliseconds, and a server that was busy meanwhile."""
    steps = [(0.0 if i % 7 == 3 else 0.1, 4) for i in range(60)]
    came, went = played(steps)
    assert len(set(went[40:-8])) > 2 * len(set(came[40:-8]))
    assert max(b - a for a, b in pairwise(went[40:-8])) < 0.06


def test_what_a_client_was_too_slow_for_goes_at_once() -> None:
    playout, now, held = Playout(), 0.0, 0
    for i in range(40):  # nothing is taken in the last ten steps
        now, held = now + 0.1, held + 4
        playout.come(now, held)
        if i < 30:
            playout.sent(now, held)
            held = 0
    assert playout.due(held)[1] > held - 20


class VirtualLoop(asyncio.SelectorEventLoop):
    """Whose clock jumps to whatever is next."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:
            self.now = max(self.now, self._scheduled[0]._when)
        super()._run_once()


class Taken:
    """What a writer got of a request: texts with their times, and log-probabilities."""

    def __init__(self) -> None:
        self.texts: list[tuple[float, str]] = []
        self.entries: list[Entry] = []
        self.error: ApiError | None = None

    @property
    def text(self) -> str:
        return "".join(text for _, text in self.texts)


def run(
    smooth: bool, options: TextOptions | None = None, fail_after: int | None = None, leave_at: float | None = None
) -> Taken:
    """40 tokens of a fleet whose steps take 80 ms and yield four."""

    async def main() -> Taken:
        fleet = FakeFleet({"tiny": 1000}, 300, step_s=0.08)
        fleet.tokens_per_step, fleet.fail_after = 4, fail_after
        fleet.script = TOKENIZER.encode("hello name, " * 9, False)
        params = SamplingParams(max_tokens=40, logprobs=1)
        job = Job("tiny", TOKENIZER, [Prompt([5])], 1, params, options or TextOptions(), smooth=smooth)
        generation, taken, loop = Generation(fleet, job, Metrics()), Taken(), asyncio.get_running_loop()
        generation.start()
        if leave_at is not None:
            loop.call_at(leave_at, generation.disconnect)
        try:
            while generation.unfinished and not generation.disconnected:
                for choice in await generation.ready():
                    piece = generation.take(choice)
                    taken.texts.append((loop.time(), piece.text))
                    taken.entries += piece.entries
        except ApiError as error:
            taken.error = error
        generation.cancel()
        await asyncio.sleep(1.0)
        assert not generation._ready, "nothing is announced after the end"
        return taken

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main())


def test_a_smooth_stream_says_the_same_in_more_pieces() -> None:
    plain, smooth = run(False), run(True)
    assert smooth.text == plain.text and smooth.entries == plain.entries
    assert smooth.texts[0][0] == plain.texts[0][0] and smooth.texts[-1][0] == plain.texts[-1][0]
    assert len(smooth.texts) > 1.6 * len(plain.texts)
    middle = [time for time, _ in smooth.texts[4:-1]]
    assert max(b - a for a, b in pairwise(middle)) < 0.045
    assert min(b - a for (a, _), (b, _) in pairwise(plain.texts)) == pytest.approx(0.08)
    offsets, sent = [entry.offset for entry in smooth.entries], 0
    assert offsets == sorted(offsets)
    for _, text in smooth.texts:
        sent += len(text)
    assert sent == len(plain.text)


def test_a_stop_string_ends_a_smooth_stream_at_once() -> None:
    options = TextOptions(("name, hello name",))
    plain, smooth = run(False, options), run(True, options)
    assert smooth.text == plain.text == "hello " and smooth.entries == plain.entries
    assert smooth.texts[-1][0] == plain.texts[-1][0]


@pytest.mark.parametrize("smooth", [False, True])
def test_a_failure_loses_nothing_that_came_before(smooth: bool) -> None:
    taken = run(smooth, fail_after=20)
    assert taken.error is not None and taken.text and run(False).text.startswith(taken.text)
    assert len(taken.entries) == 20


def test_who_leaves_is_not_written_to_any_more() -> None:
    taken = run(True, leave_at=0.35)
    assert taken.error is None and taken.texts[-1][0] <= 0.35


@pytest.mark.parametrize(("path", "body"), ROUTES)
async def test_streams_of_a_model_that_is_drafted_for(tokenizer: Tokenizer, path: str, body: dict[str, Any]) -> None:
    """Go out evenly, unless the request says otherwise."""
    async with in_process(tokenizer, step_s=0.03) as server:
        server.fleet.tokens_per_step = 6
        models = server.app.state.api.models

        async def pieces(**more: object) -> tuple[int, str]:
            chunks = await stream(server.client, path, body | {"max_tokens": 36} | more)
            return len(chunks), texts(chunks)[0]

        whole = await pieces()
        models["tiny"] = replace(models["tiny"], smooth=True)
        count, text = await pieces()
        assert text == whole[1] and count > whole[0]
        for off in ({"smooth": False}, {"enabled": False}, {"max_draft_tokens": 0}):
            assert await pieces(speculation=off) == whole
