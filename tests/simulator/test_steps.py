"""The compiled simulation against the controller in virtual time: the same tokens at the same times, to the bit."""

import itertools
import operator
import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from paceline.batching.budget import GoalBudget
from paceline.batching.config import SchedulerConfig
from paceline.batching.policies import POLICIES
from paceline.batching.state import ADAPTIVE, BESIDE, MARGIN, PACE, SHARE, SHARED, WAITS, WIDE, State
from paceline.compiled import Handle, plain
from paceline.controller import Controller, GroupConfig
from paceline.core.batch import Batch, StepResult, StepShape, follows
from paceline.core.events import Unreachable
from paceline.core.request import SLO, Request
from paceline.latency.step_time import BEFORE, NO_INTERFERENCE, OTHERS, WIDTHS, StepTime
from paceline.simulator import steps
from paceline.simulator.drafts import SimulatedDrafts, chance
from paceline.simulator.driver import FixedOutputs, simulate
from paceline.simulator.world import Requests, SimulatedGroup, empty_states
from paceline.speculation.costs import Costs, expected
from paceline.speculation.lookahead import Lookahead

# dyadic, so that instants coincide
FAST = StepTime(tuple(0.25 + n / 8 for n in range(33)), 2**-6, 2**-7, 2**-12, 2**-6, 2**-12, 2**-16)
SLOW = StepTime(tuple(1.0 + n / 4 for n in range(33)), 2**-6, 2**-7, 2**-12, 2**-6, 2**-12, 2**-16)
GOAL = GoalBudget(FAST.linear, FAST.terms, 4, 16, 64, tbt=2.0, margin=0.125)
MODELS = "abcde"
SMALL = Costs(FAST.linear, 2**-6, 2**-12).scaled(2**-3)
DRAFTS = [
    SimulatedDrafts(3, 0.75, SMALL), SimulatedDrafts(4, 0.5, SMALL, adaptive=False), SimulatedDrafts(8, 0.75), None,
]  # fmt: skip
SPREAD = (0.5, 0.75, 1.0, 1.5, 1.25)
INTERFERENCE = tuple(0.5 + n / 8 for n in range(len(NO_INTERFERENCE)))
TIGHT = replace(GOAL, tbt=FAST.seconds(StepShape(3, 3, 3, 60)))  # few may decode together


class Fixed(Lookahead):
    """Chooses nothing, and knows what draft models have read."""

    def choose(self, numbers, drafts, running, pending, budget, goal=np.inf):
        return drafts, 0.0


def fleets(policy: str, rng: random.Random, drafts: SimulatedDrafts | None) -> list[SimulatedGroup]:
    """Two hosts of one model, one with little memory; two models that share a device with stages, and an encoder."""

    admission, lends = rng.random() < 0.5, rng.random() < 0.5
    interference, slots, cold = (NO_INTERFERENCE, None, {}) if lends else (INTERFERENCE, 1, {"resident": False})

    def group(
        model: str, model_time: StepTime, share: float = 1.0, lent: int = 0, drafts: SimulatedDrafts | None = None,
        overhead_s: float = 0.0, spread: tuple[float, ...] = (), **options,
    ) -> SimulatedGroup:
        blocks = rng.choice([15, 20, 200])
        limits = SchedulerConfig(
            token_budget=rng.choice([8, 24, 64]), max_batch=rng.choice([3, 8]), block_size=4, num_blocks=blocks,
            watermark=rng.choice([0.0, 0.1]), max_num_batched_tokens=48, most_blocks=blocks + lent if lent else None,
        )  # fmt: skip
        options = {"policy": policy} | options
        if drafts:
            lookahead = (Lookahead if drafts.adaptive else Fixed)(Costs.of(model_time), drafts.costs)
            options["lookahead"] = lambda: lookahead
        budget = options.get("budget")
        if budget and spread:  # it learns
            options["predict"] = StepTime(budget.linear, *budget.terms).seconds
        config = GroupConfig((model,), limits, admission=admission, **options)
        return SimulatedGroup(config, model_time, share, drafts, overhead_s, spread, interference)

    return [
        group("a", FAST, budget=rng.choice([None, GOAL, TIGHT]), spread=SPREAD[:3]),
        group("a", SLOW, pipeline=2, share=0.5, overhead_s=2**-5, budget=rng.choice([None, GOAL.of_share(2.0)])),
        group("b", SLOW, pipeline=3, share=0.25, device=7, lent=20, block_bytes=(3000, 2000) * lends),
        group(
            "c", FAST, pipeline=3, share=0.5, device=7, budget=rng.choice([None, GOAL, TIGHT]), lent=40,
            block_bytes=(2000, 2000) * lends,
        ),
        group("b", FAST, device=9, slots=slots, load_s=0.75, spread=SPREAD, **cold),
        group("e", FAST, device=9, slots=slots, load_s=1.5, drafts=drafts, budget=rng.choice([None, GOAL])),
        group("d", FAST, pipeline=3, share=0.5, device=7, budget=rng.choice([None, GOAL]), policy="prefill_first"),
    ]


def simulated(groups: list[SimulatedGroup], requests: list[Request]):
    """By the controller: owner, token times, (group, tokens, when it left each stage) of every step, and what groups
    have learnt."""
    taken, coming, engine, spans = [], Counter(), {}, {r.id: [] for r in requests}
    owner, seen, numbers, latest = dict.fromkeys(spans, -1), set(), [0] * len(groups), {}

    def latency(batch: Batch) -> float:
        group, number = groups[batch.group], numbers[batch.group]
        numbers[batch.group] += 1
        seconds = group.share * group.step_time.seconds(batch.shape)
        coming[batch.group] -= 1
        if group.spread:
            seconds *= group.spread[int(plain(chance)(number, batch.group) * len(group.spread))]
        apart = np.reshape(group.interference, (len(OTHERS), len(BEFORE), len(WIDTHS)))
        others, before = others_busy(batch.group), latest.get(lane(group), batch.group) != batch.group
        latest[lane(group)] = batch.group
        if group.interference == INTERFERENCE:
            seen.add((OTHERS[others], BEFORE[before]))
            seconds *= apart[int(others), int(before), np.searchsorted(WIDTHS, batch.num_tokens, "right") - 1]
        engine[batch.group, batch.id] = seconds
        return seconds + group.overhead_s + drafting(group, batch)

    def results(batch: Batch) -> StepResult:
        result = outputs(batch)
        if groups[batch.group].config.predict:
            result.seconds = engine[batch.group, batch.id]
        if controller.groups[batch.group].scheduler.state.factors[PACE] != 1:
            seen.add("paced")
        if controller.groups[batch.group].scheduler.state.factors[WAITS] > 0:
            seen.add("waited")
        return result

    def others_busy(group: int) -> bool:
        """Whether other devices, or stages of this one, have a step that was sent before, in this turn or earlier."""
        mine = lane(groups[group])
        stages = max(g.config.pipeline for g in groups if lane(g) == mine)
        return any(
            len(state.scheduler.flying) - coming[at] - (at == group) > 0
            for at, state in enumerate(controller.groups) if stages > 1 or lane(groups[at]) != mine
        )  # fmt: skip

    def lane(group: SimulatedGroup) -> object:
        return id(group) if group.config.device is None else group.config.device

    def turn(inputs: list, now: float) -> tuple[list, list[Batch]]:
        events, batches = Controller.turn(controller, inputs, now)
        coming.update(batch.group for batch in batches)
        return events, batches

    def watch(batch: Batch, stages: list[tuple[float, float]]) -> None:
        if batch.drafts:
            seen.add("chosen" if groups[batch.group].drafts.adaptive else "drafted")
        taken.append((batch.group, batch.num_tokens, *(end for _, end in stages)))

    def stay(request: str, drafted: int) -> int:
        rate = next(g.drafts.acceptance for g in groups if g.drafts) if drafted else 0.0
        chances = (plain(chance)(int(request), outputs.left[request] - count) for count in range(drafted))
        return sum(itertools.takewhile(bool, (chance < rate for chance in chances)))

    outputs = FixedOutputs({r.id: r.max_tokens for r in requests}, stay)
    controller = Controller([g.config for g in groups])
    controller.turn = turn
    for state in controller.groups:
        state.scheduler.state.limits[ADAPTIVE] &= not isinstance(state.scheduler.lookahead, Fixed)
    events = simulate(controller, requests, latency, results, watch=watch)
    for event in events:
        if event.kind == "accepted":
            owner[event.request] = event.group
        elif isinstance(event.detail, Unreachable):
            seen.add(event.detail.what)
        elif event.kind == "tokens":
            for request, tokens in zip(event.detail.requests, event.detail.tokens, strict=True):
                spans[request] += [event.time] * tokens
    known = [learnt(one.scheduler.state, group) for one, group in zip(controller.groups, groups, strict=True)]
    return owner, spans, taken, known, seen | {event.kind for event in events}


def learnt(state: State, group: SimulatedGroup) -> list[float]:
    """Who has its device for itself does not keep count of it."""
    shared = [SHARE, SHARED] if group.config.device is not None else []
    return state.factors[[PACE, WIDE, MARGIN, BESIDE, WAITS, *shared]].tolist()


def drafting(group: SimulatedGroup, batch: Batch) -> float:
    """Seconds of a step's drafts, and of reading its prompts."""
    if not group.drafts:
        return 0.0
    target, own = ((np.array(one.linear), one.token, one.context) for one in costs_of(group))
    lookahead, prompts = group.config.lookahead(), sum(n for n in batch.lengths[batch.num_decodes :] if n > 1)
    if not batch.drafts:
        return seconds(own[0], prompts) if prompts and follows(int(lookahead.idle[0]) + lookahead._rested + 1) else 0.0
    rows = zip(batch.starts, batch.drafts, batch.sequences, strict=True)
    drafted = [(start, k, sequence.slot) for start, k, sequence in rows if k]
    unread = sum(lookahead.unread[slot] for *_, slot in drafted)
    counts, read = np.array([k for _, k, _ in drafted], np.uint8), sum(start for start, *_ in drafted)
    more = seconds(own[0], len(drafted) + prompts) - seconds(own[0], len(drafted))
    return sum(expected(counts, int(unread), read, *target, *own)[:2]) + max(0.0, more)


def seconds(linear: np.ndarray, tokens: int) -> float:
    """Of a pass of so many tokens."""
    last = len(linear) - 1
    return linear[tokens] if tokens <= last else linear[last] * tokens / max(last, 1)


def costs_of(group: SimulatedGroup) -> tuple[Costs, Costs]:
    """Of its model and its drafts."""
    return Costs.of(group.step_time), (group.drafts.costs or Costs([0.0])).drafting


def workload(policy: str, seed: int) -> tuple[list[SimulatedGroup], list[Request]]:
    rng = random.Random(seed)
    groups, arrival, requests = fleets(policy, rng, DRAFTS[seed % len(DRAFTS)]), 0.0, []
    for index in range(140):
        arrival += rng.choice([0.0, 0.25, 1.0, 6.0])
        slo = SLO(rng.choice([None, 0.5, 8.0]), rng.choice([None, 1.0, 4.0]))
        model, size = rng.choice(MODELS), (rng.choice([1, 5, 16, 40, 70]), rng.randint(1, 12))
        most = next((g.drafts.most for g in groups if g.drafts and model == "e"), 0)
        outputs = 1 if model == "d" else size[1]
        requests.append(Request(str(index), size[0], outputs, arrival, model, slo, max_draft_tokens=most))
    return groups, requests


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("seed", [0, 1, 6, 14, 15, *(pytest.param(n, marks=pytest.mark.slow) for n in range(2, 6))])
def test_it_decides_as_the_controller_does(policy, seed, monkeypatch):
    groups, requests = workload(policy, seed)
    owner, times, taken, known, _ = simulated(groups, requests)
    states = list[Handle]()
    monkeypatch.setattr(steps, "empty_states", lambda *given: states.extend(empty_states(*given)) or states)
    goals = [[np.inf if g is None else g for g in (r.slo.ttft, r.slo.tbt)] for r in requests]
    columns = Requests(
        np.array([r.arrival for r in requests]), np.array([MODELS.index(r.model) for r in requests]),
        np.array([r.prompt_tokens for r in requests]), np.array([r.max_tokens for r in requests]),
        *np.array(goals).T.copy(),
    )  # fmt: skip
    served, ran = steps.run(groups, MODELS, columns)
    assert [learnt(state.fields, group) for state, group in zip(states, groups, strict=True)] == known
    assert served.owner.tolist() == list(owner.values())
    for index, of_one in enumerate(times.values()):
        if of_one:
            assert (served.first[index], served.finish[index]) == (of_one[0], of_one[-1])
        assert served.tokens[index] == len(of_one)
    stages = [groups[g].config.pipeline for g in ran.sizes[:, 0]]
    rows = zip(ran.sizes.tolist(), ran.left.tolist(), stages, strict=True)
    made = [(*step, *left[:k]) for step, left, k in rows]
    group = operator.itemgetter(0)  # steps of a group are in order
    assert sorted(made, key=group) == sorted(taken, key=group)
    begins = np.cumsum([0, *np.bincount(columns.models, columns.outputs, 5).astype(int)])
    for m in range(5):
        mine = [np.diff(of_one) for r, of_one in zip(requests, times.values(), strict=True) if r.model == MODELS[m]]
        gaps = served.gaps[begins[m] : served.gap_ends[m]]
        assert sorted(gaps) == sorted(np.concatenate(mine).astype(np.float32))


def test_the_comparison_has_seen_it_all():
    seeds = [*range(6), 15]
    kinds = [simulated(*workload(policy, seed))[-1] for policy in ("sarathi_serve", "paceline") for seed in seeds]
    assert set().union(*kinds) >= {
        "preempted", "rejected", "finished", "ttft", "tbt", "load", "unload", "moved", "drafted", "chosen",
        "paced", "waited", *itertools.product(OTHERS, BEFORE),
    }  # fmt: skip


def test_without_requests_nothing_happens():
    empty = Requests(*(np.zeros(0, kind) for kind in (float, np.int64, np.int64, np.int64, float, float)))
    served, ran = steps.run(fleets("paceline", random.Random(0), DRAFTS[0]), MODELS, empty)
    assert len(ran.took) == len(served.owner) == 0


def test_records_grow_with_the_steps():
    """Far more than tokens of output: prompts that are computed one token at a time."""
    limits = SchedulerConfig(token_budget=1, num_blocks=400)
    groups, many = [SimulatedGroup(GroupConfig((name,), limits), FAST) for name in "ab"], np.ones(4, np.int64)
    far = np.full(4, np.inf)
    served, ran = steps.run(groups, "ab", Requests(np.zeros(4), np.array([0, 1, 0, 1]), 2000 * many, many, far, far))
    assert len(ran.took) == 4 * 2000 and (ran.sizes[:, 1] == 1).all() and (served.tokens == 1).all()
    for g in range(2):
        mine = ran.sizes[:, 0] == g
        assert (np.diff(ran.left[mine, 0]) == ran.took[mine][1:]).all() and mine.sum() == 2 * 2000
