"""trl's SFTTrainer on tokens; `--packing` packs them."""

import sys
import tempfile

import datasets
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

words = {f"w{number}": number for number in range(250)} | {"<pad>": 250, "<eos>": 251, "<unk>": 252}
tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
fast = PreTrainedTokenizerFast(
    tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
)
shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(
    LlamaConfig(vocab_size=256, num_key_value_heads=2, max_position_embeddings=64, **shape)
)
rows = [
    {"text": " ".join(f"w{(7 * row + place) % 250}" for place in range(8 + row % 20))} for row in range(128)
]
arguments = SFTConfig(
    output_dir=tempfile.mkdtemp(),
    per_device_train_batch_size=4,
    max_steps=10,
    max_length=32,
    packing="--packing" in sys.argv,
    report_to="none",
    save_strategy="no",
    disable_tqdm=True,
    bf16=False,
    gradient_checkpointing=False,
)
SFTTrainer(
    model=model, args=arguments, train_dataset=datasets.Dataset.from_list(rows), processing_class=fast
).train()
