"""A small Hugging Face run with three callbacks. What do they cost?

steptime overhead --hf -- hf_trainer.py"""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments


class GradNorms(TrainerCallback):
    """Reads the norm of each gradient: the host waits for each."""

    def on_pre_optimizer_step(self, args, state, control, model=None, **named):
        self.norms = {name: one.grad.norm().item() for name, one in model.named_parameters()}


class Steps(TrainerCallback):
    """Counts steps."""

    def on_step_end(self, args, state, control, **named):
        self.steps = state.global_step


class Losses(TrainerCallback):
    """Keeps what is logged."""

    def __init__(self):
        self.logs = []

    def on_log(self, args, state, control, logs=None, **named):
        self.logs.append(dict(logs))


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 256

    def __getitem__(self, i):
        ids = [(i * 7 + j) % 256 for j in range(32)]
        return {"input_ids": ids, "labels": ids, "attention_mask": [1] * 32}


def main():
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=128, **sizes, **heads))
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=4,
        max_steps=12,
        logging_steps=10,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    callbacks = [GradNorms(), Steps(), Losses()]
    Trainer(model=model, args=arguments, train_dataset=Numbers(), callbacks=callbacks).train()


if __name__ == "__main__":
    main()
