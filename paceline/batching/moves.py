"""The queues of one group, and the moves that every batching policy is made of.

Memory rules M1-M5 (where the published schedulers err under memory pressure, see `docs/batching.md`):

* M1 admission reserves the blocks of the whole prompt and leaves the watermark free;
* M2 a decode needs a new block only if its KV does not fit in the blocks held;
* M3 if that block is not free, the latest arrival behind it in the queue is preempted, else the sequence itself;
* M4 a preempted sequence goes back to its place in the waiting queue and later recomputes prompt and output;
* M5 nothing is admitted in a step that preempted.

Running sequences are in arrival order; waiting ones, and `prompts` (the running ones that have prompt tokens which no
batch has taken), in the policy's order.
"""

# mypy: disable-error-code=no-any-return

import numpy as np

from paceline.batching.blocks import blocks_for, forget_all, look_up, num_free, register, release, share, take
from paceline.batching.budget import room_within_goals, seconds_at_pace
from paceline.batching.state import (
    ADAPTIVE,
    AHEAD,
    ARRIVAL,
    AT,
    AWAY,
    BEGIN,
    BESIDE,
    BLOCK_SIZE,
    CACHED_TOKENS,
    DECODES,
    DRAFT,
    DRAFTING,
    ENTERING,
    EVER_HELD,
    FLYING,
    FREE_SLOTS,
    GOAL,
    HEAD,
    KNEE,
    LENGTH,
    LOST,
    MARGIN,
    MAX_BATCH,
    MAX_MODEL_LEN,
    NEXT_SERIAL,
    NONE,
    OWN_BLOCKS,
    PIPELINE,
    PREEMPTED,
    PROMPTS,
    RESERVES,
    RESTING,
    RUNNING,
    SEEN,
    SLICES,
    SLOT,
    SPARE,
    SPENT,
    START,
    TAIL,
    TBT,
    TOKEN_BUDGET,
    TOOK,
    WAITS,
    WANTED,
    WATERMARK,
    WIDTH,
    Bytes,
    Ints,
    State,
)
from paceline.compiled import making, part
from paceline.core.batch import AGAIN
from paceline.core.request import (
    ASKED,
    COMPUTED,
    ENDED,
    HASHED,
    HELD,
    IN_FLIGHT,
    KNOWN,
    LIMIT,
    MAX_DRAFT_TOKENS,
    NUM_COLUMNS,
    PREEMPTIONS,
    PROMPT,
    SCHEDULED,
    SERIAL,
)

SHORT_S = 0.02  # behind a step that takes longer none is composed ahead: little would be won, and who comes would wait

# What a policy is made of


@part
def ring(s: State) -> int:
    """Steps that may be in flight."""
    return s.limits[PIPELINE] + s.limits[AHEAD]


@part
def takes_no_step(s: State) -> bool:
    """Whether the group's workers take no step now.

    One is composed ahead only where it needs no token of those in flight but their number: where nobody drafts, or the
    group rests (`Lookahead.rests`), and where nobody could have to be preempted for it.
    """
    now = s.now
    if now[FLYING] < s.limits[PIPELINE]:
        return now[ENTERING] >= 0
    if now[FLYING] >= ring(s):
        return True
    left = max(s.clocks[0] - s.factors[BEGIN], s.factors[TOOK])
    return (now[DRAFTING] > 0 and now[RESTING] == 0) or num_free(s) < now[RUNNING] or left > SHORT_S


@part
def decode(s: State, most: int, longest: bool = False) -> None:
    """Takes every decode that is ready (M2, M3), or `most`: the first to arrive, or those with most to come.

    With each go tokens to be drafted, as many as its request, the free blocks and the lookahead allow.
    """
    now, order, drafts, deep = s.now, s.running, s.chosen, MAX_DRAFT_TOKENS
    step = s.steps[now[AT]]
    if longest:
        sort_longest_first(s)
        order = s.listed
    if s.limits[ADAPTIVE] == 0:  # drafts leave prompts their half of the budget
        drafts = s.drafts
        waits = now[PROMPTS] + num_waiting(s) > 0
        deep = s.limits[TOKEN_BUDGET] // (2 if waits else 1) // max(1, min(most, now[RUNNING])) - 1
    for attempt in range(2):  # where blocks are short, drafts give way first
        needed = _ready_decodes(s, order, most, drafts, deep, attempt == 0)
        if needed <= num_free(s):
            break
    if needed <= num_free(s):
        numbers, size = s.numbers, s.limits[BLOCK_SIZE]
        for i in range(now[SLICES] if needed > 0 else 0):
            slot = step[SLOT, i]
            lacks = (step[START, i] + step[LENGTH, i] + size - 1) // size - numbers[slot, HELD]
            if lacks > 0:
                take(s, slot, lacks)
        return
    for i in range(now[SLICES]):
        s.listed[i] = step[SLOT, i]
    count = now[SLICES]
    if longest:
        _sort_by_arrival(s, count)
    now[SLICES] = now[DECODES] = now[WIDTH] = 0
    for i in range(count):
        decode_alone(s, s.listed[i])


@part
def decode_alone(s: State, slot: int) -> None:
    """Takes this decode, unless it was preempted, or must be now (M2, M3)."""
    if s.numbers[slot, HELD] > 0 and _make_room(s, slot):
        _add(s, slot, 1)
        s.now[DECODES] += 1


@part
def room(s: State) -> int:
    """Tokens that the step may still take."""
    read, step = 0, s.steps[s.now[AT]]
    for i in range(s.now[SLICES]):
        read += step[START, i] * step[LENGTH, i]
    return _width(s, s.now[WIDTH], read) - s.now[WIDTH]


@part
def width_without_drafts(s: State, pending: int) -> int:
    """Tokens of the next step with all decodes that are ready, if so many of prompts wait: what of those the decodes
    leave is certain progress, so it is what drafts are chosen by. The budget: where none wait."""
    if pending == 0:
        return s.limits[TOKEN_BUDGET]
    s.factors[SPENT] = 0.0  # in drafting, so far
    ready, read = _ready(s)
    return _width(s, ready, read)


@making
def _width(s: State, taken: int, read: int) -> int:
    """Tokens of a step that has taken so many, which read so many, and goes on with prompts: the fixed budget, or what
    the goals make of it."""
    width = s.limits[TOKEN_BUDGET]
    if s.limits[KNEE] > 0 and s.now[PROMPTS] + num_waiting(s) > 0:
        waits = taken > 0 or (s.limits[PIPELINE] > 1 and num_decoding(s) > 0)
        goal = goal_of_step(s) if waits else NONE
        width = min(room_within_goals(s, taken, candidates(s, width - taken), read, goal), width)
    return width


@part
def _ready(s: State) -> tuple[int, int]:
    """Running sequences of which a decode may be taken, and what those read."""
    ready, read = 0, 0
    for i in range(s.now[RUNNING]):
        slot = s.running[i]
        if s.numbers[slot, COMPUTED] >= s.numbers[slot, PROMPT] and s.numbers[slot, IN_FLIGHT] == 0:
            ready += 1
            read += s.numbers[slot, COMPUTED]
    return ready, read


@part
def goal_of_step(s: State) -> float:
    """Seconds that the next step should be predicted to take in the engine, at most: by the tightest goal, the group's
    or that of a running decode. Infinity: there is no goal."""
    goal, running, numbers, times = s.factors[GOAL], s.running, s.numbers, s.times
    for i in range(s.now[RUNNING]):
        slot = running[i]
        if numbers[slot, SCHEDULED] >= numbers[slot, PROMPT]:  # its last chunk may be in flight
            goal = min(goal, times[slot, TBT])
    return within(s, goal)


@part
def within(s: State, goal: float) -> float:
    """Seconds that a step should be predicted to take in the engine, for a goal between tokens: less others' turns,
    what steps take beside the engine, and the margin. In a pipeline a sequence has its next token after a step in each
    of the stages."""
    return (goal - s.factors[WAITS] - s.factors[BESIDE]) / (s.limits[PIPELINE] * (1 + s.factors[MARGIN]))


@part
def all_within_goal(s: State) -> bool:
    """Whether there is a goal between tokens, and a step of all decodes that are ready is within it."""
    ready, read = _ready(s)
    goal = goal_of_step(s)
    return 0 < goal < NONE and seconds_at_pace(s, (ready, ready, ready, read, 0, 0, 0)) - s.factors[BESIDE] <= goal


@part
def chunk(s: State, slot: int, most: int) -> int:
    """Takes the next part of a running prompt, at most `most` tokens; returns how many."""
    numbers = s.numbers
    left = numbers[slot, PROMPT] - numbers[slot, SCHEDULED]
    length = min(left, most)
    _add(s, slot, length)
    if length == left:
        _leave_prompts(s, slot)
    return length


@part
def next_in_line(s: State, ours: int, theirs: int) -> tuple[int, int, int]:
    """Of prompts, running from this place of `prompts` on or waiting from that of the queue on, the first, and from
    where on the others are; -1: there is none."""
    waits = theirs < s.now[TAIL]
    if ours < s.now[PROMPTS] and not (waits and _before(s, s.waiting[theirs], s.prompts[ours])):
        return s.prompts[ours], ours + 1, theirs
    return (s.waiting[theirs] if waits else -1), ours, theirs + 1


@part
def num_waiting(s: State) -> int:
    now = s.now
    return now[TAIL] - now[HEAD]


@part
def num_drafted(s: State) -> int:
    """Tokens of the step's decodes that are to be drafted."""
    total, step = 0, s.steps[s.now[AT]]
    for i in range(s.now[DECODES]):
        total += step[DRAFT, i]
    return total


@part
def num_decoding(s: State) -> int:
    """Running sequences whose prompt is computed, in flight or not."""
    count = 0
    running, numbers = s.running, s.numbers
    for i in range(s.now[RUNNING]):
        count += numbers[running[i], COMPUTED] >= numbers[running[i], PROMPT]
    return count


@part
def next_prompt(s: State) -> int:
    """The first of all prompts, running (part of a batch or not) or waiting, if it may come in; -1: none."""
    running = s.prompts[0] if s.now[PROMPTS] > 0 else -1
    if num_waiting(s) > 0 and (running < 0 or _before(s, s.waiting[s.now[HEAD]], running)):
        slot = admit(s)
        return running if slot < 0 else slot
    return running


@part
def next_idle_prompt(s: State, at: int) -> int:
    """Where in `prompts`, from here on, the next is that is not part of a batch; -1: none."""
    while at < s.now[PROMPTS]:
        if s.numbers[s.prompts[at], IN_FLIGHT] == 0:
            return at
        at += 1
    return -1


@part
def admit(s: State) -> int:
    """Moves the first waiting sequence to the running ones, if it may (M1, M5); -1: it may not."""
    now, size = s.now, s.limits[BLOCK_SIZE]
    if num_waiting(s) == 0 or now[PREEMPTED] > 0 or now[RUNNING] >= s.limits[MAX_BATCH]:
        return -1
    slot = s.waiting[now[HEAD]]
    row = s.numbers[slot]
    hits, idle, new = lacks(s, slot)
    if num_free(s) - new - idle < kept_free(s):
        return -1
    now[HEAD] += 1
    share(s, slot, hits)
    take(s, slot, new)
    row[COMPUTED] = row[SCHEDULED] = hits * size
    if row[PREEMPTIONS] == 0:  # not again after a preemption
        now[CACHED_TOKENS] += hits * size
    _insert(s, s.running, now[RUNNING], slot, False)
    now[RUNNING] += 1
    _insert(s, s.prompts, now[PROMPTS], slot, True)
    now[PROMPTS] += 1
    return slot


@part
def lacks(s: State, slot: int) -> tuple[int, int, int]:
    """To come in, a waiting sequence shares so many cached blocks, of which nobody holds so many, and takes so many."""
    row = s.numbers[slot]
    # the last token is always computed, so that there are logits to sample from
    hits, idle = look_up(s, slot, (row[KNOWN] - 1) // s.limits[BLOCK_SIZE])
    if s.limits[RESERVES] > 0:
        return hits, idle, reserved(s, row[ASKED], row[LIMIT] - row[ASKED]) - hits
    return hits, idle, blocks_for(s, row[KNOWN]) - hits


@part
def left_of(s: State, slot: int) -> tuple[int, int]:
    """Context and what remains of a prompt; one that waits would come in with what the cache has of it."""
    row = s.numbers[slot]
    if row[HELD] > 0:
        return row[SCHEDULED], row[PROMPT] - row[SCHEDULED]
    cached = look_up(s, slot, (row[KNOWN] - 1) // s.limits[BLOCK_SIZE])[0] * s.limits[BLOCK_SIZE]
    return cached, row[KNOWN] - cached


@part
def kept_free(s: State) -> int:
    """Blocks that admission leaves (M1)."""
    return 0 if s.limits[RESERVES] > 0 else s.limits[WATERMARK]


@part
def preempt(s: State, slot: int) -> None:
    """Takes all blocks from a running sequence and queues it again (M4)."""
    stop_running(s, slot)
    s.numbers[slot, PROMPT] = s.numbers[slot, KNOWN]
    s.numbers[slot, PREEMPTIONS] += 1
    wait(s, slot)
    s.now[PREEMPTED] += 1
    if s.now[LOST] < len(s.lost):
        s.lost[s.now[LOST]] = slot
        s.now[LOST] += 1


@part
def reset(s: State) -> None:
    """The KV cache is lost: everything starts over, and no cached prefix is left."""
    now = s.now
    now[FLYING] = now[LOST] = now[SEEN] = 0
    now[ENTERING] = -1
    for k in range(s.limits[PIPELINE]):
        s.clocks[k] = 0.0
    for i in range(now[RUNNING]):
        s.numbers[s.running[i], IN_FLIGHT] = 0
    while now[RUNNING] > 0:
        preempt(s, s.running[0])
    forget_all(s)
    now[EVER_HELD] = now[SPARE] = now[AWAY] = 0  # nor does a block take memory


# What a request may need


@part
def blocks_needed(s: State, tokens: int, max_tokens: int) -> int:
    """The most blocks that a request may come to hold; its last token's KV is never stored."""
    return blocks_for(s, tokens + max_tokens - 1)


@part
def reserved(s: State, tokens: int, max_tokens: int) -> int:
    """Blocks of the longest sequence that the group serves, or that the request may become."""
    return max(s.limits[MAX_MODEL_LEN] // s.limits[BLOCK_SIZE], blocks_needed(s, tokens, max_tokens))


@part
def most_held(s: State, tokens: int, max_tokens: int) -> int:
    """The most blocks that a request comes to hold."""
    return reserved(s, tokens, max_tokens) if s.limits[RESERVES] > 0 else blocks_needed(s, tokens, max_tokens)


@part
def fits(s: State, tokens: int, max_tokens: int) -> bool:
    """Whether the request can run when it is alone, in what the group can have at any time."""
    return most_held(s, tokens, max_tokens) <= s.limits[OWN_BLOCKS] - kept_free(s)


# The life of a sequence


@part
def add(s: State, tokens: int, max_tokens: int, arrival: float, wanted: float, tbt: float, drafts: int) -> int:
    """A row for a request, which waits from now on. Returns its slot; the caller sees to it that one is free."""
    now = s.now
    now[FREE_SLOTS] -= 1
    slot = s.free[now[FREE_SLOTS]]
    row = s.numbers[slot]
    row[KNOWN] = row[PROMPT] = row[ASKED] = tokens
    row[LIMIT] = tokens + max_tokens
    row[SERIAL] = now[NEXT_SERIAL]
    now[NEXT_SERIAL] += 1
    s.times[slot, ARRIVAL], s.times[slot, WANTED], s.times[slot, TBT] = arrival, wanted, tbt
    s.drafts[slot] = drafts
    now[DRAFTING] += drafts > 0
    wait(s, slot)
    return slot


@part
def end(s: State, slot: int) -> None:
    """The sequence is part of no batch and not wanted any more."""
    if s.numbers[slot, HELD] > 0:
        stop_running(s, slot)
    else:
        wait_no_more(s, slot)
    drop(s, slot)


@part
def drop(s: State, slot: int) -> None:
    """Frees the row of a sequence that is in no queue."""
    s.now[DRAFTING] -= s.drafts[slot] > 0
    numbers = s.numbers
    for column in range(NUM_COLUMNS):
        numbers[slot, column] = 0
    s.drafts[slot] = s.chosen[slot] = 0
    s.free[s.now[FREE_SLOTS]] = slot
    s.now[FREE_SLOTS] += 1


@part
def wait(s: State, slot: int) -> None:
    """Puts it in its place among those that wait."""
    now, queue = s.now, s.waiting
    if now[TAIL] == len(queue):  # the room before the head is not used any more
        for k in range(now[HEAD], now[TAIL]):
            queue[k - now[HEAD]] = queue[k]
        now[TAIL] -= now[HEAD]
        now[HEAD] = 0
    at = _position(s, queue, now[HEAD], now[TAIL], slot, True)
    if now[HEAD] > 0 and at - now[HEAD] < now[TAIL] - at:
        now[HEAD] -= 1
        for k in range(now[HEAD], at - 1):
            queue[k] = queue[k + 1]
        queue[at - 1] = slot
    else:
        for k in range(now[TAIL], at, -1):
            queue[k] = queue[k - 1]
        queue[at] = slot
        now[TAIL] += 1


@part
def wait_no_more(s: State, slot: int) -> None:
    """Takes it out of the waiting queue."""
    now = s.now
    at = _position(s, s.waiting, now[HEAD], now[TAIL], slot, True)
    for k in range(at, now[HEAD], -1):
        s.waiting[k] = s.waiting[k - 1]
    now[HEAD] += 1


@part
def stop_running(s: State, slot: int) -> None:
    """Out of the running ones, without blocks; what was computed is lost."""
    now, row = s.now, s.numbers[slot]
    at = _position(s, s.running, 0, now[RUNNING], slot, False)
    running = s.running
    for k in range(at, now[RUNNING] - 1):
        running[k] = running[k + 1]
    now[RUNNING] -= 1
    take_no_more(s, slot)
    release(s, slot)
    row[COMPUTED] = row[SCHEDULED] = 0


@part
def take_no_more(s: State, slot: int) -> None:
    """Of its prompt."""
    numbers = s.numbers
    if numbers[slot, SCHEDULED] < numbers[slot, PROMPT]:
        _leave_prompts(s, slot)
        numbers[slot, PROMPT] = numbers[slot, SCHEDULED]


# What happens to every sequence in every step


@part
def _ready_decodes(s: State, order: Ints, most: int, drafts: Ints, deep: int, drafting: bool) -> int:
    """Puts the decodes that are ready into the step, the first `most` in this order; returns the blocks they need.

    With each go the tokens to be drafted behind it: what the sequence allows (`drafts`) and may still come to know, at
    most `deep`; without `drafting` what the blocks held can take.
    """
    taken, needed, width, size, step, numbers = 0, 0, 0, s.limits[BLOCK_SIZE], s.steps[s.now[AT]], s.numbers
    for i in range(s.now[RUNNING]):
        if taken == most:
            break
        slot = order[i]
        computed = numbers[slot, SCHEDULED]
        if computed < numbers[slot, PROMPT] or (numbers[slot, IN_FLIGHT] > 0 and not _goes_on(s, slot)):
            continue
        held = numbers[slot, HELD] * size
        draft = max(0, min(drafts[slot], deep, numbers[slot, LIMIT] - numbers[slot, KNOWN] - 1))
        if not drafting:
            draft = max(0, min(draft, held - computed - 1))
        step[SLOT, taken], step[START, taken] = slot, computed
        step[LENGTH, taken], step[DRAFT, taken] = 1 + draft, draft
        lacks = computed + 1 + draft - held
        if lacks > 0:
            needed += (lacks + size - 1) // size
        taken += 1
        width += 1 + draft
    s.now[SLICES] = s.now[DECODES] = taken
    s.now[WIDTH] = width
    return needed


@part
def _goes_on(s: State, slot: int) -> bool:
    """Whether a sequence in flight can decode in a step composed ahead: it is about to know one token more, and that is
    not its last."""
    row = s.numbers[slot]
    wanted = s.limits[AHEAD] > 0 and row[ENDED] == 0
    return wanted and row[SCHEDULED] == row[KNOWN] and row[SCHEDULED] + 1 < row[LIMIT]


@part
def depart(s: State) -> None:
    """The step's slices are now in flight. Says which will yield a token, and the shape."""
    tokens, emitting, decodes, decode_context, chunk_context, pairs, chunks = 0, 0, 0, 0, 0, 0, 0
    step, numbers, shape, at = s.steps[s.now[AT]], s.numbers, s.shape, s.now[AT]
    emits = s.emits[at]
    s.sizes[at] = s.now[SLICES]
    for i in range(s.now[SLICES]):
        slot, start, length = step[SLOT, i], step[START, i], step[LENGTH, i]
        numbers[slot, IN_FLIGHT] += 1
        numbers[slot, SCHEDULED] = start + length
        yields = start + length >= numbers[slot, KNOWN]
        emits[i] = yields
        emitting += yields
        tokens += length
        if length == 1 + step[DRAFT, i]:
            decodes += length
            decode_context += start + (length - 1) * start * AGAIN // 100
            emitting += yields * (length - 1)
        else:
            chunk_context += start
            pairs += length * (2 * start + length + 1) // 2
            chunks += 1
    shape[0], shape[1], shape[2], shape[3] = tokens, emitting, decodes, decode_context
    shape[4], shape[5], shape[6] = chunk_context, pairs, chunks


@part
def arrive(s: State, at: int, tokens: Bytes) -> int:
    """The batch at this place of the ring is done, and its slice i yielded tokens[i]; slot -1 is passed over.
    Returns the sum of tokens.

    Blocks that are full now, and have a hash, can be shared. Of a slice with drafted tokens those that did not stay are
    not computed, whatever the cache holds of them.
    """
    step = s.steps[at]
    total, size, numbers = 0, s.limits[BLOCK_SIZE], s.numbers
    for i in range(s.sizes[at]):
        slot = step[SLOT, i]
        if slot < 0:
            continue
        end = step[START, i] + step[LENGTH, i]
        if step[DRAFT, i] > 0:
            end = step[START, i] + tokens[i]
            numbers[slot, SCHEDULED] = end
        if numbers[slot, HASHED] > 0:
            for block in range(numbers[slot, COMPUTED] // size, min(end // size, numbers[slot, HASHED])):
                register(s, s.tables[slot, block], s.hashes[slot, block])
        numbers[slot, IN_FLIGHT] -= 1
        numbers[slot, COMPUTED] = end
        numbers[slot, KNOWN] += tokens[i]
        total += tokens[i]
    return total


# Order


@part
def sort_longest_first(s: State) -> None:
    """Lists the running sequences by the tokens that may still come, the most first, then in arrival order."""
    listed, numbers = s.listed, s.numbers
    for i in range(s.now[RUNNING]):
        slot, at = s.running[i], i
        to_come = numbers[slot, LIMIT] - numbers[slot, KNOWN]
        while at > 0 and numbers[listed[at - 1], LIMIT] - numbers[listed[at - 1], KNOWN] < to_come:
            listed[at] = listed[at - 1]
            at -= 1
        listed[at] = slot


@part
def _sort_by_arrival(s: State, count: int) -> None:
    """The first so many that are listed."""
    for i in range(1, count):
        _insert(s, s.listed, i, s.listed[i], False)


@making
def candidates(s: State, most: int) -> Ints:
    """[prompts, 2]: `left_of` those that could be chunked next, as many as could take `most`; then rows of zeros."""
    found = np.zeros((max(0, min(most, s.now[PROMPTS] + num_waiting(s))), 2), np.int64)
    count, ours, theirs = 0, 0, s.now[HEAD]
    while most > 0 and count < found.shape[0]:
        slot, ours, theirs = next_in_line(s, ours, theirs)
        found[count, 0], found[count, 1] = left_of(s, slot)
        most -= found[count, 1]
        count += 1
    return found


@part
def pending(s: State, most: int, whole: bool) -> int:
    """Prompt tokens that no step has taken, of running prompts and of those that may come in now; up to `most`.
    `whole`: also what was taken of such prompts."""
    total, slots, free = 0, s.limits[MAX_BATCH] - s.now[RUNNING], num_free(s) - kept_free(s)
    for i in range(s.now[PROMPTS]):
        row = s.numbers[s.prompts[i]]
        total += row[PROMPT] - (0 if whole else row[SCHEDULED])
    for at in range(s.now[HEAD], min(s.now[TAIL], s.now[HEAD] + slots)):
        hits, idle, new = lacks(s, s.waiting[at])
        free -= idle + new
        if total >= most or free < 0:
            break
        total += s.numbers[s.waiting[at], KNOWN] - hits * s.limits[BLOCK_SIZE]
    return min(most, total)


@part
def _before(s: State, a: int, b: int) -> bool:
    """By the time at which the first token is wanted, then by arrival, then by submission."""
    times = s.times
    if times[a, WANTED] != times[b, WANTED]:
        return times[a, WANTED] < times[b, WANTED]
    return _earlier(s, a, b)


@part
def _earlier(s: State, a: int, b: int) -> bool:
    """First come, first served."""
    times, numbers = s.times, s.numbers
    if times[a, ARRIVAL] != times[b, ARRIVAL]:
        return times[a, ARRIVAL] < times[b, ARRIVAL]
    return numbers[a, SERIAL] < numbers[b, SERIAL]


@part
def _position(s: State, queue: Ints, low: int, high: int, slot: int, by_place: bool) -> int:
    """Where in this part of a queue it stands, or would."""
    while low < high:
        middle = (low + high) // 2
        before = _before(s, queue[middle], slot) if by_place else _earlier(s, queue[middle], slot)
        if before:
            low = middle + 1
        else:
            high = middle
    return low


@part
def _insert(s: State, queue: Ints, count: int, slot: int, by_place: bool) -> None:
    """In its place, in a queue of so many."""
    at = _position(s, queue, 0, count, slot, by_place)
    for k in range(count, at, -1):
        queue[k] = queue[k - 1]
    queue[at] = slot


@part
def _leave_prompts(s: State, slot: int) -> None:
    at = _position(s, s.prompts, 0, s.now[PROMPTS], slot, True)
    now, prompts = s.now, s.prompts
    for k in range(at, now[PROMPTS] - 1):
        prompts[k] = prompts[k + 1]
    now[PROMPTS] -= 1


@part
def _add(s: State, slot: int, length: int) -> None:
    now, step = s.now, s.steps[s.now[AT]]
    at = now[SLICES]
    step[SLOT, at], step[START, at] = slot, s.numbers[slot, SCHEDULED]
    step[LENGTH, at], step[DRAFT, at] = length, 0
    now[SLICES] += 1
    now[WIDTH] += length


@part
def newest(s: State) -> int:
    """The running sequence that came last, of those that are part of no batch; -1: there is none."""
    for at in range(s.now[RUNNING] - 1, -1, -1):
        if s.numbers[s.running[at], IN_FLIGHT] == 0:
            return s.running[at]
    return -1


@part
def _make_room(s: State, slot: int) -> bool:
    """For one more token (M2, M3). False: the sequence was preempted itself."""
    row = s.numbers[slot]
    while row[COMPUTED] == row[HELD] * s.limits[BLOCK_SIZE]:
        if num_free(s) > 0:
            take(s, slot, 1)
            break
        victim = newest(s)  # at the earliest this one, which is not in flight: those before it stay
        preempt(s, victim)
        if victim == slot:
            return False
    return True
