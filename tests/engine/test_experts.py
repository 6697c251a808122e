"""Mixtures of experts: routing, parts of the experts, rows of a batch, and whole models under a scheduler."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from paceline.batching.config import SchedulerConfig
from paceline.controller import GroupConfig
from paceline.core.request import SamplingParams
from paceline.engine import profiler
from paceline.engine.config import ModelConfig, ModelError
from paceline.engine.experts import Experts
from paceline.engine.linear import Norm, best_kind, make_linear
from paceline.engine.model import _Loader
from paceline.engine.parallel import part_of
from paceline.engine.runner import ModelRunner
from paceline.engine.weights import Checkpoint
from paceline.runtime.offline import Offline
from tests.engine import checkpoints
from tests.engine.schedules import Schedule, forced
from tests.engine.test_linear import FLOAT, INT8, TILES, random
from tests.engine.test_model import load, prompt

HIDDEN, INNER, COUNT = 64, 40, 5
MOE = [name for name in checkpoints.FAMILIES if "moe" in name or "mixtral" in name]
TILED = [kind for kind in (*FLOAT, *INT8) if "tiled" in kind]
NORM = Norm(random(HIDDEN, seed=8).abs() + 0.5, 1e-6)


def weights(count: int = COUNT) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Of the router, and of each expert."""
    experts = [
        (random(2 * INNER, HIDDEN, seed=10 + i) / 8, random(HIDDEN, INNER, seed=50 + i) / 6) for i in range(count)
    ]
    return random(count, HIDDEN, seed=9) / 4, experts


def make(kind: str, local: range = range(COUNT), per_token: int = 2, norm_topk: bool = True) -> Experts:
    router, experts = weights()
    held = [(make_linear(kind, experts[i][0], gated=True), make_linear(kind, experts[i][1])) for i in local]
    return Experts(make_linear(best_kind("cpu"), router), held, local, per_token, norm_topk)


def reference(x: Tensor, per_token: int, norm_topk: bool) -> Tensor:
    """In float64, every expert over every row."""
    router, experts = weights()
    x = F.rms_norm(x.double(), x.shape[1:], NORM.weight.double(), NORM.eps)
    shares = (x @ router.double().T).softmax(dim=1)
    least = shares.sort(dim=1, descending=True).values[:, per_token - 1 : per_token]
    shares = shares * (shares >= least)
    if norm_topk:
        shares = shares / shares.sum(dim=1, keepdim=True)
    total = torch.zeros_like(x)
    for expert, (gate_up, down) in enumerate(experts):
        gate, up = (x @ gate_up.double().T).chunk(2, dim=1)
        total += shares[:, expert, None] * ((F.silu(gate) * up) @ down.double().T)
    return total.float()


@pytest.mark.parametrize("kind", FLOAT)
@pytest.mark.parametrize(("per_token", "norm_topk"), [(1, False), (1, True), (2, True), (3, False), (COUNT, False)])
def test_it_is_the_weighted_sum_of_the_likeliest(kind: str, per_token: int, norm_topk: bool) -> None:
    experts = make(kind, per_token=per_token, norm_topk=norm_topk)
    for rows in (1, 3, 70):
        x, base = random(rows, HIDDEN, seed=rows), random(rows, HIDDEN, seed=rows + 1)
        kept = x.clone()
        y = base.clone()
        assert experts(x, NORM, add_to=y) is y and torch.equal(x, kept)
        torch.testing.assert_close(y - base, reference(x, per_token, norm_topk), rtol=1e-4, atol=1e-5)
        experts(x, NORM, add_to=x)  # in place of what it reads, as the decoder does
        torch.testing.assert_close(x - kept, y - base, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [best_kind("cpu"), best_kind("cpu", "int8")])
@pytest.mark.parametrize("parts", [(0, 2, 5), (0, 1, 1, 4, 5)], ids=str)
def test_parts_sum_to_the_whole(kind: str, parts: tuple[int, ...]) -> None:
    x = random(33, HIDDEN)
    whole, total, each = torch.zeros(33, HIDDEN), torch.zeros(33, HIDDEN), []
    make(kind)(x, NORM, add_to=whole)
    for begin, end in zip(parts, parts[1:], strict=False):
        each.append(make(kind, range(begin, end))(x, NORM, add_to=torch.zeros(33, HIDDEN)))
        total += each[-1]
    torch.testing.assert_close(total, whole, rtol=1e-5, atol=1e-6)
    assert all(bool(part.any()) == (begin < end) for part, begin, end in zip(each, parts, parts[1:], strict=False))


@pytest.mark.parametrize("kind", TILED)
def test_the_bits_of_a_row_do_not_depend_on_the_batch(kind: str) -> None:
    experts, x = make(kind, per_token=3), random(530, HIDDEN, seed=1)
    whole = experts(x, NORM, add_to=torch.zeros_like(x))
    for begin, end in ((0, 1), (3, 5), (8, 16), (1, 18), (505, 530), (0, 512)):
        part = x[begin:end]
        assert torch.equal(experts(part, NORM, add_to=torch.zeros_like(part)), whole[begin:end])


@pytest.mark.parametrize("kind", INT8)
def test_int8_is_near_float(kind: str) -> None:
    """The router is float32, so the same experts are chosen."""
    x = random(100, HIDDEN)
    exact, ours = (make(one)(x, NORM, add_to=torch.zeros_like(x)) for one in (best_kind("cpu"), kind))
    assert 0 < (ours - exact).norm() < 0.03 * exact.norm()


def test_a_row_runs_the_experts_that_it_chose_and_no_others() -> None:
    experts, x = make("plain", per_token=2), random(1, HIDDEN)
    chosen = set(experts.route(x, NORM)[1].flatten().tolist())

    def refuse(*arguments: object) -> None:
        raise AssertionError("not chosen")

    experts.held = [held if i in chosen else (refuse, refuse) for i, held in enumerate(experts.held)]
    experts(x, NORM, add_to=torch.zeros_like(x))
    with pytest.raises(AssertionError, match="not chosen"):
        experts(random(50, HIDDEN), NORM, add_to=torch.zeros(50, HIDDEN))


def test_a_row_that_is_not_a_number_stays_its_own_fault() -> None:
    experts, x = make(best_kind("cpu")), random(20, HIDDEN)
    clean = experts(x, NORM, add_to=torch.zeros_like(x))
    x[3, 5] = float("nan")
    dirty = experts(x, NORM, add_to=torch.zeros_like(x))
    others = [row for row in range(20) if row != 3]
    assert dirty[3].isnan().all()
    torch.testing.assert_close(dirty[others], clean[others], rtol=1e-5, atol=1e-6)


def test_weights_of_other_experts_than_the_local_ones_are_refused() -> None:
    with pytest.raises(ValueError, match="local: 3 experts, and weights of 5"):
        whole = make("plain")
        Experts(whole.router, whole.held, range(3), 2, True)


# Whole models


@pytest.mark.parametrize("family", MOE)
def test_bytes_of_the_weights_are_those_of_the_tensors(family: str, tmp_path: Path) -> None:
    model, config = checkpoints.save(family, tmp_path), ModelConfig.load(tmp_path)
    named = {name: value for name, value in model.state_dict().items() if not name.startswith("model.embed_tokens")}
    named["lm_head.weight"] = model.lm_head.weight
    assert config.weight_bytes() == 4 * sum(value.numel() for value in named.values())
    whole = [value for name, value in named.items() if value.ndim == 1 or name.endswith("mlp.gate.weight")]
    rounded = [value for value in named.values() if all(value is not one for one in whole)]
    int8 = sum(value.numel() + 8 * value.numel() // value.shape[-1] for value in rounded)
    assert config.weight_bytes("int8") == int8 + 4 * sum(value.numel() for value in whole)
    kept = sum(config.layer_bytes(layer, experts=0) for layer in range(config.layers))
    experts = sum(value.numel() for name, value in named.items() if ".experts." in name)
    assert config.weight_bytes() - 4 * experts == kept + 4 * (model.lm_head.weight.numel() + config.hidden)


def test_which_layers_are_sparse(tmp_path: Path) -> None:
    for family, sparse in (("mixtral", {0, 1, 2}), ("qwen3-moe", {0, 2}), ("qwen3-moe-every-other", {1})):
        checkpoints.save(family, tmp_path / family)
        decoder = load(tmp_path / family)
        assert decoder.config.sparse == sparse and decoder.addresses is None
        assert {index for index, layer in enumerate(decoder.layers) if layer.experts} == sparse


@pytest.mark.parametrize("kind", [best_kind("cpu"), *INT8])
def test_a_router_is_float_and_a_loader_may_hold_some_of_the_experts(kind: str, tmp_path: Path) -> None:
    checkpoints.save("mixtral", tmp_path)
    decoder = load(tmp_path, kind=kind)
    whole, norm = decoder.layers[1].experts, decoder.layers[1].post_norm
    assert whole.router.kind == best_kind("cpu") and {part.kind for pair in whole.held for part in pair} == {kind}
    x = random(9, decoder.config.hidden)
    expected, total = whole(x, norm, add_to=torch.zeros_like(x)), torch.zeros_like(x)
    for local in (range(0, 2), range(2, 5)):
        part = replace(part_of(decoder.config), experts=local)
        loader = _Loader(Checkpoint(tmp_path), decoder.config, part, "cpu", kind, lambda done, of: None)
        loader.experts(1)(x, norm, add_to=total)
        read = {name for name in loader.reader.checkpoint.used if ".experts." in name}
        assert read == {f"model.layers.1.block_sparse_moe.experts.{i}.w{n}.weight" for i in local for n in (1, 2, 3)}
    torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("family", "lost"),
    [
        ("mixtral", "model.layers.1.block_sparse_moe.experts.4.w3.weight"),
        ("mixtral", "model.layers.0.block_sparse_moe.gate.weight"),
        ("qwen3-moe", "model.layers.2.mlp.experts.6.down_proj.weight"),
    ],
)
def test_a_missing_tensor_is_named(family: str, lost: str, tmp_path: Path) -> None:
    checkpoints.save(family, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[lost]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=rf"tensor {lost} is missing$") as error:
        load(tmp_path)
    assert "\n" not in str(error.value)


def test_experts_that_the_config_does_not_tell_of_are_named(tmp_path: Path) -> None:
    checkpoints.save("mixtral", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_local_experts": 4}))
    with pytest.raises(ModelError, match=r"gate.weight has shape \[5, 48\], expected \[4, 48\]"):
        load(tmp_path)


LOAD = """
import sys
from paceline.engine.config import ModelConfig
from paceline.engine.host import resident_bytes
from paceline.engine.model import load_decoder
from paceline.engine.weights import Checkpoint
config, before = ModelConfig.load(sys.argv[1]), resident_bytes()
load_decoder(Checkpoint(sys.argv[1]), config)
lines = open("/proc/self/status").read().splitlines()
peak = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
print((peak - before) / config.weight_bytes())
"""


@pytest.mark.slow
def test_loading_experts_holds_few_of_them_twice(tmp_path: Path) -> None:
    """The heap keeps holes of their size unless it is trimmed: 2.3 times the weights then, 1.3 if it is."""
    config = Qwen3MoeConfig(
        vocab_size=256, hidden_size=512, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=1,
        num_experts=40, num_experts_per_tok=2, moe_intermediate_size=256,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    root = Path(__file__).parents[2]
    measure = [sys.executable, "-c", LOAD, tmp_path]
    done = subprocess.run(measure, check=True, capture_output=True, cwd=root, text=True)
    assert 1.0 < float(done.stdout) < 1.6


NUM_BLOCKS, OUTPUT = 80, 24
PROMPTS = [prompt(length, seed=length) for length in (5, 21, 60, 90)]
PROMPTS.append([*PROMPTS[3][:70], 7, 9])


class Generated(list):
    """Tokens of each prompt; of all steps their tokens, those preempted and those drafted."""

    computed = preempted = drafted = 0


def generate(
    runner: ModelRunner, prompts: list[list[int]], budget: int = 512, draft: int = 0, schedule: Schedule | None = None,
    times: int = 1,
) -> Generated:  # fmt: skip
    """`times`: one after the other, all but the first with prompts that the prefix cache knows; the last counts."""
    limits = SchedulerConfig(token_budget=budget, max_batch=8, num_blocks=NUM_BLOCKS)
    offline = Offline(runner, GroupConfig(scheduler=limits))
    if schedule:
        schedule(offline.controller.groups[0].scheduler)
    params = SamplingParams(max_tokens=OUTPUT, temperature=0.0, ignore_eos=True, max_draft_tokens=draft)
    for _ in range(times):
        result = Generated()

        def count(batch, outputs, *_, result=result):
            result.computed += batch.num_tokens
            result.preempted += len(batch.preempted)
            result.drafted += sum(output.num_draft for output in outputs)

        offline.on_step = count
        outputs = offline.generate(prompts, [params] * len(prompts))
        assert not any(output.error for output in outputs)
        result += [output.tokens for output in outputs]
    return result


@pytest.fixture(scope="module", params=["mixtral-window", "qwen3-moe"])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, object]:
    path = tmp_path_factory.mktemp(request.param)
    return path, checkpoints.save(request.param, path)


@pytest.mark.skipif(not TILES, reason="other kernels round rows of a batch otherwise")
@pytest.mark.parametrize("quantization", ["none", pytest.param("int8", marks=pytest.mark.slow)])
@pytest.mark.parametrize("drafter", ["ngram", "early_exit"])
def test_tokens_do_not_depend_on_the_schedule(family: tuple, quantization: str, drafter: str) -> None:
    runner = ModelRunner.load(
        family[0], max_batch_tokens=512, max_batch=8, num_blocks=NUM_BLOCKS, quantization=quantization, drafter=drafter
    )
    alone = [generate(runner, [one])[0] for one in PROMPTS]
    if quantization == "none":
        assert alone == [checkpoints.reference_greedy(family[1], one, OUTPUT) for one in PROMPTS]
    assert generate(runner, PROMPTS) == alone
    if quantization == "none":  # in int8 a bit more or less from a token's being in a chunk may round to another number
        assert generate(runner, PROMPTS, budget=7) == alone
        preempted = generate(runner, PROMPTS, budget=64, schedule=forced(5))
        assert preempted == alone and preempted.preempted > 0
    drafted = generate(runner, PROMPTS, draft=4)
    assert drafted == alone and drafted.drafted > 0
    cached = generate(runner, PROMPTS, times=2)
    assert cached == alone and cached.computed < generate(runner, PROMPTS).computed - 100


def test_roofline_counts_the_experts_that_work(family: tuple) -> None:
    runner = ModelRunner.load(family[0], max_batch_tokens=64, max_batch=8, num_blocks=NUM_BLOCKS)
    floor, config = profiler.roofline(runner, "none"), runner.decoder.config
    experts = [value for name, value in family[1].state_dict().items() if ".experts." in name]
    assert floor.expert_bytes == 4 * sum(value.numel() for value in experts)
    assert floor.expert_share == config.experts_per_token / config.experts
    others = [
        value for name, value in family[1].state_dict().items() if name.startswith("model.layers") and value.ndim == 2
    ]
    active = sum(value.numel() for value in experts) * config.experts_per_token // config.experts
    whole = 2 * (active + sum(value.numel() for value in others) + config.hidden * config.vocab_size)
    assert floor.token_flop + floor.emit_flop == whole
    last = config.layer_matrices(config.layers - 1, config.experts_per_token)[1:]  # behind queries, keys and values
    head, router = config.hidden * config.vocab_size, config.hidden * config.experts
    assert floor.emit_flop == 2 * (sum(rows * columns for rows, columns in last) + head + router)
