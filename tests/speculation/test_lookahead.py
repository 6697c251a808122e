"""How many tokens are drafted: the best by the formula, none where they cost more than they yield, and back again."""

from itertools import product

import numpy as np
import pytest

from paceline.core.batch import AGAIN, FOLLOWED, FOLLOWED_OF, StepShape
from paceline.core.request import ASKED, COMPUTED, KNOWN, LIMIT, MAX_DRAFT_TOKENS, NUM_COLUMNS, PROMPT, SamplingParams
from paceline.latency.step_time import StepTime
from paceline.speculation.choice import REST
from paceline.speculation.costs import Costs, expected
from paceline.speculation.lookahead import Lookahead
from paceline.speculation.times import drafting_of

FLAT = Costs([1.0] * 600)


def rising(begin: float, slope: float) -> Costs:
    return Costs([begin + slope * n for n in range(600)])


def sequences(count: int, most: int = MAX_DRAFT_TOKENS) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """That decode behind 99 tokens: their numbers, the most that each may draft, and their slots."""
    numbers = np.zeros((8, NUM_COLUMNS), np.int64)
    numbers[:count, KNOWN], numbers[:count, COMPUTED], numbers[:count, PROMPT] = 100, 99, 50
    numbers[:count, LIMIT] = 1000
    return numbers, np.full(8, most), np.arange(count)


def taught(lookahead: Lookahead, *acceptance: float, tries: int = 3000) -> Lookahead:
    """Has seen drafts of full length, of which each sequence's are accepted with its own probability a token."""
    random = np.random.default_rng(3)
    numbers, drafts, slots = sequences(len(acceptance))
    lookahead.choose(numbers, drafts, slots, 0, 512)
    drafted = np.full(len(slots), MAX_DRAFT_TOKENS, np.uint8)
    for _ in range(tries):
        refused = [random.random(MAX_DRAFT_TOKENS) >= a for a in acceptance]
        emitted = [1 + (int(r.argmax()) if r.any() else MAX_DRAFT_TOKENS) for r in refused]
        decoded(lookahead, slots, drafted, np.array(emitted, np.uint8))
    # what a sequence remembers is short, and a test wants the long run
    for slot, a in zip(slots, acceptance, strict=True):
        lookahead.counts[slot, 1, :-1] = 1000
        lookahead.counts[slot, 0, :-1] = 1000 * a
    return lookahead


def chosen(
    lookahead: Lookahead, count: int, pending: int = 0, budget: int = 512, most: int = 16, goal: float = np.inf
) -> list[int]:
    numbers, drafts, slots = sequences(count, most)
    return lookahead.choose(numbers, drafts, slots, pending, budget, goal)[0][:count].tolist()


def decoded(lookahead: Lookahead, slots: np.ndarray, drafted: np.ndarray, emitted: np.ndarray) -> None:
    lookahead.observe(slots, np.ones(len(slots), np.int64), drafted, emitted)


def observe_times(lookahead: Lookahead, drafted: int, seconds: float, draft_seconds: float = 0.0) -> None:
    """Of a step of the first sequence alone."""
    lookahead.observe_times(np.array([0]), np.array([drafted], np.uint8), 0, seconds, draft_seconds)


@pytest.mark.parametrize(("acceptance", "first"), [(0.3, 1), (0.75, 2), (0.97, MAX_DRAFT_TOKENS)])
def test_a_first_draft_is_as_long_as_its_kind_has_proven_to_stay(acceptance, first):
    """Of a kind that nobody has seen it is one token, however good its drafts are believed to be."""
    lookahead = taught(Lookahead(FLAT, Costs([0.001] * 600)), acceptance)
    numbers, drafts, slots = sequences(1)
    numbers[0, ASKED] = numbers[0, KNOWN] - 1
    for kind, length in ((0, first), (1, 1)):
        lookahead.forget(0, kind)
        assert lookahead.choose(numbers, drafts, slots, 0, 512)[0][0] == length


@pytest.mark.parametrize(
    ("acceptance", "costs", "best"),
    [
        (0.6, (0.02, 0.05, 0.1, 0.2), (6, 4, 3, 2)),
        (0.7, (0.02, 0.05, 0.1, 0.2), (8, 6, 4, 3)),
        (0.8, (0.02, 0.05, 0.1, 0.2), (11, 8, 6, 4)),
        (0.9, (0.05, 0.1, 0.2), (13, 10, 7)),
    ],
)
def test_one_request_drafts_what_the_formula_says(acceptance, costs, best):
    for cost, most in zip(costs, best, strict=True):
        lookahead = taught(Lookahead(FLAT, Costs([cost] * 600)), acceptance)
        assert abs(chosen(lookahead, 1)[0] - most) <= 1


def test_what_drafting_costs_once_is_paid_by_longer_drafts():
    """As much in all as passes alone for four tokens: drafts are longer then. Where it costs too much nobody drafts."""
    length = {
        once: chosen(taught(Lookahead(rising(1.0, 0.02), Costs([cost] * 600, once=once)), 0.8), 1)[0]
        for once, cost in ((0.0, 0.1), (0.32, 0.02), (9.0, 0.02))
    }
    assert length[0.32] > length[0.0] > length[9.0] == 0
    lookahead = Lookahead(FLAT, Costs([0.25] * 600, once=0.5))
    first, further, _ = expected(np.array([3, 1], np.uint8), 2, 0, *lookahead._target, *lookahead._draft)
    assert (first, further) == (0.75, 0.5)


def test_who_is_asked_for_nothing_much_rests():
    """N-grams are as good as free, to be asked for them is not."""
    none, one, slot = np.array([0], np.uint8), np.array([1], np.uint8), np.array([0])
    rates, costs = [], rising(0.99, 0.01)
    for asking in (0.0, 0.05):
        lookahead, rng = Lookahead(costs, None, asking), np.random.default_rng(5)
        numbers, drafts, running = sequences(1)
        seconds = tokens = asked = 0
        for _ in range(20_000):
            took, drafted, emitted = 1.0, none, one
            if lookahead.rests(running, 0):
                lookahead.composed(True)
            else:
                number = int(lookahead.choose(numbers, drafts, running, 0, 512)[0][0])
                lookahead.composed(False)
                asked, took = asked + 1, took + 0.05
                drafted = np.array([number * (rng.random() < 0.15)], np.uint8)
                emitted = one + np.uint8(drafted[0] > 0 and rng.random() < 0.2)
                took += costs.linear[1 + int(drafted[0])] - 1.0
            seconds, tokens = seconds + took, tokens + int(emitted[0])
            if not lookahead.rested(running, True, took):
                lookahead.observe_times(slot, drafted, 100, took, 0.0)
                lookahead.observe(slot, np.ones(1, np.int64), drafted, emitted, np.array([number]))
        rates.append((tokens / seconds, asked))
    (free, often), (told, seldom) = rates
    assert told > 0.985 > free and seldom < often / 2


def test_what_asking_takes_is_not_taken_for_slow_drafts():
    lookahead = taught(Lookahead(FLAT, Costs([0.1] * 600), 0.5), 0.8)
    for turn in range(400):
        drafted = 2 * (turn % 2)
        observe_times(lookahead, drafted, 1.5 + 0.1 * drafted, 0.1 * drafted)
    assert lookahead.times.pace == pytest.approx(1, rel=1e-3)
    assert drafting_of(lookahead.times.mean) == pytest.approx(1, rel=1e-3)


def test_costs_of_drafts_in_one_call():
    """Between the numbers of sequences that were measured on a line, beyond them as other passes."""
    time = StepTime(tuple(1.0 + n / 10 for n in range(7)), 0.5, 0.25, 0.01, 0.0, 0.0, 0.0)
    assert Costs.of_drafts(time, {}) == Costs.of(time)
    costs = Costs.of_drafts(time, {0: 0.7, 1: 0.1, 2: 0.2, 4: 0.6})
    assert costs.linear == pytest.approx([0.1, 0.1, 0.2, 0.4, 0.6, 0.7, 0.8])
    assert (costs.token, costs.context, costs.once) == (0.0, 0.01, 0.7)
    assert costs.scaled(0.5).once == 0.35 and costs.drafting.linear[0] == 0.7


def test_a_batch_whose_rows_cost_drafts_less():
    few, many = (
        chosen(taught(Lookahead(rising(1.0, slope), Costs([0.02] * 600)), 0.7, 0.7), 2) for slope in (0.02, 0.2)
    )
    assert sum(few) > sum(many) > 0 or sum(few) > 0 == sum(many)
    assert chosen(taught(Lookahead(rising(0.01, 1.0), None), 0.7, 0.7), 2) == [0, 0]  # a row costs as much as a step


def test_the_better_drafts_get_more_tokens():
    first, second, third = chosen(taught(Lookahead(rising(1.0, 0.05), Costs([0.03] * 600)), 0.9, 0.6, 0.2), 3)
    assert first > second >= third


def test_the_choice_is_near_the_best_of_all():
    acceptance, cost, draft = (0.85, 0.6, 0.4), rising(1.0, 0.08), Costs([0.05] * 600)
    lookahead = taught(Lookahead(cost, draft), *acceptance)

    def rate(lengths: tuple[int, ...]) -> float:
        tokens = sum(1 + sum(a ** (j + 1) for j in range(n)) for a, n in zip(acceptance, lengths, strict=True))
        return tokens / (cost.linear[3 + sum(lengths)] + 0.05 * max(lengths))

    best = max(map(rate, product(range(9), repeat=3)))
    assert rate(tuple(chosen(lookahead, 3, most=8))) >= 0.99 * best


def test_under_load_nobody_drafts_and_afterwards_everybody_does():
    lookahead = taught(Lookahead(rising(1.0, 0.05), Costs([0.05] * 600)), 0.8, 0.8)
    assert chosen(lookahead, 2, pending=10_000) == [0, 0]
    assert min(chosen(lookahead, 2, pending=0)) >= 2


def test_beside_a_prompt_that_fits_as_many_are_drafted_as_without():
    lookahead = taught(Lookahead(rising(1.0, 0.01), Costs([0.02] * 600)), 0.9, 0.9)
    alone = chosen(lookahead, 2)
    assert min(alone) > 8
    assert chosen(lookahead, 2, pending=64) == alone  # though the prompt's tokens alone are more for their time
    assert 0 < sum(chosen(lookahead, 2, pending=64, budget=80)) <= 80 - 2 - 64
    assert chosen(lookahead, 2, goal=1.9) == alone
    assert 0 < max(chosen(lookahead, 2, pending=64, goal=1.9)) <= 6  # else the prompt would have to wait
    reads = taught(Lookahead(rising(1.0, 0.01), rising(0.02, 0.001)), 0.9, 0.9)
    numbers, drafts, slots = sequences(2, 4)
    without, beside = (reads.choose(numbers, drafts, slots, pending, 512)[1] for pending in (0, 64))
    assert beside - without == pytest.approx(64 * 0.001)
    # nor does a step without drafts take less where the draft model reads its prompt
    idle = Lookahead(FLAT, rising(0.02, 0.001))
    idle.choose(numbers, 0 * drafts, slots, 0, 512)
    for steps, seconds in ((FOLLOWED - 1, 0.02 + 0.064), (1, 0.0)):
        assert idle.choose(numbers, 0 * drafts, slots, 64, 512)[1] == pytest.approx(seconds)
        for _ in range(steps):
            decoded(idle, slots, np.zeros(2, np.uint8), np.ones(2, np.uint8))
    # where the draft model takes longer to read it than all drafts are worth, nobody drafts
    slow = taught(Lookahead(rising(1.0, 0.01), rising(0.02, 0.04)), 0.9, 0.9)
    assert min(chosen(slow, 2)) > 0
    assert chosen(slow, 2, pending=256) == [0, 0]


def test_drafts_stay_within_the_budget():
    lookahead = taught(Lookahead(FLAT, None), 0.9, 0.9)
    assert sum(chosen(lookahead, 2, budget=8)) <= 6
    assert chosen(lookahead, 2, budget=1) == [0, 0]


@pytest.mark.parametrize("pace", [1.0, 1.5])
def test_drafts_stay_within_the_goal_where_it_can_be_held(pace):
    lookahead = taught(Lookahead(rising(1.0, 0.05), Costs([0.1] * 600)), 0.9, 0.9)
    lookahead.times.mean[0] = np.log(pace)
    free = chosen(lookahead, 2)
    for goal in (1.2, 1.4, 1.8):  # without drafts 1.1; a token more for both is 0.2, once the draft model has run
        some = chosen(lookahead, 2, goal=pace * goal)
        assert 1.0 + 0.05 * (2 + sum(some)) + 0.1 * max(some) <= goal and sum(some) <= sum(free)
    assert chosen(lookahead, 2, goal=pace * 1.4)[0] > 0 and chosen(lookahead, 2, goal=pace * 9) == free
    assert chosen(lookahead, 2, goal=pace * 1.0) == free, "it is missed in any case"


def test_what_a_request_allows_and_may_still_come_are_limits():
    numbers, drafts, slots = sequences(3)
    numbers[0, LIMIT] = 103  # two more behind the next
    drafts[1] = 1
    numbers[2, COMPUTED] = 10  # its prompt is not computed
    lookahead = taught(Lookahead(FLAT, None), 0.9, 0.9, 0.9)
    assert lookahead.choose(numbers, drafts, slots, 0, 512)[0][:3].tolist() == [2, 1, 0]


def test_first_drafts_are_short():
    numbers, drafts, slots = sequences(1)
    lookahead = taught(Lookahead(FLAT, None), 0.99)
    lookahead.group[:] = 0.0  # nothing is known of its kind
    lengths = []
    for yielded in range(1, 6):
        numbers[0, ASKED] = numbers[0, KNOWN] - yielded
        lengths.append(int(lookahead.choose(numbers, drafts, slots, 0, 512)[0][0]))
    assert lengths == [1, 5, 9, 13, MAX_DRAFT_TOKENS]


def test_first_drafts_beside_long_ones_are_long():
    numbers, drafts, slots = sequences(2)
    lookahead = taught(Lookahead(FLAT, None), 0.99, 0.99)
    lookahead.group[:] = 0.0
    numbers[0, ASKED] = numbers[0, KNOWN] - 1
    assert lookahead.choose(numbers, drafts, slots, 0, 512)[0][:2].tolist() == 2 * [MAX_DRAFT_TOKENS]
    numbers[1, ASKED] = numbers[1, KNOWN] - 1
    assert lookahead.choose(numbers, drafts, slots, 0, 512)[0][:2].tolist() == [1, 1]


def test_short_drafts_are_found_where_long_ones_of_equal_tokens_never_pay():
    """A second token each makes the step twice as long, and is as likely as the first."""
    steps = Costs([*[1.0] * 9, *[2.0 + n for n in range(600)]])
    assert chosen(taught(Lookahead(steps, Costs([0.3] * 600)), *4 * [0.97]), 4) == 4 * [1]


@pytest.mark.parametrize(("acceptance", "pays"), [(0.95, True), (0.3, False)])
def test_a_drafter_that_nobody_tried_is_tried_where_only_a_very_good_one_pays(acceptance, pays):
    """One token for each of 8 needs 78 % here to be worth its time."""
    lookahead, random = Lookahead(rising(1.0, 0.1), Costs([0.0] + [0.6] * 600)), np.random.default_rng(1)
    numbers, drafts, slots = sequences(8, most=1)
    drafting = []
    for _ in range(300):
        lengths = lookahead.choose(numbers, drafts, slots, 0, 512)[0].astype(np.uint8)
        decoded(lookahead, slots, lengths, 1 + lengths * (random.random(8) < acceptance).astype(np.uint8))
        drafting.append(int(lengths.sum()))
    assert drafting[0] == 8  # tried at once
    assert (np.mean(drafting[100:]) > 7) == pays and (pays or np.mean(drafting[20:]) < 0.5)


def test_bad_drafts_are_given_up_and_tried_again():
    lookahead = Lookahead(rising(1.0, 0.1), Costs([0.1] * 600))
    numbers, drafts, slots = sequences(1)
    lengths = []
    for _ in range(3000):
        length = int(lookahead.choose(numbers, drafts, slots, 0, 512)[0][0])
        observe_times(lookahead, length, 1.1 + 0.2 * length, 0.1 * length)
        decoded(lookahead, slots, np.array([length], np.uint8), np.array([1], np.uint8))  # always refused
        lengths.append(length)
    tried = [step for step, length in enumerate(lengths) if length]
    assert lengths[0] > 0 and len(tried) < 0.05 * len(lengths)
    assert max(tried) > 500  # never off for good


def test_bad_drafts_are_tried_in_a_row():
    """What one costs that finds the caches full of other things is not what they cost."""
    lookahead = taught(Lookahead(rising(1.0, 0.1), Costs([0.2] * 600)), 0.1)
    numbers, drafts, slots = sequences(1)
    rows, begun = [], False
    for _ in range(4000):
        length = int(lookahead.choose(numbers, drafts, slots, 0, 512)[0][0])
        observe_times(lookahead, length, 1.1 + 0.3 * length, 0.2 * length)
        decoded(lookahead, slots, np.array([length], np.uint8), np.array([1], np.uint8))
        if length:
            rows = [*rows[:-1], rows[-1] + 1] if begun else [*rows, 1]
        begun = length > 0
    assert len(rows) > 5 and min(rows[1:-1]) >= 3


def test_tokens_of_a_verification_share_what_they_read():
    """Behind 99 tokens a step takes 0.2 with one token, half of it to read; half as much again would not pay."""
    assert StepShape().add(1000, 5, True, 4).decode_context == 1000 + 4 * 10 * AGAIN < 1500
    lookahead = taught(Lookahead(Costs([0.1] * 600, context=0.1 / 99), None), 0.4)
    assert chosen(lookahead, 1)[0] > 0
    assert chosen(taught(Lookahead(rising(0.1, 0.1), None), 0.4), 1) == [0]


def test_what_drafting_really_takes_is_learnt():
    """Profiles said that drafts cost next to nothing, and they cost half a step each."""
    lookahead = taught(Lookahead(FLAT, Costs([0.02] * 600)), 0.8)
    (before,) = chosen(lookahead, 1)
    for _ in range(300):
        observe_times(lookahead, before, seconds=1.0 + 0.5 * before, draft_seconds=0.5 * before)
        observe_times(lookahead, 0, seconds=1.0)
    first, further = 0.02 * drafting_of(lookahead.times.mean)  # of passes: of one depth all that is known is their sum
    assert first + (before - 1) * further == pytest.approx(0.5 * before, rel=0.05)
    assert lookahead.verification(1.0, 1, 1 + before) == pytest.approx(1, rel=0.05)
    assert chosen(lookahead, 1)[0] <= 2 < before
    for _ in range(300):  # verdicts as long as a step
        for drafted in (2, 5, 12):
            observe_times(lookahead, drafted, seconds=2.0 + 0.5 * drafted, draft_seconds=0.5 * drafted)
            observe_times(lookahead, 0, seconds=1.0)
    assert lookahead.verification(1.0, 1, 3) == pytest.approx(2, rel=0.1)
    assert lookahead.times.pace == pytest.approx(1, rel=0.1)
    lookahead.spare[:] = 0.0
    assert chosen(lookahead, 1) == [0]


def test_what_is_done_once_a_step_makes_no_deep_draft_dear():
    """The first pass takes three times its profile, further ones what it says: drafts that go deep are worth it."""
    lookahead = taught(Lookahead(rising(0.4, 0.05), Costs([0.1] * 600)), 0.9)
    for _ in range(300):
        for drafted in (0, 1, 3):
            passes = 0.1 * (drafted + 2) if drafted else 0.0
            observe_times(lookahead, drafted, seconds=0.45 + 0.05 * drafted + passes, draft_seconds=passes)
    assert drafting_of(lookahead.times.mean) == pytest.approx([3, 1], rel=0.05)
    lookahead.spare[:] = 0.0
    (deep,) = chosen(lookahead, 1)
    lookahead.times.mean[1] += lookahead.times.mean[-1]
    lookahead.times.mean[-1] = 0.0
    (by_one_factor,) = chosen(lookahead, 1)
    assert deep >= 4 > 1 >= by_one_factor


def test_a_machine_that_was_slow_for_a_while_does_not_end_drafts():
    lookahead = taught(Lookahead(FLAT, Costs([0.1] * 600)), 0.8)
    numbers, drafts, slots = sequences(1)
    choices = []
    for step in range(400):
        length = lookahead.choose(numbers, drafts, slots, 0, 512)[0][:1].astype(np.uint8)
        slow = 3.0 if 50 <= step < 100 else 1.0
        draft = 0.1 * int(length[0])
        lookahead.observe_times(slots, length, 0, slow * (1 + draft), slow * draft)
        decoded(lookahead, slots, length, 1 + length)
        choices.append(int(length[0]))
    # but for tries of none
    assert np.mean(np.array(choices[20:50]) >= 4) > 0.9 and np.mean(np.array(choices[200:]) >= 4) > 0.98


@pytest.mark.parametrize("drafts_take", [0.7, 1.4])
def test_what_profiles_say_wrongly_is_found_out_though_steps_are_noisy(drafts_take):
    """By profiles four tokens in a step of 1.65 are level with one in a step of 0.45. Really drafts are better, or
    worse, and what is better is done, from whichever side one comes."""
    random = np.random.default_rng(7)
    for believed in (0.7, 1.4):
        lookahead = taught(Lookahead(rising(0.4, 0.05), Costs([0.35] * 600)), 0.999)
        lookahead.times.mean[1:3] = np.log(believed)
        numbers, drafts, slots = sequences(1, most=3)
        lengths = []
        for _ in range(4000):
            length = lookahead.choose(numbers, drafts, slots, 0, 512)[0][:1].astype(np.uint8)
            took, draft = np.exp(0.15 * random.standard_normal(2)) * [0.45 + 0.05 * length[0], 0.35 * length[0]]
            if length[0]:
                took, draft = drafts_take * took, drafts_take * draft
            lookahead.observe_times(slots, length, 0, took + draft, draft)
            decoded(lookahead, slots, length, 1 + length)
            lengths.append(int(length[0]))
        drafting = np.mean(np.array(lengths[1000:]) > 0)
        assert drafting > 0.9 if drafts_take < 1 else drafting < 0.1


def test_wide_steps_are_tried_where_narrow_ones_do_not_pay():
    """By the profile drafts do not pay, the less the more there are. Really more than 16 tokens take half of it."""
    random = np.random.default_rng(5)
    lookahead = taught(Lookahead(rising(0.1, 0.2), Costs([0.02] * 600)), *8 * [0.6])
    numbers, drafts, slots = sequences(8, most=4)
    lengths = []
    for _ in range(1000):
        length = lookahead.choose(numbers, drafts, slots, 0, 512)[0].astype(np.uint8)
        width, refused = len(slots) + int(length.sum()), random.random((8, 5)) >= 0.6
        refused[:, 4] = True
        took, draft = (0.1 + 0.2 * width) * (0.5 if width > 16 else 1.0), 0.02 * int(length.max())
        lookahead.observe_times(slots, length, 0, took + draft, draft)
        decoded(lookahead, slots, length, 1 + np.minimum(length, refused.argmax(1)).astype(np.uint8))
        lengths.append(int(length.max()))
    assert lengths[0] == 0 and np.mean(np.array(lengths[500:]) >= 2) > 0.9


def test_what_steps_of_one_width_take_says_less_of_others():
    """Eight tokens take half as long again as the profile says, 40 what it says: that is seen, and then done."""
    lookahead = taught(Lookahead(FLAT, Costs([0.01] * 600)), *8 * [0.99])
    numbers, drafts, slots = sequences(8, most=4)
    lengths = []
    for _ in range(600):
        length = lookahead.choose(numbers, drafts, slots, 0, 512)[0].astype(np.uint8)
        slow = 1.5 if length.max() == 1 else 1.0
        lookahead.observe_times(slots, length, 0, slow + 0.01 * int(length.max()), 0.01 * int(length.max()))
        decoded(lookahead, slots, length, 1 + length)
        lengths.append(int(length.max()))
    assert np.mean(np.array(lengths[100:]) == 4) > 0.95
    for _ in range(50):
        lookahead.observe_times(slots, np.full(8, 1, np.uint8), 0, 1.51, 0.01)
    assert lookahead.verification(1.0, 8, 16) / lookahead.verification(1.0, 8, 40) == pytest.approx(1.5, rel=0.1)


def test_what_steps_of_some_sequences_take_says_less_of_others():
    """Of sixteen tokens: four sequences' take what the profile says, eight sequences' a third longer."""
    lookahead = Lookahead(FLAT, Costs([0.01] * 600))
    for count, seconds in [(4, 1.0), (8, 1.33)]:
        for _ in range(100):
            lookahead.observe_times(np.arange(count), np.zeros(count, np.uint8), 0, 1.0, 0.0)
            lookahead.observe_times(np.arange(count), np.full(count, 16 // count - 1, np.uint8), 0, seconds, 0.0)
    assert lookahead.verification(1.0, 8, 16) == pytest.approx(1.33, rel=0.05)
    assert lookahead.verification(1.0, 4, 16) == pytest.approx(1.0, rel=0.05)


def test_a_width_that_seemed_slow_is_tried_again():
    """Twelve tokens in a step took half as long again, and do no more: two are drafted for each of four."""
    lookahead = taught(Lookahead(FLAT, Costs([0.05] * 600)), *4 * [0.9])
    numbers, drafts, slots = sequences(4, most=2)
    for _ in range(20):
        for length, seconds in [(0, 1.0), (1, 1.0), (2, 1.5)]:
            observed = np.full(4, length, np.uint8)
            lookahead.observe_times(slots, observed, 0, seconds + 0.05 * length, 0.05 * length)
    lookahead.spare[:] = 0.0
    lengths = []
    for _ in range(3000):
        length = lookahead.choose(numbers, drafts, slots, 0, 512)[0][:4].astype(np.uint8)
        lookahead.observe_times(slots, length, 0, 1.0 + 0.05 * int(length.max()), 0.05 * int(length.max()))
        decoded(lookahead, slots, length, 1 + length)
        lengths.append(int(length.max()))
    assert np.mean(np.array(lengths[:20]) == 1) > 0.5 and np.mean(np.array(lengths[-500:]) == 2) > 0.9


def test_a_width_that_is_hardly_worse_does_not_begin_in_place_of_the_best():
    """Seven drafted tokens seem to cost 4 % more than eight: each try is cheap, all of them are not."""
    lookahead = taught(Lookahead(rising(1.0, 0.12), Costs([0.1] * 600)), 0.999)
    numbers, drafts, slots = sequences(1, most=8)
    lengths = []
    for _ in range(100):
        length = lookahead.choose(numbers, drafts, slots, 0, 512)[0][:1].astype(np.uint8)
        draft, took = 0.1 * int(length[0]), 1.12 + 0.12 * int(length[0])
        lookahead.observe_times(slots, length, 0, took + draft, draft)
        decoded(lookahead, slots, length, 1 + length)
        lengths.append(int(length[0]))
    assert 1 <= lengths.count(7) <= 20 and lengths.count(8) >= 70


def test_tries_take_a_small_share_of_the_time():
    """Drafts take 20 % more for a token than none, as everybody knows."""
    lookahead = taught(Lookahead(rising(0.4, 0.05), Costs([0.45] * 600)), 0.999)
    numbers, drafts, slots = sequences(1, most=3)
    tokens, seconds, tried = 0, 0.0, 0
    for _ in range(10_000):
        length = lookahead.choose(numbers, drafts, slots, 0, 512)[0][:1].astype(np.uint8)
        draft, took = 0.45 * int(length[0]), 0.45 + 0.05 * int(length[0])
        lookahead.observe_times(slots, length, 0, took + draft, draft)
        decoded(lookahead, slots, length, 1 + length)
        tokens, seconds, tried = tokens + 1 + int(length[0]), seconds + took + draft, tried + int(length[0] > 0)
    assert tried > 5 and tokens / seconds > 0.995 / 0.45


def test_catching_up_is_not_held_against_drafts():
    """A draft model that has not drafted for a hundred tokens reads them first."""
    costs = Costs([0.0, *[0.1 + 0.01 * n for n in range(600)]])
    lookahead = taught(Lookahead(FLAT, costs), 0.8)
    none, two = np.array([0], np.uint8), np.array([2], np.uint8)
    slots = np.array([0])
    lookahead.forget(0)
    lookahead.observe(slots, np.array([50]), none, 1 + none)  # a prompt, whose first token was not read
    for _ in range(20):
        for _ in range(100):
            lookahead.observe_times(slots, none, 0, 1.0, 0.0)
            decoded(lookahead, slots, none, 1 + none)
        assert lookahead.unread[0] == 101
        draft = costs.linear[101] + costs.linear[1]
        lookahead.observe_times(slots, two, 0, 1.0 + draft, draft)
        decoded(lookahead, slots, two, 1 + none)
        assert lookahead.unread[0] == 1
    assert drafting_of(lookahead.times.mean) == pytest.approx(1, rel=1e-3)
    decoded(lookahead, slots, two, 1 + two)
    assert lookahead.unread[0] == 2


def test_prompts_are_followed_while_somebody_drafts():
    """Then a prompt leaves its first token to be read; later the whole prompt, chunk after chunk, but now and then."""
    lookahead, slots, none = Lookahead(FLAT, FLAT), np.array([0]), np.array([0], np.uint8)

    def prompt() -> int:
        lookahead.forget(0)
        for length, emitted in [(50, 0), (30, 1)]:
            lookahead.observe(slots, np.array([length]), none, none + emitted)
        return int(lookahead.unread[0])

    assert prompt() == 1
    for _ in range(FOLLOWED):
        lookahead.observe(slots, np.array([1]), none, none + 1)
    assert prompt() == 81
    for _ in range(FOLLOWED_OF - FOLLOWED):
        lookahead.observe(slots, np.array([1]), none, none + 1)
    assert prompt() == 1
    for _ in range(FOLLOWED):
        lookahead.observe(slots, np.array([1]), none, none + 1)
    assert prompt() == 81
    lookahead.observe(slots, np.array([1]), none + 1, none + 1)
    assert lookahead.unread[0] == 1 and prompt() == 1


def test_catching_up_is_worth_it_where_enough_is_to_come():
    """Reading 300 tokens takes three steps, and drafts save a tenth of a step or two."""
    lookahead = taught(Lookahead(rising(1.0, 0.2), Costs([0.0, *[0.2 + 0.01 * n for n in range(600)]])), 0.7)
    numbers, drafts, slots = sequences(1)
    numbers[0, [ASKED, PROMPT]], numbers[0, [COMPUTED, KNOWN]] = 50, [349, 350]
    drafted = []
    for unread, limit in [(1, 360), (301, 360), (301, 10_000)]:
        lookahead.unread[0], numbers[0, LIMIT] = unread, limit
        drafted.append(int(lookahead.choose(numbers, drafts, slots, 0, 512)[0][0]) > 0)
    assert drafted == [True, False, True]


def test_one_sequence_tries_for_all():
    """Where all would have too much to catch up with, and drafts do not seem worth it."""
    lookahead = taught(Lookahead(FLAT, Costs([0.0, *[2 + 0.01 * n for n in range(600)]])), *[0.8] * 4)
    lookahead.unread[:4] = [101, 101, 21, 101]
    assert chosen(lookahead, 4) == [0, 0, 0, 0]
    lookahead.spare[:] = 3.0, 0.0
    of_each = chosen(lookahead, 4)
    assert of_each[2] > 0 and not of_each[0] + of_each[1] + of_each[3]
    assert 0 < lookahead.spare[0] < 1.5


def test_draft_models_catch_up_within_goals():
    """A few at a time, until all draft; without a goal all of them at once."""
    draft, goal, count = Costs([0.0, *[0.002 * n for n in range(1, 600)]]), 1.5, 3
    lookahead = taught(Lookahead(FLAT, draft), *[0.8] * count)
    numbers, most, slots = sequences(count, 4)
    unread = np.array([101, 101, 401])
    none, catching_up = np.zeros(count, np.uint8), []
    lookahead.unread[:count] = unread
    assert all(chosen(lookahead, count, most=4))
    for _ in range(3):
        lengths, seconds = lookahead.choose(numbers, most, slots, 0, 512, goal)
        drafted = lengths[:count].astype(np.uint8)
        unread = int(lookahead.unread[slots[drafted > 0]].sum())
        first, further, _ = expected(drafted, unread, 0, *lookahead._target, *lookahead._draft)
        assert seconds == pytest.approx(first + further) and 1.0 + seconds <= goal
        catching_up.append(unread)
        decoded(lookahead, slots, drafted, 1 + none)
    assert catching_up[:2] == [202, 2] and lengths[:count].tolist() == [4, 4, 0]
    lookahead.unread[2] = 51
    assert all(chosen(lookahead, count, most=4, goal=goal))


def test_a_new_sequence_does_not_inherit_its_slots_past():
    lookahead = Lookahead(rising(1.0, 0.15), Costs([0.1] * 600))
    numbers, drafts, slots = sequences(2)
    lookahead.choose(numbers, drafts, slots, 0, 512)
    for _ in range(30):
        decoded(lookahead, slots, np.array([4, 4], np.uint8), np.array([1, 5], np.uint8))
    bad, good = chosen(lookahead, 2)
    lookahead.forget(0)
    new, other = chosen(lookahead, 2)
    assert bad < new <= other and bad < good


def test_a_new_sequence_is_believed_to_be_like_others_of_its_kind():
    """Greedy ones and those at temperature 1 agree with drafts to different degrees."""
    assert [SamplingParams(temperature=t).kind for t in (0.0, 0.3, 0.8, 1.0, 1.5)] == [0, 1, 2, 2, 3]
    greedy, warm = (SamplingParams(temperature=t).kind for t in (0.0, 1.0))
    lookahead = Lookahead(rising(1.0, 0.15), Costs([0.1] * 600))
    _, _, slots = sequences(2)
    for kinds in ((greedy, warm), (warm, greedy)):
        for slot, kind in zip(slots, kinds, strict=True):
            lookahead.forget(slot, kind)
        new = chosen(lookahead, 2)
        emitted = np.array([5 if kind == greedy else 1 for kind in kinds], np.uint8)
        for _ in range(30):
            decoded(lookahead, slots, np.array([4, 4], np.uint8), emitted)
    assert new[0] < new[1], "as the kind of each has shown, whatever its slot"
    for kind in (greedy, warm):
        for slot in slots:
            lookahead.forget(slot, kind)
        assert len(set(chosen(lookahead, 2))) == 1


def test_seconds_are_those_of_the_draft_models_passes():
    lookahead = taught(Lookahead(FLAT, Costs([0.0, 0.1, 0.15, *[1.0] * 600])), 0.9, 0.9)
    numbers, drafts, slots = sequences(2, most=3)
    lengths, seconds = lookahead.choose(numbers, drafts, slots, 0, 512)
    assert lengths[:2].tolist() == [3, 3] and seconds == pytest.approx(0.45)


@pytest.mark.parametrize(("there", "drafted"), [(1.0, [1, 1, 1, 1]), (0.2, [0, 0, 0, 0])])
def test_a_drafter_that_seldom_finds_anything_has_to_pay_for_the_others(there: float, drafted: list[int]):
    """Half of what is found stays. A step with any draft takes a fifth longer: half a token for each of four sequences
    is worth it, a tenth is not."""
    lookahead = taught(Lookahead(FLAT, None), *[0.5] * 4)
    lookahead.times.mean[2] = np.log(1.2)
    lookahead.counts[:4, :, -1] = 1000 * there, 1000
    lookahead.spare[:] = 0.0
    assert chosen(lookahead, 4, most=1) == drafted


def test_what_was_asked_for_and_not_found_is_remembered():
    lookahead, one = Lookahead(FLAT, None), np.ones(1, np.int64)
    nothing, something = np.zeros(1, np.uint8), np.full(1, 3, np.uint8)
    for drafted in (nothing, nothing, something, nothing):
        lookahead.observe(np.zeros(1, np.int64), one, drafted, drafted + 1, 3 * one)
    known = lookahead.group[0, :, -1].tolist()
    assert known == pytest.approx([1, 4], rel=0.02)
    lookahead.observe(np.zeros(1, np.int64), one, nothing, nothing + 1, 0 * one)
    assert lookahead.group[0, :, -1].tolist() == known, "nothing was asked for"


def test_a_group_where_nobody_drafts_rests():
    lookahead, other = (taught(Lookahead(rising(1.0, 1.0), Costs([0.9] * 600)), 0.1, 0.1) for _ in range(2))
    numbers, drafts, slots = sequences(2, 8)
    tokens, none = np.ones(2, np.uint8), np.zeros(2, np.uint8)
    for one in (lookahead, other):
        one.spare[:] = 0.0
        one.observe_times(slots, none, 0, 1.0, 0.0)  # from now on tries are saved for
        one.spare[:] = 0.0
        one.forget(7)  # whatever it was asked before
    asked = 0
    for _ in range(27):
        if not (resting := lookahead.rests(slots, 0)):
            asked += 1
            assert not lookahead.choose(numbers, drafts, slots, 0, 512)[0].any()
        lookahead.composed(resting)
        if not lookahead.rested(slots, True, 1.0):
            lookahead.observe_times(slots, none, 0, 1.0, 0.0)
            decoded(lookahead, slots, none, tokens)
        other.observe_times(slots, none, 0, 1.0, 0.0)
        decoded(other, slots, none, tokens)
    assert asked == 27 // (REST + 1)
    lookahead.forget(5)
    other.forget(5)
    for name in ("counts", "group", "unread", "idle"):
        assert getattr(lookahead, name) == pytest.approx(getattr(other, name), rel=1e-9), name
    assert lookahead.spare == pytest.approx(other.spare) and lookahead.spare[0] > 0


@pytest.mark.parametrize("what", ["prompt", "newcomer", "leaver", "slot"])
def test_a_rest_ends_where_anything_changes(what: str):
    lookahead = taught(Lookahead(rising(1.0, 1.0), Costs([0.9] * 600)), 0.1, 0.1)
    numbers, drafts, slots = sequences(2, 8)
    lookahead.spare[:] = 0.0
    lookahead.choose(numbers, drafts, slots, 0, 512)
    assert lookahead.rests(slots, 0)
    if what == "slot":
        lookahead.forget(1)
    running = {"newcomer": np.arange(3), "leaver": slots[:1]}.get(what, slots)
    assert not lookahead.rests(running, 7 * (what == "prompt"))


def test_a_step_that_was_chosen_for_is_observed_whatever_became_of_those_at_rest():
    """Their sequence left meanwhile, and so nobody said that they are done."""
    lookahead = taught(Lookahead(rising(1.0, 1.0), Costs([0.9] * 600)), 0.1)
    numbers, drafts, slots = sequences(1, 8)
    lookahead.spare[:] = 0.0
    lookahead.choose(numbers, drafts, slots, 0, 512)
    lookahead.composed(False)
    assert lookahead.rests(slots, 0)
    lookahead.composed(True)
    lookahead.choose(numbers, drafts, slots, 0, 512)
    lookahead.composed(False)
    assert not lookahead.rested(slots, True, 1.0)
