"""What a GPU computes, on the host ("cpu:0"): by our own kernels in Triton's interpreter, by gathered attention, and by
what FlashAttention is documented to do.

Tests marked `gpu` do the same on a CUDA device.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from triton.runtime import interpreter

from benchmarks.gpu import Shape, measure
from benchmarks.sarathi_tables import POLICIES
from paceline.batching.config import SchedulerConfig
from paceline.cli.sources import BUILTIN
from paceline.controller import GroupConfig
from paceline.core.request import SamplingParams
from paceline.core.work import NewSequence, SliceWork
from paceline.engine import (
    gpu,
    gpu_plan,
    keyed_random,
    machine,
    stock_sampler,
    triton_kernels,
    triton_sampler,
)
from paceline.engine.attention import SliceSpan
from paceline.engine.gpu import PagedCache
from paceline.engine.gpu_plan import Reads
from paceline.engine.graphs import Graphs
from paceline.engine.runner import ModelRunner
from paceline.runtime.offline import Offline, Output
from paceline.speculation.costs import Costs
from paceline.speculation.lookahead import Lookahead
from tests.engine import checkpoints
from tests.engine.schedules import forced
from tests.engine.test_model import Paged, load, prompt, reads_some

HOST = "cpu:0"
CUDA = pytest.param("cuda", marks=[
    pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
])  # fmt: skip
DEVICES = [HOST, CUDA]
BLOCK = 4
MIXED = ["llama-mqa", "llama-biases", "mistral-window", "qwen3-window", "llama-yarn"]


def varlen(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, window_size, enable_gqa, seqused_k, block_table,
           num_splits):  # fmt: skip
    """`torch.nn.attention.varlen.varlen_attn` as its documentation says it works, with a block table."""
    tables = (cu_seq_q, seqused_k, block_table) if cu_seq_k is None else (cu_seq_q, cu_seq_k, seqused_k, block_table)
    assert {table.dtype for table in tables} == {torch.int32} and num_splits == 1
    count = len(seqused_k)
    assert (
        cu_seq_q.shape == (count + 1,)
        and block_table.shape[0] == count
        and enable_gqa == (query.shape[1] != key.shape[2])
    )
    assert cu_seq_k is None or cu_seq_k.tolist() == [0, *seqused_k.cumsum(0).tolist()]
    out = torch.full_like(query, torch.nan)
    for begin, end, used, table in zip(cu_seq_q, cu_seq_q[1:], seqused_k, block_table, strict=False):
        length, used = int(end - begin), int(used)
        assert length <= max_q and used <= max_k
        keys, values = (page[table].flatten(0, 1)[:used].transpose(0, 1) for page in (key, value))
        behind = torch.arange(used - length, used)[:, None] - torch.arange(used)
        seen = ((behind >= 0) | (window_size[1] < 0)) & ((behind <= window_size[0]) | (window_size[0] < 0))
        part = query[begin:end].transpose(0, 1)
        out[begin:end] = F.scaled_dot_product_attention(part, keys, values, seen, enable_gqa=enable_gqa).transpose(0, 1)
    return out


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where FlashAttention reads pages."""
    monkeypatch.setattr(gpu, "varlen_attn", varlen)
    monkeypatch.setattr(gpu, "reads", lambda *_: Reads(BLOCK, None, True))


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """As on a GPU where there is Triton: interpreted, where there is none."""
    if torch.cuda.is_available():
        pytest.skip("here they are compiled for the GPU")
    monkeypatch.setattr(machine, "triton_kernels", lambda _: triton_kernels)
    monkeypatch.setattr(gpu, "reads", lambda *_: Reads(BLOCK, triton_kernels))
    monkeypatch.setattr(gpu_plan, "PROGRAMS", 8)
    if not request.node.get_closest_marker("slow"):  # to look for overflows takes a seventh of the time
        builder = interpreter.interpreter_builder
        monkeypatch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))


def through_chunks(paged: Paged, prompts: list[list[int]]) -> list[torch.Tensor]:
    """Logits of two prompts: whole ones, chunks at contexts, slices of one length, decodes."""
    got: list[list[torch.Tensor]] = [[], []]
    at = [0, 0]
    for lengths in [(17, 0), (1, 31), (13, 1), (3, 3), (1, 5), (29, 1), (1, 1), (9, 19), (16, 9)]:
        work = [(i, at[i], prompts[i][at[i] : at[i] + n]) for i, n in enumerate(lengths) if n]
        for (i, _, tokens), logits in zip(work, paged.step(work), strict=True):
            got[i].append(logits)
            at[i] += len(tokens)
        if at == [len(tokens) for tokens in prompts]:
            break
    else:
        raise AssertionError(f"the steps do not end where the prompts do: {at}")
    return [torch.cat(parts) for parts in got]


def apart(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest difference beside the size of the logits."""
    assert float(theirs.std()) > 0.3, "flat logits would prove nothing"
    return float((ours - theirs).abs().max() / theirs.abs().max())


def matches(family: str, device: str, path: Path, lengths: tuple[int, int] = (90, 70)) -> bool:
    model, prompts = checkpoints.save(family, path), [prompt(length, seed) for seed, length in enumerate(lengths, 1)]
    ours = through_chunks(Paged(load(path, device=device)), prompts)
    pairs = zip(ours, prompts, strict=True)
    return all(apart(mine, checkpoints.reference_logits(model, tokens)) < 1e-4 for mine, tokens in pairs)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", checkpoints.FAMILIES)
def test_logits_match_transformers(family: str, device: str, tmp_path: Path) -> None:
    assert matches(family, device, tmp_path)


@pytest.mark.parametrize("family", MIXED)
def test_flash_attention_is_asked_for_the_same(family: str, flash: None, tmp_path: Path) -> None:
    assert matches(family, HOST, tmp_path)


@pytest.mark.parametrize("family", [pytest.param("llama-mqa", marks=pytest.mark.slow), "qwen3-window"])
def test_our_kernels_compute_the_same(family: str, kernels: None, tmp_path: Path) -> None:
    assert matches(family, HOST, tmp_path, (35, 40))


def rows_to_draw(vocab: int, device: str) -> torch.Tensor:
    """Logits with steps, ties, rows that are flat, partly impossible, or without a distribution."""
    rows = 4 * torch.randn(12, vocab, generator=torch.Generator().manual_seed(vocab))
    rows[1] = (rows[1] * 2).round() / 2
    rows[2] = rows[2].round()
    rows[3] = 0.0
    rows[4, ::2] = -0.0
    rows[5, ::3] = -torch.inf
    rows[6] = -torch.inf
    rows[7, 1], rows[8, 2] = torch.nan, torch.inf
    rows[9, 3] = 88.0
    return rows.to(device)


@pytest.mark.parametrize(
    ("device", "vocab", "every"),
    [
        (HOST, 150, 4), pytest.param(HOST, 150, 1, marks=pytest.mark.slow),  # interpreted: fewer
        *(pytest.param("cuda", vocab, 1, marks=CUDA.marks) for vocab in (7, 5000, 131072)),
    ],
)  # fmt: skip
def test_draws_are_those_of_sorted_rows(device: str, vocab: int, every: int, monkeypatch) -> None:
    """Every so many rows a turn."""
    if device == HOST:
        monkeypatch.setattr(triton_sampler, "BLOCK", 128)
    logits = rows_to_draw(vocab, device)
    kinds = [(1.0, 1.0, 0.0, 0), (0.7, 0.9, 0.0, 0), (1.3, 0.5, 0.02, 5), (1.0, 1.0, 0.3, 3), (1.5, 1e-6, 0.0, 0),
             (1.0, 0.95, 0.0, 4), (0.3, 0.3, 0.0, 0)]  # fmt: skip
    for turn, kind in enumerate(kinds):
        rows, numbers = list(range(turn % every, 12, every)), [kind] * 12
        numbers[4] = kinds[turn - 1]
        drawn = []
        for by in (triton_sampler.draw, stock_sampler._draw_sorted):
            peaks, tokens = logits.max(dim=1)
            keys = [keyed_random.position_key(keyed_random.stream_key(turn, 0), row) for row in rows]
            by(logits, peaks, tokens, rows, keys, [numbers[row] for row in rows])
            drawn.append(torch.where(peaks.isfinite(), tokens, -1).tolist())
        assert drawn[0] == drawn[1]
        assert drawn[0][6:9] == [-1] * 3 and min(drawn[0][:6]) >= 0


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from paceline.engine import triton_sampler as sampler

numbers = dict.fromkeys(("stride", "size", "count"), "i32")
arrays = {"logits": "*fp32", "peaks": "*fp32", "tokens": "*i64", "rows": "*i64", "keys": "*i64", "numbers": "*fp64"}
known = {"BLOCK": sampler.BLOCK, "A": sampler.MUL_A, "B": sampler.MUL_B, "C": sampler.MUL_C}
source = ASTSource(sampler._draw, numbers | arrays | dict.fromkeys(known, "constexpr"), known)
triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": sampler.WARPS})
"""


def test_the_kernel_that_draws_compiles_for_a_gpu() -> None:
    """Types are not looked at when it is interpreted."""
    compiled = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=compiled, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("wrong", [False, True])
def test_a_kernel_that_draws_something_else_is_not_used(wrong: bool, monkeypatch, capsys) -> None:
    if wrong:
        monkeypatch.setattr(triton_sampler, "MUL_A", 1)
    stock_sampler._kernel.cache_clear()
    assert (stock_sampler._kernel("cpu:0", triton_kernels) is None) == wrong
    assert stock_sampler._kernel("cpu:0", None) is None
    stock_sampler._kernel.cache_clear()
    assert ("tokens are drawn by torch's operations" in capsys.readouterr().err) == wrong


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", ["llama-tied", "qwen3-bias", "mixtral"])
def test_half_precision(family: str, kind: str, device: str, tmp_path: Path) -> None:
    """The mantissa of bfloat16 has 8 bits, that of float16 11. A router may choose another expert then."""
    model, prompts = checkpoints.save(family, tmp_path, torch.bfloat16), [prompt(90, 1), prompt(70, 2)]
    decoder = load(tmp_path, device=device, kind=kind)
    paged = Paged(decoder, 60, gpu.block_size(device, [(decoder.dtype, decoder.config.head_dim)]))
    assert {paged.cache.pool.dtype, paged.decoder.layers[0].qkv.weight.dtype} == {getattr(torch, kind)}
    for mine, tokens in zip(through_chunks(paged, prompts), prompts, strict=True):
        theirs = checkpoints.reference_logits(model, tokens)
        assert (mine - theirs).abs().mean() / theirs.std() < (0.05 if family != "mixtral" else 0.2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", ["llama3-rope", "qwen3-moe"])
def test_what_nobody_reads_is_not_computed(family: str, device: str, tmp_path: Path) -> None:
    checkpoints.save(family, tmp_path)
    reads_some(load(tmp_path, device=device))


def test_slices_are_gathered_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_plan, "GATHERED", 40)
    assert matches("qwen2-window", HOST, tmp_path)


def test_a_tied_head_is_held_once(tmp_path: Path) -> None:
    for family, once in (("llama-tied", True), ("llama2", False)):
        checkpoints.save(family, tmp_path / family)
        decoder = load(tmp_path / family, device=HOST)
        assert (decoder.embedding.table.data_ptr() == decoder.head.weight.data_ptr()) == once


class Eager(Graphs):
    """Records nothing: the same passes over the same memory, when they are asked for; what they yield, too, is where it
    was."""

    def _record(self, make):
        out = []

        def replay():
            new = make()
            out[:] = out or [new]
            return out[0].copy_(new)

        return replay


def one_token_each(turn: int, known: list[list[int]]) -> list[tuple[int, int, list[int]]]:
    count = len(known) - 1
    return [(n, len(known[n]), [9 + turn]) for n in range((count, 3, min(8, count), 1, count)[turn])]


def hybrid(turn: int, known: list[list[int]]) -> list[tuple[int, int, list[int]]]:
    """Decodes, verifications and chunks, a new sequence's too."""
    new = len(known) - 1
    lengths = [{0: 1, 1: 4, 2: 17}, {0: 1, 2: 1, 1: 1}, {1: 3}, {2: 1, new: 21}, {new: 1, 0: 6, 1: 1}][turn]
    return [(n, len(known[n]), prompt(length, turn + n)) for n, length in lengths.items()]


@pytest.mark.parametrize(
    ("device", "by", "most", "work", "turns"),
    [
        (HOST, "flash", 11, one_token_each, range(5)), (HOST, "flash", 11, hybrid, range(5)),
        (HOST, "kernels", 3, hybrid, (0, 1)),  # interpreted: fewer
        pytest.param(HOST, "kernels", 3, hybrid, range(5), marks=pytest.mark.slow),
        pytest.param(HOST, "kernels", 3, one_token_each, range(5), marks=pytest.mark.slow),
        pytest.param("cuda", None, 11, one_token_each, range(5), marks=CUDA.marks),
        pytest.param("cuda", None, 11, hybrid, range(5), marks=CUDA.marks),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning")  # rows that are nobody's hold anything
def test_graphs_compute_what_passes_do(
    work, device: str, by: str | None, most: int, turns: Sequence[int], tmp_path: Path, request, monkeypatch
) -> None:
    checkpoints.save("qwen2", tmp_path)
    kind = "bfloat16"
    if by:
        request.getfixturevalue(by)
        monkeypatch.setattr("paceline.engine.model.Graphs", Eager)
        kind = "plain"
    decoder = load(tmp_path, device=device, kind=kind)
    size = gpu.block_size(device, [(decoder.dtype, decoder.config.head_dim)])
    plain, recorded = (Paged(decoder, 60, size) for _ in range(2))
    known = [prompt(5 + n, n) for n in range(most)] + [[]]
    for paged in (plain, recorded):
        paged.step([(n, 0, tokens) for n, tokens in enumerate(known) if tokens])
    with torch.inference_mode():
        decoder.record(recorded.cache, most, 22, 60)
    graph, decoder.graphs = decoder.graphs, None
    assert graph.sizes == [1, 2, 4, 8, 16][: 3 if most == 3 else 5]
    assert graph.hybrid == ([] if by == "flash" else [1, 2, 4, 8, 16, 24])
    near = 1e-5 if kind == "plain" else 0.1
    for turn in turns:
        slices = work(turn, known)
        want = plain.step(slices)
        decoder.graphs = graph
        spans = [SliceSpan(at, len(tokens), plain.tables[n]) for n, at, tokens in slices]
        assert graph.fit(decoder.plan(spans, size)) == (by != "flash" or all(len(tokens) == 1 for *_, tokens in slices))
        got = recorded.step(slices, [1] * len(slices))
        decoder.graphs = None
        for (n, _, tokens), mine, theirs in zip(slices, got, want, strict=True):
            assert torch.allclose(mine, theirs[-1:], atol=near), (turn, n)
            known[n] += tokens
    own = slice(0, recorded.cache.num_blocks)  # rows that fill up a batch have touched nobody's
    assert torch.allclose(recorded.cache.pool[:, :, own].float(), plain.cache.pool[:, :, own].float(), atol=near)


def test_graphs_are_for_what_they_have_room_for(flash, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("paceline.engine.model.Graphs", Eager)
    checkpoints.save("qwen2", tmp_path / "one")
    decoder = load(tmp_path / "one", device=HOST)
    cache = PagedCache(decoder.config, 60, BLOCK, HOST)
    with torch.inference_mode():
        decoder.record(cache, 3, 30, 40)

    def fits(*spans: SliceSpan) -> bool:
        return decoder.graphs.fit(decoder.plan(list(spans), BLOCK))

    one = SliceSpan(3, 1, [0])
    assert fits(one) and fits(*[one] * 4) and fits(SliceSpan(39, 1, list(range(10))))
    assert not fits(*[one] * 5) and not fits(SliceSpan(3, 2, [0, 1]), one)
    assert not fits(SliceSpan(40, 1, list(range(11))))
    checkpoints.save("mixtral", tmp_path / "experts")
    experts = load(tmp_path / "experts", device=HOST)
    experts.record(PagedCache(experts.config, 60, BLOCK, HOST), 3, 30, 40)
    assert experts.graphs is None


def generate(device: str, drafter: str = "ngram", draft: int = 0, dtype: str = "float32") -> list[list[int]]:
    """What the built-in model says, greedy and seeded, in chunks and batches, now and then preempted."""
    runner = ModelRunner.load(
        BUILTIN / "coder", max_batch_tokens=64, max_batch=8, num_blocks=100, device=device, dtype=dtype,
        drafter=drafter,
    )  # fmt: skip
    size = runner.info.block_size
    offline = Offline(runner, GroupConfig(scheduler=SchedulerConfig(48, 8, size, 100)))
    forced(7)(offline.controller.groups[0].scheduler)
    text = "import os\nimport sys\n\n\nclass Point:\n    def __init__(self, x, y):\n        self.x = x\n"
    tokens = [[3 + ord(letter) % 90 for letter in part] for part in (text * 2, "def f(")] * 3
    base = SamplingParams(max_tokens=24, ignore_eos=True, max_draft_tokens=draft)
    params = [
        replace(base, temperature=0.0),
        replace(base, temperature=0.9, top_p=0.9, seed=5),
        replace(base, temperature=1.1, top_k=20, seed=6, repetition_penalty=1.2),
    ]
    return [list(output.tokens) for output in offline.generate(tokens, params * 2)]


@pytest.fixture(scope="module")
def on_cpu() -> list[list[int]]:
    return generate("cpu")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("drafter", "draft"), [("ngram", 0), ("ngram", 3), (str(BUILTIN / "coder-draft"), 3), ("early_exit", 3)],
    ids=["none", "ngram", "model", "early_exit"],
)  # fmt: skip
def test_a_runner_yields_the_tokens_of_a_cpu(drafter: str, draft: int, device: str, on_cpu: list[list[int]]) -> None:
    assert generate(device, drafter, draft) == on_cpu


def ahead(
    device: str, dtype: str, steps: int, blocks: int = 100, drafts: int = 0
) -> tuple[list[Output], list[int]]:
    """What requests of many kinds get with steps composed so far ahead, the simple ones first, and for each step that
    began before the last one's tokens were known its slices."""
    runner = ModelRunner.load(
        BUILTIN / "coder", max_batch_tokens=64, max_batch=8, num_blocks=blocks, device=device, dtype=dtype,
    )
    begin, early = runner.begin, list[int]()

    def watched(slices):
        if runner._open and runner._open.tokens is not None:
            early.append(len(slices))
        return begin(slices)

    runner.begin = watched
    limits = SchedulerConfig(48, 8, runner.info.block_size, blocks)
    text = "import os\nimport sys\n\n\nclass Point:\n    def __init__(self, x, y):\n        self.x = x\n"
    tokens = [3 + ord(letter) % 90 for letter in text * 2]
    greedy = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.0)
    params = [
        greedy, replace(greedy, max_tokens=1), replace(greedy, max_tokens=2), replace(greedy, temperature=0.9, seed=5),
        replace(greedy, temperature=0.8, top_p=0.9, top_k=30, seed=6), replace(greedy, max_tokens=17),
        replace(greedy, stop_token_ids=tuple(range(0, 8192, 7))), replace(greedy, repetition_penalty=1.2),
        replace(greedy, logprobs=2), replace(greedy, prompt_logprobs=1), replace(greedy, min_tokens=9),
        replace(greedy, logit_bias=((11, 4.0),)),
    ]  # fmt: skip
    params = [replace(one, max_draft_tokens=drafts) for one in params]
    lookahead = (lambda: Lookahead(Costs([1.0 + n for n in range(600)]), None)) if drafts else None  # seldom worth it
    config, outputs = GroupConfig(scheduler=limits, ahead=steps, lookahead=lookahead), []
    for some in (params[:7], params, *([greedy, one] for one in params[7:])):
        prompts = [tokens[: 9 + 11 * n] for n in range(len(some))]
        outputs += Offline(runner, config).generate(prompts, some)
    return outputs, early


@pytest.mark.parametrize(("blocks", "drafts"), [(100, 0), (22, 0), (100, 4)], ids=["", "few_blocks", "at_rest"])
@pytest.mark.parametrize("device", DEVICES)
def test_steps_ahead_of_their_last_tokens_yield_the_same(device: str, blocks: int, drafts: int, monkeypatch) -> None:
    monkeypatch.setattr("paceline.engine.runner.LOGIT_ROWS", 4)  # a step's logits come in parts
    want, none = ahead("cpu", "float32", 0)
    got, early = ahead(device, "float32", 1, blocks, drafts)
    assert not none and (sum(early) > 50 and max(early) > 3 if not drafts else sum(early) > 20)
    for mine, theirs in zip(got, want, strict=True):
        assert (mine.tokens, mine.finish, mine.error) == (theirs.tokens, theirs.finish, "")
        assert [entry.token for entry in mine.logprobs] == [entry.token for entry in theirs.logprobs]
        assert len(mine.prompt_logprobs) == len(theirs.prompt_logprobs)
    assert {output.finish for output in got} == {"length", "stop"}


def test_a_step_takes_no_less_than_nothing(monkeypatch) -> None:
    """Though the device was done with it before the one before it was looked at."""
    runner = ModelRunner.load(BUILTIN / "coder-draft", max_batch_tokens=64, max_batch=8, num_blocks=9, device=HOST)
    monkeypatch.setattr(machine.Moment, "until", lambda *_: 60.0)
    new = NewSequence(1, [5, 6], 2, SamplingParams(temperature=0.0))
    runner.learn([new], [])
    first = runner.begin([SliceWork(1, 0, 2, True, 0, [0, 1])])
    second = runner.begin([SliceWork(1, 2, 1, True, 2, [])])
    for step in (first, second):
        step.heads = []
        (output,), forward, sampling = step.finish()
        assert len(output.tokens) == 1 and 0.0 <= forward <= 60.0 and 0.0 <= sampling < 60.0
        assert step.draft_s == 0.0, "it drafts nothing, and its preparation is no part of these times"


def test_what_waits_for_the_last_tokens_is_known_before_it_begins() -> None:
    runner = ModelRunner.load(BUILTIN / "coder-draft", max_batch_tokens=64, max_batch=8, num_blocks=9, device=HOST)
    greedy = SamplingParams(temperature=0.0)
    kinds = [greedy, replace(greedy, logprobs=2), replace(greedy, repetition_penalty=1.2)]
    runner.learn([NewSequence(id, [5, 6], 2, params) for id, params in enumerate(kinds)], [])
    slices = [SliceWork(id, 0, 2, True, 0, [id]) for id in range(3)]
    assert [runner.follows([one]) for one in slices] == [True, False, False]
    assert not runner.follows(slices) and not runner.follows([slices[0]._replace(num_draft=1)])


@pytest.mark.slow  # a minute in Triton's interpreter
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning")  # rows that are nobody's hold anything
def test_a_runner_with_graphs_does_too(kernels: None, on_cpu: list[list[int]], monkeypatch, capsys) -> None:
    """Of hybrid batches as well, of which some rows are read."""
    monkeypatch.setattr("paceline.engine.model.Graphs", Eager)
    assert generate(HOST, str(BUILTIN / "coder-draft"), 3) == on_cpu
    assert not capsys.readouterr().err, "steps go without drafts"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("drafter", ["ngram", str(BUILTIN / "coder-draft")], ids=["ngram", "model"])
def test_a_runner_in_half_precision(drafter: str, device: str, on_cpu: list[list[int]]) -> None:
    """Begins as in float32; a token that is nearly as likely as another may be that other."""
    got = generate(device, drafter, 3, "bfloat16")
    assert [len(tokens) for tokens in got] == [24] * 6
    assert sum(mine[:4] == theirs[:4] for mine, theirs in zip(got, on_cpu, strict=True)) >= 4


@pytest.mark.parametrize("device", DEVICES)
def test_a_pass_that_fails_is_taken_apart(device: str, request, monkeypatch) -> None:
    """Each decode gets its own hidden states, though a graph writes all of them to the same place."""
    if device == HOST:
        request.getfixturevalue("flash")
        monkeypatch.setattr("paceline.engine.model.Graphs", Eager)
    limits = dict(max_batch_tokens=64, max_batch=4, num_blocks=40, device=device)
    dtype = "float32" if device == HOST else "bfloat16"
    runner = ModelRunner.load(BUILTIN / "coder", dtype=dtype, **limits)
    assert runner.decoder.graphs is not None
    greedy = SamplingParams(temperature=0.0, ignore_eos=True)
    new = [NewSequence(n, prompt(9, n), 9, greedy) for n in range(4)]
    per = -(-11 // runner.info.block_size)
    works = [SliceWork(n, 0, 9, True, 0, list(range(n * per, (n + 1) * per))) for n in range(4)]
    assert not any(output.error for output in runner.step(new, works, [])[0])
    decodes = [SliceWork(n, 9, 1, True, per, []) for n in range(4)]
    known = [sequence.tokens[:] for sequence in runner.sequences.values()]
    want = [output.tokens for output in runner.step([], decodes, [])[0]]
    again = [NewSequence(n, list(tokens), 9, greedy) for n, tokens in enumerate(known)]
    forward = runner.decoder.forward

    def alone(tokens, *others):
        if len(tokens) > 1:
            raise RuntimeError("out of memory")
        return forward(tokens, *others)

    monkeypatch.setattr(runner.decoder, "forward", alone)
    decodes = [SliceWork(n, 9, 1, True, 0, list(range(n * per, (n + 1) * per))) for n in range(4)]
    assert [output.tokens for output in runner.step(again, decodes, list(range(4)))[0]] == want
    assert len({tuple(tokens) for tokens in want}) > 1, "else it proves nothing"


def test_memory_is_planned_for_what_a_device_holds(tmp_path: Path) -> None:
    limits = dict(max_batch_tokens=64, max_batch=8, num_blocks=20)
    half = ModelRunner.load(BUILTIN / "coder", device=HOST, dtype="bfloat16", **limits)
    whole = ModelRunner.load(BUILTIN / "coder", device=HOST, **limits)
    config = half.decoder.config
    table = config.hidden * config.vocab_size * (0 if config.tied else 1)
    assert whole.info.weight_bytes == config.weight_bytes() + 4 * table
    parts = [part for layer in half.decoder.layers for part in (layer.qkv, layer.out, layer.gate_up, layer.down)]
    held = sum(part.nbytes for part in (*parts, half.decoder.head)) + 2 * table
    assert held < half.info.weight_bytes < 1.02 * held
    assert half.info.kv_bytes == half.info.num_blocks * half.info.block_size * half.cache.token_bytes
    assert 2 * half.info.kv_bytes == whole.info.kv_bytes


@pytest.mark.parametrize("counts", [True, False])
def test_flash_attention_is_tried_before_it_is_used(counts: bool, monkeypatch) -> None:
    monkeypatch.setattr(gpu, "varlen_attn", varlen)
    how = Reads(8, None, counts)
    assert gpu._is_right(how, HOST, torch.bfloat16, 16)

    def first_only(*args, **options):  # https://github.com/pytorch/pytorch/issues/194167
        out = varlen(*args, **options)
        out[7:] = 0.0
        return out

    def without_windows(*args, window_size, **options):
        return varlen(*args, window_size=(-1, window_size[1]), **options)

    for wrong in (first_only, without_windows):
        monkeypatch.setattr(gpu, "varlen_attn", wrong)
        assert not gpu._is_right(how, HOST, torch.bfloat16, 16)
    assert gpu.reads(HOST, torch.bfloat16, 16) is None  # no such thing on a host


@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.float16, 80), (torch.float32, 64)])
def test_our_kernels_read_pages(dtype: torch.dtype, head_dim: int, kernels: None) -> None:
    assert gpu._is_right(Reads(16, triton_kernels), HOST, dtype, head_dim)


@pytest.mark.skipif(torch.cuda.is_available(), reason="here they run")
def test_kernels_that_do_not_run_are_not_used(capsys) -> None:
    assert machine.triton_kernels.__wrapped__("cuda") is None
    assert "torch's operations, for our own kernels do not run" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_pages_are_read_where_they_are(dtype: torch.dtype, head_dim: int) -> None:
    by = gpu.reads("cuda", dtype, head_dim)
    assert by and by.kernels and gpu._is_right(by._replace(block_size=2 * by.block_size), "cuda", dtype, head_dim)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_flash_attention_reads_pages_where_our_kernels_do_not(dtype: torch.dtype, head_dim: int, monkeypatch) -> None:
    """On Ampere and later with torch 2.13."""
    monkeypatch.setattr(machine, "triton_kernels", lambda _: None)
    by = gpu.reads.__wrapped__("cuda", dtype, head_dim)
    if by is None and (torch.__version__ < "2.13" or torch.cuda.get_device_capability()[0] < 8):
        pytest.skip("torch's FlashAttention reads no pages here")
    assert by and by.block_size in gpu.PAGES
    assert gpu._is_right(by._replace(block_size=2 * by.block_size), "cuda", dtype, head_dim)


@pytest.mark.slow  # a minute where a processor has no products of bfloat16
def test_the_benchmark_runs() -> None:
    shape = Shape(64, 96, 2, 4, ((48, 2, 5.0, 17),), vocabulary=8192, context=40, batches=(1, 3), widths=(17,))
    result = measure(shape, HOST)
    ours, theirs = (result[name] for name in ("ours", next(name for name in result if "transformers" in name)))
    assert set(ours["decode_ms"]) == set(theirs["decode_ms"]) == {1, 3}
    policies = ours["policies"][0]
    assert set(policies["end_to_end"]) == set(policies["steady"]) == set(POLICIES) and ours["prompt_share_of_peak"] > 0
