"""GoalBudget against brute force, and what it promises to decodes and to prompts."""

from random import Random

import pytest

from paceline.batching.budget import GoalBudget
from paceline.batching.config import SchedulerConfig
from paceline.batching.pace import forgotten, learned, pace_of
from paceline.batching.policies import policy
from paceline.batching.scheduler import Scheduler
from paceline.batching.state import MARGIN
from paceline.compiled import plain
from paceline.controller import Controller, GroupConfig
from paceline.core import record
from paceline.core.batch import Batch, StepResult, StepShape
from paceline.core.events import Complete, Submit
from paceline.core.request import Request
from paceline.latency.step_time import StepTime
from paceline.simulator.driver import replay
from paceline.speculation.costs import Costs
from paceline.speculation.lookahead import Lookahead

NOBODY = StepShape()


# padded to 8, a cliff at 64, attention by context: never falls as a step widens
MODEL = StepTime(
    tuple(0.01 + 0.0004 * rows + 0.01 * (rows > 64) for rows in (-(-tokens // 8) * 8 for tokens in range(2000))),
    emit=0.0, decode=2e-4, decode_context=1e-7, chunk=2e-4, chunk_context=2e-7, chunk_pair=1e-8,
)  # fmt: skip
seconds, TIMES = MODEL.seconds, (MODEL.linear, MODEL.terms)


def decodes(count: int, context: int = 200) -> StepShape:
    shape = NOBODY
    for _ in range(count):
        shape = shape.add(context, 1, True)
    return shape


def taken(shape: StepShape, prompts, width: int) -> StepShape:
    """The step that a scheduler makes of this width."""
    for context, left in prompts:
        length = min(left, width - shape.tokens)
        if length > 0:
            shape = shape.add(context, length, length == left)
    return shape


def read_again(prompts, room: int) -> float:
    """Seconds that the next step takes to read what this one read, if so many tokens are taken."""
    for context, left in prompts:
        if 0 < room < left:
            return MODEL.chunk + MODEL.chunk_context * (context + room)
        room -= left
    return 0.0


def brute_force(budget: GoalBudget, goal: float, shape: StepShape, prompts) -> int:
    least = min(budget.maximum, (shape.tokens // budget.tile + 1) * budget.tile)
    widths = range(budget.tile, budget.maximum + 1, budget.tile)
    inside = [w for w in widths if w > shape.tokens and seconds(taken(shape, prompts, w)) <= goal]
    return max([least, *inside])


def test_it_is_the_widest_step_within_the_goal():
    rng = Random(1)
    narrower = 0
    for _ in range(500):
        budget = GoalBudget(*TIMES, rng.choice((1, 8, 16)), 128, rng.choice((96, 512)), rng.uniform(0.01, 0.3))
        shape = decodes(rng.randint(1, 60), rng.choice((10, 3000)))
        prompts = [(rng.choice((0, 400, 8000)), rng.choice((1, 5, 90, 2000))) for _ in range(rng.randint(1, 20))]
        width, widest = budget(shape, prompts, None), brute_force(budget, budget.tbt, shape, prompts)
        # the answer may be narrower only where no prompt token is left to take
        assert taken(shape, prompts, width) == taken(shape, prompts, widest)
        assert width % budget.tile == 0 or width == budget.maximum
        narrower += width < budget.maximum
    assert narrower > 100


def test_the_tighter_of_two_goals_holds():
    budget = GoalBudget(*TIMES, 8, 128, 512, 0.1)
    prompts = [(0, 5000)]
    assert budget(decodes(4), prompts, None) == budget(decodes(4), prompts, 1.0)
    assert budget(decodes(4), prompts, 0.05) == GoalBudget(*TIMES, 8, 128, 512, 0.05)(decodes(4), prompts, 0.1)
    assert budget(decodes(4), prompts, 0.05) < budget(decodes(4), prompts, None)


def test_contexts_count():
    budget = GoalBudget(*TIMES, 8, 128, 512, 0.1)
    assert budget(decodes(4, 50_000), [(0, 5000)], None) < budget(decodes(4, 50), [(0, 5000)], None)
    assert budget(decodes(4), [(50_000, 5000)], None) < budget(decodes(4), [(0, 5000)], None)


def test_without_a_goal_or_a_decode_it_is_the_knee():
    prompts = [(0, 5000)]
    assert GoalBudget(*TIMES, 8, 128, 512)(decodes(4), prompts, None) == 128
    assert GoalBudget(*TIMES, 8, 128, 512, 0.02)(NOBODY, prompts, None) == 128
    assert GoalBudget(*TIMES, 8, 128, 512)(decodes(4), prompts, 0.05) < 128


def test_without_a_goal_steps_widen_until_contexts_are_not_read_too_often():
    rng, wider = Random(2), 0
    knee = GoalBudget(*TIMES, 8, 128, 512)
    assert knee(NOBODY, [(0, 300), (180_000, 2000)], None) == 128, "though wider steps would end in the second prompt"
    assert knee(NOBODY, [(180_000, 2000)], None) > 128
    for _ in range(500):
        budget = GoalBudget(*TIMES, rng.choice((1, 8, 16)), rng.choice((32, 128)), 512)
        shape = decodes(rng.randint(0, 60), rng.choice((10, 3000)))
        contexts = rng.choices((0, 8000, 60_000, 180_000), k=rng.randint(1, 3))
        prompts = [(context, rng.choice((5, 90, 2000))) for context in contexts]
        width = budget(shape, prompts, None)
        least = max(budget.knee, (shape.tokens // budget.tile + 1) * budget.tile)
        widths = width, width - budget.tile
        lost = [read_again(prompts, some - shape.tokens) / seconds(taken(shape, prompts, some)) for some in widths]
        assert lost[0] <= 0.1 or taken(shape, prompts, width) == taken(shape, prompts, budget.maximum)
        assert width == least or (width > least and lost[1] > 0.1)
        wider += width > least
    assert 50 < wider < 450


@pytest.mark.parametrize("count", [1, 7, 8, 9, 127, 128, 200])
@pytest.mark.parametrize("goal", [None, 1e-6])
def test_prompts_never_starve(count, goal):
    width = GoalBudget(*TIMES, 8, 128, 512, goal)(decodes(count), [(0, 5000)], None)
    assert width > count and width % 8 == 0
    if goal:
        assert width - count <= 8


def test_the_maximum_is_kept():
    budget = GoalBudget(*TIMES, 8, 128, 100, 10.0)
    assert budget(decodes(3), [(0, 5000)], None) <= 100
    assert budget(decodes(99), [(0, 5000)], None) == 100
    assert budget(decodes(120), [(0, 5000)], None) == 100


def test_a_slow_machine_and_a_margin_tighten_the_goal():
    prompts = [(0, 5000)]
    budget = GoalBudget(*TIMES, 8, 128, 512, 0.1)
    assert budget(decodes(4), prompts, None, 2.0) == GoalBudget(*TIMES, 8, 128, 512, 0.05)(decodes(4), prompts, None)
    careful = GoalBudget(*TIMES, 8, 128, 512, 0.1, margin=0.25)
    assert careful(decodes(4), prompts, None) == GoalBudget(*TIMES, 8, 128, 512, 0.08)(decodes(4), prompts, None)


class Machine:
    """A group's state, and how much longer than predicted its steps take."""

    def __init__(self, margin: float = 0.0) -> None:
        budget = GoalBudget(*TIMES, 8, 128, 512, margin=margin)
        self.group = Scheduler(SchedulerConfig(), policy("paceline"), budget)

    def ran(self, shape: StepShape, times: float) -> None:
        learned(self.group.handle, shape.tokens, seconds(shape), times * seconds(shape))

    def pace(self, shape: StepShape) -> float:
        return plain(pace_of)(self.group.state, shape.tokens)

    @property
    def margin(self) -> float:
        return self.group.state.factors[MARGIN]


CHUNK = NOBODY.add(7, 50, True)


def test_pace_follows_the_machine_and_not_a_single_stall():
    machine, shape = Machine(), decodes(3)
    assert machine.pace(shape) == 1
    machine.ran(shape, 1000.0)
    assert 1.0 < machine.pace(shape) < 1.1
    for _ in range(60):
        machine.ran(shape, 2.0)
    assert machine.pace(shape) == pytest.approx(2.0, rel=1e-3)
    for _ in range(60):
        machine.ran(CHUNK, 0.7)
    assert machine.pace(CHUNK) == pytest.approx(0.7, rel=1e-3)


def test_the_margin_becomes_what_steps_need():
    """99 of 100 steps are within it, however far the profile was off; after a rest it is the profile's again."""
    rng, shape = Random(3), decodes(3)
    for profiled in (0.0, 0.4):
        machine, late = Machine(profiled), 0
        for step in range(8000):
            took = machine.pace(shape) * rng.lognormvariate(0.0, 0.08)
            late += step >= 4000 and took > machine.pace(shape) * (1 + machine.margin)
            machine.ran(shape, took)
        assert 0.005 < late / 4000 < 0.015 and 0.1 < machine.margin < 0.3
        forgotten(machine.group.handle, 0.9)
        assert machine.pace(shape) != 1, "that is no rest"
        forgotten(machine.group.handle, 1000.0)
        assert machine.margin == pytest.approx(profiled) and machine.pace(shape) == pytest.approx(1)


def test_steps_that_compute_have_a_pace_beside_those_that_read():
    machine, shape = Machine(), decodes(3)
    for _ in range(600):
        machine.ran(shape, 1.1)
        machine.ran(CHUNK, 1.5)
    assert machine.pace(shape) == pytest.approx(1.1, rel=0.1)
    assert machine.pace(CHUNK) == pytest.approx(1.5, rel=0.1)
    for _ in range(20):  # the machine is half as fast for all
        machine.ran(shape, 2.2)
    assert machine.pace(CHUNK) == pytest.approx(3.0, rel=0.1)


def test_the_budget_counts_what_steps_that_compute_take_more():
    prompts, goal = [(0, 500)], GoalBudget(*TIMES, 8, 128, 512, 0.1)
    twice = GoalBudget(*TIMES, 8, 128, 512, 0.05)
    assert goal(decodes(4), prompts, None, wide=2.0) == max(16, twice(decodes(4), prompts, None))
    slow = GoalBudget(*TIMES, 8, 128, 512, 2 * seconds(decodes(4)))
    assert slow(decodes(4), [(0, 3)], None, wide=100.0) == 8, "narrow steps do not"


def run(slowness: float, log: list | None = None, beside: float = 0.0) -> list[Batch]:
    """Batches of one long prompt beside decodes, on a machine that is slower than predicted, with so many seconds
    between steps."""
    goal = GoalBudget(*TIMES, 8, 128, 512, 0.1)
    config = GroupConfig(scheduler=SchedulerConfig(num_blocks=3000), budget=goal, predict=seconds)
    controller, batches, now = Controller([config]), [], 0.0
    inputs = [Submit(Request(f"short{i}", 4, 400)) for i in range(4)] + [Submit(Request("long", 30000, 1))]
    for _ in range(60):
        if log is not None:
            log.append((now, tuple(inputs)))
        _, (batch,) = controller.turn(inputs, now)
        batches.append(batch)
        result = StepResult(bytearray(batch.emits), seconds=slowness * seconds(batch.shape))
        now += result.seconds + beside
        inputs = [Complete(0, batch.id, result)]
    return batches


def test_steps_keep_the_goal_on_a_machine_that_became_slow():
    for slowness in (0.7, 1.0, 1.8):
        settled = run(slowness)[40:]
        assert all(batch.num_decodes == 4 for batch in settled)
        for batch in settled:
            assert batch.predicted == pytest.approx(slowness * seconds(batch.shape), rel=0.01)
            assert 0.06 < slowness * seconds(batch.shape) < 0.1001
    assert run(1.8)[50].num_tokens < run(1.0)[50].num_tokens < run(0.7)[50].num_tokens


def test_what_steps_take_beside_the_engine_counts_towards_the_goal():
    for batch in run(1.0, beside=0.02)[40:]:
        assert 0.07 < seconds(batch.shape) + 0.02 < 0.1001


def test_steps_with_drafts_are_predicted_too():
    costs = Costs([seconds(NOBODY.add(0, n, True)) for n in range(600)]), Costs([0.001] * 600)
    lookahead = Lookahead(*costs)
    config = GroupConfig(scheduler=SchedulerConfig(), predict=seconds, lookahead=lambda: lookahead)
    controller = Controller([config])
    inputs, drafting = [Submit(Request("a", 4, 400, max_draft_tokens=4))], list[bool]()
    for turn in range(200):
        _, (batch,) = controller.turn(inputs, float(turn))
        drafted = batch.drafts[0] if batch.drafts else 0
        plain = seconds(batch.shape) * (1.3 if drafted else 1.0)  # verdicts take a while
        result = StepResult(
            bytearray([1 + drafted]), seconds=plain + 0.002 * drafted, draft_seconds=0.002 * drafted,
            drafted=bytearray([drafted]),
        )  # fmt: skip
        if turn == 0:
            assert batch.predicted == seconds(batch.shape)
        if turn > 60:
            drafting.append(drafted > 0)
            assert batch.predicted == pytest.approx(result.seconds, rel=0.1)
        inputs = [Complete(0, batch.id, result)]
        if batch.sequences[0].known > 390:
            break
    assert len(drafting) > 5 and sum(drafting) > 0.9 * len(drafting), "but for tries without any"
    fixed = Controller([GroupConfig(scheduler=SchedulerConfig(), predict=seconds)])  # nobody knows what drafts take
    _, (batch,) = fixed.turn([Submit(Request("a", 4, 40, max_draft_tokens=4))], 0.0)
    _, (batch,) = fixed.turn([Complete(0, batch.id, StepResult(bytearray([1])))], 1.0)
    assert batch.drafts and batch.predicted is None


def test_a_run_with_a_pace_is_replayed_from_its_log():
    log: list = []
    batches = run(1.4, log)
    config = GroupConfig(
        scheduler=SchedulerConfig(num_blocks=3000), budget=GoalBudget(*TIMES, 8, 128, 512, 0.1), predict=seconds
    )
    copied = list(record.load([record.dump(now, list(inputs)) for now, inputs in log]))
    started = [event.detail for event in replay(Controller([config]), copied) if event.kind == "started"]
    assert started == batches
