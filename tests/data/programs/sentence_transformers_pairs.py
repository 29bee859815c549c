"""sentence-transformers: pairs of sentences, a ranking loss over the batch, its own trainer."""

import tempfile

from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
from sentence_transformers import SentenceTransformerTrainingArguments as Arguments
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from transformers import BertConfig, BertModel, BertTokenizerFast

folder = tempfile.mkdtemp()
words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{n}" for n in range(50))]
with open(f"{folder}/vocab.txt", "w") as file:
    file.write("\n".join(words))
BertTokenizerFast(vocab_file=f"{folder}/vocab.txt").save_pretrained(folder)
shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
BertModel(BertConfig(vocab_size=len(words), **shape)).save_pretrained(folder)
encoder = Transformer(folder, max_seq_length=16)
model = SentenceTransformer(modules=[encoder, Pooling(encoder.get_embedding_dimension())], device="cuda")
pairs = [{"anchor": f"w{n % 50} w{n % 7}", "positive": f"w{n % 50} w{n % 11}"} for n in range(96)]
arguments = Arguments(
    output_dir=folder,
    max_steps=12,
    per_device_train_batch_size=8,
    report_to="none",
    save_strategy="no",
    disable_tqdm=True,
)
SentenceTransformerTrainer(
    model=model,
    args=arguments,
    train_dataset=Dataset.from_list(pairs),
    loss=MultipleNegativesRankingLoss(model),
).train()
