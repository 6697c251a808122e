"""How many tokens are drafted: the best by the formula, none where they cost more than they yield, and back again."""

from itertools import product

import numpy as np
import pytest

from paceline.core.request import COMPUTED, KNOWN, LIMIT, MAX_DRAFT_TOKENS, NUM_COLUMNS, PROMPT
from paceline.speculation.lookahead import Costs, Lookahead

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
        lookahead.observe(slots, drafted, np.array(emitted, np.uint8))
    # what a sequence remembers is short, and a test wants the long run
    for slot, a in zip(slots, acceptance, strict=True):
        lookahead.counts[slot, 1] = 1000
        lookahead.counts[slot, 0] = 1000 * a
    return lookahead


def chosen(
    lookahead: Lookahead, count: int, pending: int = 0, budget: int = 512, most: int = 16, goal: float = np.inf
) -> list[int]:
    numbers, drafts, slots = sequences(count, most)
    return lookahead.choose(numbers, drafts, slots, pending, budget, goal)[0][:count].tolist()


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


def test_drafts_stay_within_the_budget():
    lookahead = taught(Lookahead(FLAT, None), 0.9, 0.9)
    assert sum(chosen(lookahead, 2, budget=8)) <= 6
    assert chosen(lookahead, 2, budget=1) == [0, 0]


@pytest.mark.parametrize("pace", [1.0, 1.5])
def test_drafts_stay_within_the_goal_where_it_can_be_held(pace):
    lookahead = taught(Lookahead(rising(1.0, 0.05), Costs([0.1] * 600)), 0.9, 0.9)
    lookahead.pace = pace
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


@pytest.mark.parametrize(("acceptance", "pays"), [(0.95, True), (0.3, False)])
def test_a_drafter_that_nobody_tried_is_tried_where_only_a_very_good_one_pays(acceptance, pays):
    """One token for each of 8 needs 78 % here to be worth its time."""
    lookahead, random = Lookahead(rising(1.0, 0.1), Costs([0.0] + [0.6] * 600)), np.random.default_rng(1)
    numbers, drafts, slots = sequences(8, most=1)
    drafting = []
    for _ in range(300):
        lengths = lookahead.choose(numbers, drafts, slots, 0, 512)[0].astype(np.uint8)
        lookahead.observe(slots, lengths, 1 + lengths * (random.random(8) < acceptance).astype(np.uint8))
        drafting.append(int(lengths.sum()))
    assert drafting[0] == 8  # tried at once
    assert (np.mean(drafting[100:]) > 7) == pays and (pays or np.mean(drafting[20:]) < 0.5)


def test_bad_drafts_are_given_up_and_tried_again():
    lookahead = Lookahead(rising(1.0, 0.1), Costs([0.1] * 600))
    numbers, drafts, slots = sequences(1)
    lengths = []
    for _ in range(3000):
        length = int(lookahead.choose(numbers, drafts, slots, 0, 512)[0][0])
        lookahead.observe(slots, np.array([length], np.uint8), np.array([1], np.uint8))  # always refused
        lengths.append(length)
    tried = [step for step, length in enumerate(lengths) if length]
    assert lengths[0] > 0 and len(tried) < 0.05 * len(lengths)
    assert max(tried) > 500  # never off for good


def test_what_drafting_really_takes_is_learnt():
    """Profiles said that drafts cost next to nothing, and they cost half a step each."""
    lookahead = taught(Lookahead(FLAT, Costs([0.02] * 600)), 0.8)
    (before,) = chosen(lookahead, 1)
    for _ in range(300):
        drafted = np.array([before], np.uint8)
        lookahead.observe_times(drafted, 0, seconds=1.0 + 0.5 * before, draft_seconds=0.5 * before)
    assert lookahead.drafting == pytest.approx(25, rel=0.05) and lookahead.verifying == pytest.approx(1, rel=0.05)
    assert chosen(lookahead, 1)[0] <= 2 < before
    for _ in range(300):  # verdicts as long as a step
        lookahead.observe_times(np.array([2], np.uint8), 0, seconds=3.0, draft_seconds=1.0)
        lookahead.observe_times(np.array([0], np.uint8), 0, seconds=1.0, draft_seconds=0.0)
    assert lookahead.verifying == pytest.approx(2, rel=0.1) and lookahead.pace == pytest.approx(1, rel=0.1)
    assert chosen(lookahead, 1) == [0]


def test_a_machine_that_was_slow_for_a_while_does_not_end_drafts():
    lookahead = taught(Lookahead(FLAT, Costs([0.1] * 600)), 0.8)
    numbers, drafts, slots = sequences(1)
    choices = []
    for step in range(400):
        length = lookahead.choose(numbers, drafts, slots, 0, 512)[0][:1].astype(np.uint8)
        slow = 3.0 if 50 <= step < 100 else 1.0
        draft = 0.1 * int(length[0])
        lookahead.observe_times(length, 0, slow * (1 + draft), slow * draft)
        lookahead.observe(slots, length, 1 + length)
        choices.append(int(length[0]))
    assert min(choices[:50]) >= 4 and min(choices[200:]) >= 4


def test_a_new_sequence_does_not_inherit_its_slots_past():
    lookahead = Lookahead(rising(1.0, 0.06), Costs([0.1] * 600))
    numbers, drafts, slots = sequences(2)
    lookahead.choose(numbers, drafts, slots, 0, 512)
    for _ in range(30):
        lookahead.observe(slots, np.array([4, 4], np.uint8), np.array([1, 5], np.uint8))
    bad, good = chosen(lookahead, 2)
    lookahead.forget(0)
    new, other = chosen(lookahead, 2)
    assert bad < new <= other and bad < good


def test_seconds_are_those_of_the_draft_models_passes():
    lookahead = taught(Lookahead(FLAT, Costs([0.0, 0.1, 0.15, *[1.0] * 600])), 0.9, 0.9)
    numbers, drafts, slots = sequences(2, most=3)
    lengths, seconds = lookahead.choose(numbers, drafts, slots, 0, 512)
    assert lengths[:2].tolist() == [3, 3] and seconds == pytest.approx(0.45)
