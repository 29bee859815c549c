"""The readers, each with what it is given and what must hold of what it gives back.

A reader's check raises whatever is a fault. `UserError` and `BadSample` are right answers, as long as they
are one line."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from safetensors.torch import save

from dflash.config import Config, DataConfig, load_config
from dflash.data.conversations import load_samples
from dflash.data.regenerate import PartFile
from dflash.data.template import BadSample, ChatRenderer
from dflash.data.thoughts import Thoughts
from dflash.data.tokenizer import CHAT_TEMPLATE, train_tokenizer
from dflash.decode.prompts import read_prompts
from dflash.models.drafter import Drafter, DrafterShape
from dflash.pipeline import checkpoint
from dflash.pipeline.trained import load_trained
from dflash.release.released import load_released
from steptime.errors import UserError
from tests.fuzz import inputs

ROOT = Path(__file__).parents[2]
LONGEST_LINE = 4000
VOCAB = 400


@dataclass(frozen=True)
class Reader:
    """One reader.

    Attributes:
        given: what hypothesis draws.
        check: reads it; raises on a fault.
    """

    name: str
    given: st.SearchStrategy[Any]
    check: Callable[[Any], None]


def one_line(error: Exception) -> None:
    """What a user gets to see: a line, of letters that any terminal shows."""
    text = str(error)
    assert text, "an empty message"
    assert "\n" not in text, f"more than one line: {text[:300]!r}"
    assert len(text) < LONGEST_LINE, f"{len(text)} characters: {text[:300]!r}"
    text.encode()


@cache
def folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="dflash-fuzz-"))


@cache
def tokenizer() -> Any:
    return train_tokenizer(["the quick brown fox", "Hi? <think> hm </think> Be short."] * 3, VOCAB)


def put(name: str, raw: bytes) -> Path:
    path = folder() / name
    path.write_bytes(raw)
    return path


# -- data ----------------------------------------------------------------------------------------------------


def conversations(drawn: tuple[bytes, bool, str, str, bool]) -> None:
    raw, skip, reasoning, turns, packed = drawn
    path = put("data.jsonl", raw)
    config = DataConfig(
        path=str(path),
        cache=str(folder()),
        max_length=64,
        buckets=(64,),
        skip_bad=skip,
        reasoning=reasoning,  # type: ignore[arg-type]
        turns=turns,  # type: ignore[arg-type]
        pack=packed,
    )
    try:
        dataset = load_samples(config, tokenizer(), vocab_size=VOCAB)
    except UserError as error:
        one_line(error)
        return
    for _, reason in dataset.skipped:
        one_line(BadSample(reason))
    for sample in dataset.samples:
        assert 0 < len(sample.input_ids) == len(sample.loss_mask) <= 64
        assert (sample.loss_mask[:-1] & sample.loss_mask[1:]).any()
        assert sample.input_ids.min() >= 0
        assert sample.input_ids.max() < VOCAB


def prompts(drawn: tuple[bytes, bool | None]) -> None:
    raw, thinking = drawn
    path = put("prompts.jsonl", raw)
    try:
        sizes: dict[str, Any] = {"limit": 5, "context": 200, "max_new_tokens": 8, "longest": 64}
        found = read_prompts(path, tokenizer(), VOCAB, cache=folder(), thinking=thinking, **sizes)
    except UserError as error:
        one_line(error)
        return
    for prompt in found:
        assert prompt.ids
        assert max(prompt.ids) < VOCAB
        assert len(prompt.data_ids) == len(prompt.data_mask) <= 64
        assert not prompt.data_ids or any(prompt.data_mask)


TEMPLATE_PARTS = [
    "{% for m in messages %}",
    "{% endfor %}",
    "{{ m.content }}",
    "{{ m['role'] }}",
    "{{ m.content | trim }}",
    "{{ m.content.split('</think>')[-1] }}",
    "{% generation %}",
    "{% endgeneration %}",
    "{% if m.role == 'assistant' %}",
    "{% if add_generation_prompt %}",
    "{% if m.reasoning_content %}",
    "{% endif %}",
    "<|im_start|>assistant\n",
    "<|im_end|>\n",
    "{{ raise_exception('no') }}",
    "{{ 1 / 0 }}",
    "{{ messages[99].content }}",
    "{{ loop.index0 }}",
    "{{ m.tool_calls | tojson }}",
    "{{ strftime_now('%Y') }}",
    "{{ m.missing.deeper }}",
    "{% set x = namespace(a=1) %}",
    "<think>",
    "</think>",
    "Xq00001cQx",
]
GOOD = [
    CHAT_TEMPLATE,
    "{% for m in messages %}{{ m.role + ': ' + m.content + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}",
    "{% for m in messages %}<{{ m.role }}>{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
]
templates_drawn = st.one_of(
    st.sampled_from(GOOD),
    st.lists(st.sampled_from(TEMPLATE_PARTS), max_size=12).map("".join),
    inputs.damaged(st.sampled_from(GOOD).map(str.encode)).map(lambda raw: raw.decode(errors="replace")),
)


def templates(drawn: tuple[str, list[dict], str, str]) -> None:
    from dflash.data.messages import conversation_of

    template, turns, reasoning, which = drawn
    made = tokenizer()
    own = made.chat_template
    made.chat_template = template
    try:
        found = conversation_of({"messages": turns})
        assert found is not None
        renderer = ChatRenderer(made, reasoning, which)
        messages = Thoughts(renderer)(*found)
        rendered = renderer(messages, found[1])
        last = 0
        for start, end in rendered.spans:
            assert last <= start < end <= len(rendered.text)
            last = end
        renderer.without_stop(rendered)
    except (BadSample, UserError) as error:
        one_line(error)
    finally:
        made.chat_template = own


def part_files(raw: bytes) -> None:
    path = put("out.jsonl.0.part", raw)
    part = PartFile(folder() / "out.jsonl", "0")
    try:
        part.add(7, [{"a": 1}])
        assert all(isinstance(index, int) for index in part.rows)
        part.finish(folder() / "out.jsonl")
        for line in (folder() / "out.jsonl").read_bytes().splitlines():
            assert isinstance(json.loads(line), dict)
    except UserError as error:
        one_line(error)
    finally:
        part.close()
        path.unlink(missing_ok=True)


# -- settings ------------------------------------------------------------------------------------------------

CONFIGS = [path.read_bytes() for path in sorted((ROOT / "configs").glob("*.toml"))]
SETTINGS = [
    "train.steps=3",
    "train.lr=1e-3",
    "data.buckets=[64, 128]",
    "drafter.heads=7",
    "target.tiny.layers=2",
]
SETTINGS += [
    'observe.sinks=["x"]',
    "name=3",
    "train={}",
    "data.path",
    "=",
    "a.b.c=1",
    "train..steps=1",
    ".=.",
]


def settings(drawn: tuple[bytes, str, list[str]]) -> None:
    raw, suffix, overrides = drawn
    try:
        config = load_config(put(f"config{suffix}", raw), overrides)
    except UserError as error:
        one_line(error)
        return
    assert isinstance(config, Config)
    assert Config.model_validate_json(config.model_dump_json()).digest() == config.digest()


# -- drafters ------------------------------------------------------------------------------------------------

SHAPE = DrafterShape(
    hidden_size=8,
    intermediate_size=8,
    layers=1,
    heads=2,
    kv_heads=1,
    head_dim=4,
    block_size=4,
    vocab_size=20,
    mask_token_id=19,
    target_layers=4,
    target_layer_ids=(1, 2),
)


@cache
def drafter_tensors() -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in Drafter(SHAPE).state_dict().items()}


@cache
def weights(prefix: str = "") -> bytes:
    return save({f"{prefix}{name}": tensor for name, tensor in drafter_tensors().items()})


def released_config() -> dict[str, Any]:
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": 4,
        "dflash_config": {"mask_token_id": 19, "target_layer_ids": [1, 2], "block_size": 4},
        "num_target_layers": 4,
        "vocab_size": 20,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 4,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "layer_types": ["full_attention"],
        "sliding_window": None,
    }


def speculators_config() -> dict[str, Any]:
    plain = released_config()
    return {
        "speculators_model_type": "dflash",
        "aux_hidden_state_layer_ids": [2, 3],
        "block_size": 4,
        "draft_vocab_size": 20,
        "mask_token_id": 19,
        "num_target_layers": 4,
        "transformer_layer_config": {name: plain[name] for name in plain if name != "dflash_config"},
    }


configs_drawn = st.one_of(
    inputs.changed(st.builds(released_config)).map(inputs.written),
    inputs.changed(st.builds(speculators_config)).map(inputs.written),
    inputs.damaged(st.builds(released_config).map(inputs.written)),
)
weights_drawn = st.one_of(st.builds(weights), inputs.damaged(st.builds(weights)))


def released(drawn: tuple[bytes, bytes, bytes | None]) -> None:
    config, raw, index = drawn
    put("config.json", config)
    put("model.safetensors", raw)
    place = folder() / "model.safetensors.index.json"
    place.unlink(missing_ok=True)
    if index is not None:
        place.write_bytes(index)
    try:
        shape, tensors = load_released(folder())
    except UserError as error:
        one_line(error)
        return
    assert Drafter(shape).state_dict().keys() == tensors.keys()


index_drawn = st.one_of(
    st.none(),
    st.none(),
    inputs.changed(st.just({"weight_map": {"fc.weight": "model.safetensors"}})).map(inputs.written),
)


def record() -> dict[str, Any]:
    state = checkpoint.State(checkpoint.Progress(3, 3), {}, {}, *([{}] * _MORE))
    made = checkpoint._record(state)
    made["drafter_shape"] = {name: getattr(SHAPE, name) for name in SHAPE.__dataclass_fields__}
    made["drafter_shape"]["target_layer_ids"] = [1, 2]
    return made


_MORE = len(checkpoint.State.__dataclass_fields__) - 3


def checkpoints(drawn: tuple[bytes, bytes]) -> None:
    raw, tensors = drawn
    step = folder() / "step-00000003"
    step.mkdir(exist_ok=True)
    (step / "state.json").write_bytes(raw)
    (step / "state.safetensors").write_bytes(tensors)
    sums = [
        f"{hashlib.sha256(d).hexdigest()}  {n}\n"
        for n, d in (("state.safetensors", tensors), ("state.json", raw))
    ]
    (step / getattr(checkpoint, "SUMS", "none")).write_text("".join(sums))
    try:
        trained = load_trained(step)
    except UserError as error:
        one_line(error)
        return
    assert Drafter(trained.shape).state_dict().keys() == trained.tensors.keys()


# -- the harness ---------------------------------------------------------------------------------------------


def baselines(raw: bytes) -> None:
    from steptime.baselines import store

    (folder() / "pro6000x8").mkdir(exist_ok=True)
    path = put("pro6000x8/fuzz.json", raw)
    try:
        store.to_json(store.read(path))
    except UserError as error:
        one_line(error)


def receipts(raw: bytes) -> None:
    from steptime.records.receipt import Receipt

    path = put("receipt.json", raw)
    try:
        read = Receipt.read(path)
    except UserError as error:
        one_line(error)
        return
    assert Receipt.from_json(read.to_json()) == read


@cache
def stored(name: str) -> Any:
    if name == "baseline":
        return json.loads(next((ROOT / "baselines").glob("*/*.json")).read_text(encoding="utf-8"))
    from tests.steptime.records.test_receipt import receipt

    return json.loads(receipt().to_json())


def tree_of(name: str) -> st.SearchStrategy[bytes]:
    whole = st.builds(stored, st.just(name))
    return st.one_of(inputs.changed(whole).map(inputs.written), inputs.damaged(whole.map(inputs.written)))


READERS = [
    Reader(
        "conversations",
        st.tuples(
            inputs.files,
            st.booleans(),
            st.sampled_from(["train", "mask"]),
            st.sampled_from(["all", "last"]),
            st.booleans(),
        ),
        conversations,
    ),
    Reader("prompts", st.tuples(inputs.files, st.sampled_from([None, True, False])), prompts),
    Reader(
        "templates",
        st.tuples(
            templates_drawn,
            inputs.changed(inputs.turns, 1).filter(lambda found: isinstance(found, list) and found),
            st.sampled_from(["train", "mask"]),
            st.sampled_from(["all", "last"]),
        ),
        templates,
    ),
    Reader(
        "part files",
        inputs.damaged(
            st.lists(inputs.changed(st.just([1, [{"conversations": []}]])).map(inputs.written)).map(
                lambda found: b"".join(line + b"\n" for line in found)
            )
        ),
        part_files,
    ),
    Reader(
        "settings",
        st.tuples(
            st.one_of(
                inputs.damaged(st.sampled_from(CONFIGS)),
                inputs.changed(st.builds(lambda: Config().model_dump(mode="json"))).map(inputs.written),
                st.binary(max_size=40),
            ),
            st.sampled_from([".toml", ".json"]),
            st.lists(st.one_of(st.sampled_from(SETTINGS), inputs.texts), max_size=2),
        ),
        settings,
    ),
    Reader("released folders", st.tuples(configs_drawn, weights_drawn, index_drawn), released),
    Reader(
        "checkpoints",
        st.tuples(
            st.one_of(
                inputs.changed(st.builds(record)).map(inputs.written),
                inputs.damaged(st.builds(record).map(inputs.written)),
            ),
            st.one_of(
                st.builds(weights, st.just("master/")), inputs.damaged(st.builds(weights, st.just("master/")))
            ),
        ),
        checkpoints,
    ),
    Reader("baselines", tree_of("baseline"), baselines),
    Reader("receipts", tree_of("receipt"), receipts),
]
