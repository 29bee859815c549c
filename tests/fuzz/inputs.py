"""Inputs of every shape, as hypothesis draws them: JSON trees, valid ones that were changed, and bytes."""

from __future__ import annotations

import copy
import json
from typing import Any

from hypothesis import strategies as st

SURROGATES = ["\ud83d", "\udc00", "a\ud83d\udc00b"]
NASTY = [
    "",
    " ",
    "\n",
    "\x00",
    "\u2028",
    "\ufeff",
    "<think>",
    "</think>",
    "<|im_end|>",
    "Xq00000cQx",
    "{{",
    "é",
]
texts = st.one_of(
    st.sampled_from(SURROGATES + NASTY), st.text(max_size=12), st.text("<think/>|im_end \n", max_size=20)
)
numbers = st.one_of(
    st.integers(-3, 400),
    st.sampled_from([10**30, -(10**30), 2**31, 2**63, 1e308, -0.0, float("inf"), float("nan")]),
    st.floats(),
)
leaves = st.one_of(st.none(), st.booleans(), numbers, texts)
KEYS = ["role", "content", "from", "value", "messages", "conversations", "conversation", "system", "tools"]
KEYS += [
    "tool_calls",
    "function",
    "name",
    "arguments",
    "reasoning_content",
    "thinking",
    "input_ids",
    "loss_mask",
]
KEYS += ["prompt", "type", "text", "finished", "id", "parameters"]
keys = st.one_of(st.sampled_from(KEYS), texts)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(keys, inner, max_size=4)),
    max_leaves=12,
)


@st.composite
def changed(draw: st.DrawFn, whole: st.SearchStrategy[Any], most: int = 3) -> Any:
    """A valid tree in which a few nodes are something else, gone, or new."""
    tree = copy.deepcopy(draw(whole))
    for _ in range(draw(st.integers(0, most))):
        tree = _change(draw, tree)
    return tree


def _change(draw: st.DrawFn, tree: Any) -> Any:
    places = list(_places(tree, ()))
    place = places[draw(st.integers(0, len(places) - 1))]
    if not place:
        return draw(trees)
    node = tree
    for step in place[:-1]:
        node = node[step]
    what = draw(st.sampled_from(["other", "gone", "again", "deep"]))
    if what == "gone":
        del node[place[-1]]
    elif what == "again" and isinstance(node, list):
        node.insert(place[-1], copy.deepcopy(node[place[-1]]))
    elif what == "deep":
        node[place[-1]] = _nested(node[place[-1]], draw(st.sampled_from([3, 60])))
    else:
        node[place[-1]] = draw(trees)
    return tree


def _nested(value: Any, depth: int) -> Any:
    for _ in range(depth):
        value = [value]
    return value


def _places(tree: Any, at: tuple[Any, ...]) -> Any:
    yield at
    if len(at) > 40:
        return
    if isinstance(tree, dict):
        for key in tree:
            yield from _places(tree[key], (*at, key))
    elif isinstance(tree, list):
        for index in range(len(tree)):
            yield from _places(tree[index], (*at, index))


def written(tree: Any) -> bytes:
    """The tree as JSON."""
    return json.dumps(tree).encode()


@st.composite
def damaged(draw: st.DrawFn, whole: st.SearchStrategy[bytes]) -> bytes:
    """Bytes with some flipped, cut off or put in."""
    raw = bytearray(draw(whole))
    for _ in range(draw(st.integers(0, 3))):
        place = draw(st.integers(0, max(0, len(raw) - 1)))
        what = draw(st.sampled_from(["flip", "cut", "put", "swap", "deep"]))
        if what == "flip" and raw:
            raw[place] ^= 1 << draw(st.integers(0, 7))
        elif what == "cut":
            del raw[place:]
        elif what == "deep":
            raw[place:place] = draw(st.sampled_from([b"[", b'{"a":'])) * draw(st.sampled_from([90, 5000]))
        elif what == "swap":
            del raw[place : place + draw(st.integers(1, 9))]
        else:
            raw[place:place] = draw(st.binary(max_size=6))
    return bytes(raw)


TURNS = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "Hi?"},
    {"role": "assistant", "content": "the quick brown fox"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nthe fox"},
    {"role": "assistant", "content": "<think>\n\n</think>\n\nthe fox"},
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]},
    {"role": "tool", "content": "result"},
    {"from": "human", "value": "Hi?"},
    {"from": "gpt", "value": "well"},
    {"from": "function_call", "value": '{"name": "f", "arguments": {}}'},
    {"role": "user", "content": [{"type": "text", "text": "Hi?"}]},
]
turns = st.lists(st.sampled_from(TURNS), min_size=1, max_size=6)
rows = st.one_of(
    st.fixed_dictionaries({"messages": turns}, optional={"tools": st.just([{"function": {"name": "f"}}])}),
    st.fixed_dictionaries({"conversations": turns}, optional={"system": texts, "finished": st.booleans()}),
    st.lists(st.integers(1, 90), min_size=2, max_size=9).map(
        lambda ids: {"input_ids": ids, "loss_mask": [0] + [1] * (len(ids) - 1)}
    ),
    st.builds(lambda text: {"prompt": text}, texts),
)
lines = st.one_of(
    changed(rows).map(written),
    trees.map(written),
    damaged(changed(rows).map(written)),
    st.binary(max_size=20),
    st.sampled_from(
        [b"[" * 20_000, b'{"messages": "' + b"x" * 100_000 + b'"}', b'{"a": ' + b"9" * 5000 + b"}"]
    ),
)
files = st.one_of(
    st.lists(lines, max_size=4).map(b"\n".join),
    st.lists(changed(rows), max_size=3).map(written),
    damaged(st.lists(changed(rows), max_size=3).map(written)),
)
