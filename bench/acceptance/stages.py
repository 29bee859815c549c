"""The stages of the acceptance bench: target, answers, drafter, release, evaluation. Each keeps its result in
the folder."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch

from bench.acceptance import language_model
from bench.acceptance.recipe import Corpus, Recipe, build_corpus, drafter_settings
from dflash.config import Config, load_config
from dflash.data.generators import TargetGenerator
from dflash.data.prepare import Fields
from dflash.data.regenerate import read_tasks, regenerate
from dflash.data.tokenizer import MASK_TOKEN, read_tokenizer
from dflash.decode.between import table as between_table
from dflash.decode.evaluate import compare, evaluate, to_json
from dflash.decode.figures import Figures, summarise, table
from dflash.decode.picture import plot
from dflash.decode.prompts import read_prompts
from dflash.device import Device
from dflash.models.drafter import Drafter
from dflash.models.target import Target, build_tiny, inspect_target, load_target, save_target
from dflash.pipeline.trained import load_trained
from dflash.release.export import export
from dflash.release.released import build_drafter, load_released
from steptime.files import atomic_folder, atomic_text
from steptime.progress import Reporter

SCHEMA = "dflash-acceptance/1"
T = TypeVar("T")


class AcceptanceRun:
    """One run of all stages in `folder`."""

    def __init__(
        self,
        recipe: Recipe,
        config_file: Path,
        settings: list[str],
        folder: Path,
        data: Path | None,
        heldout: Path | None,
        fields: Fields,
    ) -> None:
        self.recipe, self.config_file, self.settings, self.folder = recipe, config_file, settings, folder
        self.data, self.heldout, self.fields = data, heldout, fields
        self.report = Reporter()
        self.seconds: dict[str, float] = {}
        self.notes: dict[str, Any] = {}

    def all(self) -> int:
        """Every stage; returns the exit code."""
        config = load_config(self.config_file, self.settings)
        self.folder.mkdir(parents=True, exist_ok=True)
        corpus = self.timed("corpus", lambda: self.corpus(config))
        target_folder = self.timed("target", lambda: self.train_target(config, corpus))
        answers = self.timed("answers", lambda: self.answers(config, corpus, target_folder))
        mask = read_tokenizer(target_folder).convert_tokens_to_ids(MASK_TOKEN)
        settings = [*drafter_settings(target_folder, answers, self.recipe.steps, mask), *self.settings]
        drafting = load_config(self.config_file, settings)
        release = self.timed("drafter", lambda: self.train_drafter(drafting, settings))
        before, after = self.timed("evaluation", lambda: self.evaluate(drafting, corpus, release))
        return self.conclude(drafting, before, after)

    def timed(self, stage: str, work: Callable[[], T]) -> T:
        began = time.perf_counter()
        result = work()
        self.seconds[stage] = round(time.perf_counter() - began, 1)
        self.report.say(f"{stage}: {self.seconds[stage]:.0f} s")
        return result

    def corpus(self, config: Config) -> Corpus:
        corpus = build_corpus(
            config, self.folder, self.data, self.heldout, self.fields, self.recipe.target.length
        )
        tokens = sum(len(sample.input_ids) for sample in corpus.train)
        self.report.say(
            f"corpus: {len(corpus.train):,} conversations, {tokens:,} tokens, from {corpus.train_file}"
        )
        return corpus

    def train_target(self, config: Config, corpus: Corpus) -> Path:
        """The target's folder: weights in float32 and its tokenizer."""
        folder = self.folder / "target"
        if (folder / "config.json").exists():
            self.report.say(f"target: {folder} is there already")
            return folder
        tokenizer = read_tokenizer(corpus.tokenizer)
        model = build_tiny(config.target)
        model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
        model.config.pad_token_id = model.generation_config.pad_token_id = tokenizer.pad_token_id
        losses = language_model.train(model, corpus.train, self.recipe.target, self.report.say)
        heldout = language_model.heldout_loss(model, corpus.heldout)
        self.report.say(f"target: {heldout:.2f} nats a token on held-out answers")
        self.notes["target"] = {"first_loss": losses[0], "last_loss": losses[-1], "heldout_loss": heldout}
        with atomic_folder(folder) as draft:
            save_target(model, draft)
            tokenizer.save_pretrained(draft)
        return folder

    def answers(self, config: Config, corpus: Corpus, target_folder: Path) -> Path:
        """Token ids as the target read and wrote them; or the corpus itself when no answers are to be
        rewritten."""
        if self.recipe.answers == 0:
            return corpus.train_file
        out = self.folder / "answers.jsonl"
        if out.exists():
            return out
        target = self.target(target_folder, (0,))
        tokenizer = read_tokenizer(target_folder)
        generator = TargetGenerator(
            target.model,
            tokenizer,
            [tokenizer.eos_token_id],
            self.recipe.answer_tokens,
            batch=64,
            context=config.data.max_length,
        )
        tasks, _ = read_tasks(corpus.train_file, self.recipe.answers, True, config.data.cache)
        result = regenerate(
            tasks, generator, out, {"answer_tokens": self.recipe.answer_tokens}, as_tokens=True
        )
        self.report.say(
            f"answers: {result.written:,} by the target, {result.cut:,} of them cut at "
            f"{self.recipe.answer_tokens} tokens"
        )
        return out

    def train_drafter(self, config: Config, settings: list[str]) -> Path:
        """The released drafter's folder: trained by `dflash train`, exported by `dflash export`."""
        from dflash.commands.train import train

        release, run = self.folder / "release", self.folder / "run"
        if (release / "config.json").exists():
            return release
        if train(self.config_file, settings, run) != 0:
            raise RuntimeError(f"the drafter's training ended early; see {run}")
        trained = load_trained(run)
        export(trained.shape, trained.tensors, inspect_target(config.target), release)
        return release

    def target(self, folder: Path, layer_ids: tuple[int, ...]) -> Target:
        """In float32, where a text must be equal token for token."""
        settings = load_config(None, [f"target.model={folder}", f"target.layer_ids={list(layer_ids)}"]).target
        return load_target(settings, Device("cpu"))

    def evaluate(self, config: Config, corpus: Corpus, release: Path) -> tuple[Figures, Figures]:
        """Held-out prompts before and after training."""
        shape, tensors = load_released(release)
        target = self.target(Path(config.target.model), shape.target_layer_ids)
        tokenizer = read_tokenizer(config.target.model)
        prompts = read_prompts(
            corpus.heldout_file,
            tokenizer,
            shape.vocab_size,
            limit=self.recipe.heldout,
            context=target.info.max_positions,
            max_new_tokens=self.recipe.answer_tokens,
        )
        options: dict[str, Any] = {
            "max_new_tokens": self.recipe.answer_tokens,
            "stop_ids": [tokenizer.eos_token_id],
        }
        untrained = Drafter(shape, config.train.seed).eval().requires_grad_(False)
        first = summarise(
            evaluate(target, untrained, prompts[: self.recipe.before], **options), shape.block_size
        )
        drafter = build_drafter(shape, tensors, torch.device("cpu"), torch.float32)
        results = evaluate(target, drafter, prompts, **options)
        figures = summarise(results, shape.block_size)
        between = compare(target, drafter, prompts, results, figures)
        self.report.say(table(figures, results))
        self.report.say(between_table(between))
        self.write("after.json", to_json(figures, results, {"name": config.name}, between))
        plot(self.folder / "slots.svg", figures, config.name, between)
        return first, figures

    def conclude(self, config: Config, before: Figures, after: Figures) -> int:
        """The verdict, on the terminal and in acceptance.json."""
        reached = after.tau >= self.recipe.goal
        lossless = before.lossless and after.lossless
        self.write(
            "acceptance.json",
            {
                "schema": SCHEMA,
                "data": str(self.data or "stdlib"),
                "recipe": asdict(self.recipe),
                "config_digest": config.digest(),
                "block_size": config.drafter.block_size,
                "before": before.to_json(),
                "after": after.to_json(),
                "goal": self.recipe.goal,
                "reached": reached,
                "lossless": lossless,
                "seconds": self.seconds,
                **self.notes,
            },
        )
        speed = "" if after.speed_up is None else f", {after.speed_up:.2f}x as fast as the target alone"
        self.report.say(
            f"acceptance length at B = {config.drafter.block_size}: {before.tau:.2f} before, {after.tau:.2f} "
            f"after (95%: {after.tau_low:.2f} to {after.tau_high:.2f}; goal "
            f"{self.recipe.goal:g}){speed}\nlossless: {before.same + after.same} of "
            f"{before.prompts + after.prompts} prompts token for token"
            + (f", {before.ties + after.ties} at a tie" if before.ties + after.ties else "")
            + (f", {before.differ + after.differ} DIFFER" if before.differ + after.differ else "")
            + f"\n{sum(self.seconds.values()):.0f} s in all; {self.folder / 'acceptance.json'}"
        )
        return 0 if reached and lossless else 1

    def write(self, name: str, content: dict[str, Any]) -> None:
        with atomic_text(self.folder / name) as sink:
            json.dump(content, sink, indent=1)
