"""The tokenizer: the target's own, a user's, or a byte-level BPE trained on the standard-library corpus."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steptime.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|MASK|>")
"""End of text (also pad), start and end of a turn (the end is eos), and the drafter's mask slot."""

MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Single tokens inside a turn, kept when decoding."""

MASK_TOKEN = "<|MASK|>"
MODEL_MAX_LENGTH = 32768

# ChatML as Qwen writes it: thoughts stay only in the turns after the last question, tool results travel as a
# user's turn, and everything that the model itself would write lies between the generation tags.
CHAT_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages and messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- 'Tools that you may call:' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- elif messages and messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set last = namespace(question=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set last.question = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}
        {%- if message.reasoning_content and loop.index0 > last.question %}
            {{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {%- set function = call.function or call %}
            {{- '\\n' if content or not loop.first }}
            {{- '<tool_call>\\n' }}
            {{- {'name': function.name, 'arguments': function.arguments} | tojson }}
            {{- '\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + content + '\\n</tool_response><|im_end|>\\n' }}
    {%- elif message.role != 'system' or not loop.first %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE of at most `vocab_size` tokens (special ones included) with a chat template.

    Equal texts in equal order give an equal tokenizer. Pad is `<|endoftext|>`, eos `<|im_end|>`, and the mask
    token is neither.

    Raises:
        UserError: `vocab_size` leaves no room for the 256 bytes and the special tokens.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    least = 256 + len(SPECIAL_TOKENS) + len(MARKERS)
    if vocab_size < least:
        raise UserError(
            f"target.tiny.vocab_size = {vocab_size}: a byte-level tokenizer needs at least {least}"
        )
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIAL_TOKENS) - len(MARKERS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    # After the text's own tokens, as released models have it: a mask id in the last rows of the embedding.
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL_TOKENS])
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKERS])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        mask_token=MASK_TOKEN,
        model_max_length=MODEL_MAX_LENGTH,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def read_tokenizer(source: str | Path, key: str = "data.tokenizer") -> Any:
    """Read a Hugging Face tokenizer from a folder, or by id from the local cache; nothing is downloaded.

    Raises:
        UserError: nothing there, or a tokenizer without a fast implementation (character offsets are needed
            to mark the assistant's tokens).
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(source), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise UserError(f"{key} = {str(source)!r}: no tokenizer could be loaded: {reason.strip()}") from None
    if len(tokenizer) <= len(
        tokenizer.all_special_tokens
    ):  # transformers makes an empty one for a folder with a config alone
        raise UserError(
            f"{key} = {str(source)!r}: no tokenizer there; give one with --set data.tokenizer=FOLDER"
        )
    if not getattr(tokenizer, "is_fast", False):
        raise UserError(
            f"{key} = {str(source)!r}: {type(tokenizer).__name__} has no fast version, which is needed for "
            "offsets"
        )
    return tokenizer
