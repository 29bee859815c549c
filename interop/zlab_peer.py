"""Runs in an environment of its own, where `dflash` is z-lab's package: loads a release strictly and drafts
with it.

python zlab_peer.py FOLDER    reads FOLDER/job.json, writes FOLDER/answer.json; targets lie there too
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import dflash.model
import torch
from dflash.model import DFlashDraftModel, dflash_generate
from transformers import AutoModelForCausalLM


class Recorder:
    """The target, noting every block that it is asked to verify."""

    def __init__(self, target: torch.nn.Module) -> None:
        self.target = target
        self.blocks: list[list[int]] = []
        self.passes = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self.target, name)

    def __call__(self, input_ids: torch.Tensor, **options: object) -> object:
        if self.passes:  # the first pass is the prompt's
            self.blocks.append(input_ids[0].tolist())
        self.passes += 1
        return self.target(input_ids, **options)


def load(folder: Path) -> tuple[DFlashDraftModel, dict[str, list[str]]]:
    model, report = DFlashDraftModel.from_pretrained(
        str(folder), output_loading_info=True, dtype=torch.float32
    )
    return model.eval(), {name: sorted(map(str, found)) for name, found in report.items()}


def main(folder: Path) -> None:
    dflash.model._cuda_time = time.perf_counter  # its clock waits for a GPU
    job = json.loads((folder / "job.json").read_text())
    target = AutoModelForCausalLM.from_pretrained(str(folder / "target"), dtype=torch.float32).eval()
    answer: dict[str, object] = {}
    for name in job["releases"]:
        model, report = load(folder / name)
        runs = []
        for prompt in job["prompts"]:
            recorder = Recorder(target)
            result = dflash_generate(
                model,
                recorder,
                torch.tensor([prompt]),
                job["max_new_tokens"],
                None,
                temperature=0.0,
                return_stats=True,
            )
            runs.append(
                {
                    "tokens": result.output_ids[0, len(prompt) :].tolist(),
                    "blocks": recorder.blocks,
                    "accepted": result.acceptance_lengths,
                }
            )
        answer[name] = {"loading": report, "runs": runs}
    (folder / "answer.json").write_text(json.dumps(answer))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
