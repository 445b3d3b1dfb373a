"""Small real trainings with the Hugging Face Trainer and Lightning, to be run as jobs of one rank."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from rig.ranks import Rank


def hugging_face_trainer(rank: Rank, output: Path, max_steps: int, resume: bool) -> int:
    """Trains a tiny Llama, saving each step and keeping two; returns the step it ends at."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
    )
    tokens = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 64, (16, 8))]
    arguments = TrainingArguments(
        output_dir=str(output),
        max_steps=max_steps,
        save_steps=1,
        save_total_limit=2,
        per_device_train_batch_size=1,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
    )
    trainer: Any = Trainer(model=LlamaForCausalLM(config), args=arguments, train_dataset=tokens)
    trainer.train(resume_from_checkpoint=resume)
    return int(trainer.state.global_step)


def lightning_trainer(rank: Rank, output: Path, steps: int, resume_from: Path | None) -> int:
    """Trains Lightning's demo model, saving each step with a `last.ckpt` symlink; returns the step it ends at."""
    import logging

    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.demos.boring_classes import BoringModel

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    keep = ModelCheckpoint(
        dirpath=output, every_n_train_steps=1, save_last="link", save_top_k=2, monitor="step", mode="max"
    )
    trainer = Trainer(
        max_steps=steps,
        max_epochs=-1,
        callbacks=[keep],
        accelerator="cpu",
        logger=False,
        limit_val_batches=0,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=output,
    )
    trainer.fit(BoringModel(), ckpt_path=str(resume_from) if resume_from else None, weights_only=False)
    return int(trainer.global_step)
