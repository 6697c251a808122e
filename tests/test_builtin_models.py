"""The shipped models: complete, small, bfloat16, one lossless tokenizer, and cards that tell the truth about size."""

import json
import re
from pathlib import Path

import pytest
from safetensors import safe_open
from tokenizers import Tokenizer

import paceline

BUILTIN = Path(paceline.__file__).parent / "builtin"
NAMES = ["coder", "coder-draft"]
FILES = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"}
NASTY = [
    "",
    " ",
    "\t\n \r\n\r  \n",
    "    trailing spaces   ",
    "def __init__(self, ",
    "tabs\tand\x00NUL\x7f and \x1b[31mcolour",
    "naïve façade, Ελληνικά, 中文字, العربية, 🏳️‍🌈 e\u0301 \u200b \ufeff \U0010ffff",
    "0123456789" * 30,
    "_" * 300 + "a__b" + '"' * 7 + "\\" * 9,
    "<|endoftext|>x<|endoftext|>",
    "".join(map(chr, range(1, 0x800))),
]


def read_json(name: str, file: str) -> dict:
    return json.loads((BUILTIN / name / file).read_text())


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(BUILTIN / "coder" / "tokenizer.json"))


@pytest.mark.parametrize("name", NAMES)
def test_directory_is_complete(name: str) -> None:
    assert {path.name for path in (BUILTIN / name).iterdir()} == FILES | {"README.md"}


def test_both_together_stay_small() -> None:
    files = [path for name in NAMES for path in (BUILTIN / name).iterdir()]
    assert sum(path.stat().st_size for path in files) < 40_000_000


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_bfloat16_and_match_the_config(name: str) -> None:
    config = read_json(name, "config.json")
    with safe_open(BUILTIN / name / "model.safetensors", framework="pt") as weights:
        slices = {key: weights.get_slice(key) for key in weights.keys()}  # noqa: SIM118  (it is no dict)
        assert {piece.get_dtype() for piece in slices.values()} == {"BF16"}
        shapes = {key: tuple(piece.get_shape()) for key, piece in slices.items()}
    assert shapes == expected_shapes(config)


def expected_shapes(config: dict) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a Llama checkpoint."""
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    query = config["num_attention_heads"] * config["head_dim"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "input_layernorm.weight": (hidden,),
            prefix + "post_attention_layernorm.weight": (hidden,),
            prefix + "self_attn.q_proj.weight": (query, hidden),
            prefix + "self_attn.k_proj.weight": (kv, hidden),
            prefix + "self_attn.v_proj.weight": (kv, hidden),
            prefix + "self_attn.o_proj.weight": (hidden, query),
            prefix + "mlp.gate_proj.weight": (inner, hidden),
            prefix + "mlp.up_proj.weight": (inner, hidden),
            prefix + "mlp.down_proj.weight": (hidden, inner),
        }
    return shapes


def test_draft_shares_the_tokenizer_byte_for_byte() -> None:
    first, second = ((BUILTIN / name / "tokenizer.json").read_bytes() for name in NAMES)
    assert first == second


@pytest.mark.parametrize("text", NASTY, ids=range(len(NASTY)))
def test_tokenizer_is_lossless(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("name", NAMES)
def test_special_tokens_agree(name: str, tokenizer: Tokenizer) -> None:
    end = tokenizer.token_to_id(read_json(name, "tokenizer_config.json")["eos_token"])
    assert end is not None
    assert read_json(name, "config.json")["eos_token_id"] == end
    assert read_json(name, "generation_config.json")["eos_token_id"] == end
    assert tokenizer.get_vocab_size() == read_json(name, "config.json")["vocab_size"]


@pytest.mark.parametrize("name", NAMES)
def test_card_states_the_true_size(name: str) -> None:
    card = (BUILTIN / name / "README.md").read_text()
    stated = re.search(r"Size: ([\d,]+) parameters in bfloat16; ([\d,]+) bytes", card)
    assert stated is not None
    parameters, num_bytes = (int(number.replace(",", "")) for number in stated.groups())
    assert parameters == num_parameters(name)
    assert num_bytes == sum((BUILTIN / name / file).stat().st_size for file in FILES)


def num_parameters(name: str) -> int:
    total = 0
    for shape in expected_shapes(read_json(name, "config.json")).values():
        size = 1
        for extent in shape:
            size *= extent
        total += size
    return total


def test_target_beats_the_4_gram_table_by_the_recorded_figures() -> None:
    path = Path(__file__).parents[1] / "benchmarks" / "results" / "builtin_models.json"
    results = json.loads(path.read_text())
    assert results["coder"]["held_out"]["bits_per_byte"] < results["ngram"]["4"]["bits_per_byte"]
    assert results["coder"]["bytes"] == sum((BUILTIN / "coder" / file).stat().st_size for file in FILES)
