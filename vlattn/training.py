"""Training a captioner: one straight line from a data set to a model folder, on `accelerate`.

B pictures, K real tokens of a batch, V vocabulary.
"""

import ctypes
import math
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import (
    broadcast_object_list,
    gather_object,
    parse_flag_from_env,
    set_seed,
)
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

from vlattn.attention.functional import HAS_FAST_BF16
from vlattn.captioner import Captioner
from vlattn.config import TrainConfig
from vlattn.data.dataset import Batch, CaptionDataset, collate, epoch_batches
from vlattn.data.layouts import read_records
from vlattn.data.records import DataError, Record
from vlattn.encoder import TimmEncoder
from vlattn.evaluation import Habits, score_captions, write_captions
from vlattn.features import KeptFeatures, encode_pictures
from vlattn.files import write_json
from vlattn.grounding import choose_overlay
from vlattn.run_folder import Progress, RunFolder
from vlattn.run_log import RunLog
from vlattn.run_report import draw_captions, draw_curves
from vlattn.self_critical import SelfCritical
from vlattn.sharding import shard, shard_optimizer
from vlattn.steps import self_critical_step, teacher_step
from vlattn.tokenizer import Tokenizer

SCST_DECAY = 0.98  # of the weights' average: the phase is short
SCST_EVAL_STEPS = 100
TIDY_EVERY = 25  # steps
MOST_SKIPPED = 20  # float16 starts with a few: the scale of the loss is being found


def train(config: TrainConfig) -> Captioner:
    """Train a captioner, and leave the best one by its dev score in `config.out`.

    Killed at any moment, the same call with `resume="auto"` ends as if it had not been. Under
    `accelerate launch` the processes share the pictures of each batch and, with `--use_fsdp`, the
    weights too.

    Raises:
        ValueError: the data or a setting is of no use; the message says which and why.
    """
    out = Path(config.out)
    run = RunFolder(config.out, asdict(config) | {"resume": None})
    # accelerate shards on GPUs alone, and not the average: `sharding.py` does, anywhere.
    sharded = os.environ.pop("ACCELERATE_USE_FSDP", "").lower() == "true"
    accelerator = Accelerator(mixed_precision=_precision(config.precision))
    sharded = sharded and accelerator.num_processes > 1
    if sharded and accelerator.scaler is not None:
        raise ValueError("weights that are shared out train in bf16 or fp32, not in fp16")
    resuming = run.open(resume=config.resume == "auto")
    accelerator.wait_for_everyone()  # all have looked before one writes
    set_seed(config.seed)
    train_records, dev_records = _read(config, accelerator)
    with accelerator.main_process_first():
        captioner = _build(config, out, train_records, resuming)
        if accelerator.is_main_process and not resuming:
            run.start(captioner.tokenizer)
    data, dev = _data_sets(config, accelerator, captioner, train_records, dev_records)
    usable = _usable(data)

    set_seed(config.seed, device_specific=True)  # the same weights, but other dropout
    device = accelerator.device
    captioner.to("cpu" if sharded else device)  # the shares alone go to the device
    averaged = AveragedModel(captioner, multi_avg_fn=get_ema_multi_avg_fn(config.average_decay))
    whole = shard(device.type, captioner, averaged.module) if sharded else lambda model: model
    if sharded:
        accelerator.print(f"weights are shared out over {accelerator.num_processes} processes")
    # Gradients are summed in `steps.py`, or by the shards.
    model = accelerator.prepare_model(captioner, evaluation_mode=True)
    optimizer = accelerator.prepare_optimizer(_optimizer(config, captioner))
    accelerator.register_for_checkpointing(averaged)
    progress = run.restore(accelerator) if resuming else Progress()

    steps_per_epoch = math.ceil(math.ceil(len(usable) / config.batch_size) / config.accumulation)
    teacher_steps = config.max_steps or config.epochs * steps_per_epoch
    total_steps = teacher_steps + config.scst_steps
    critic = SelfCritical(data, num_samples=config.scst_samples) if config.scst_steps else None
    windows = _windows(data, usable, config, accelerator, steps_per_epoch, progress.step)
    skipped = 0  # steps in a row for which float16 was too narrow
    with closing(RunLog(out, accelerator, progress.step, total_steps)) as log:
        while progress.step < total_steps:
            window = next(windows)
            started = time.perf_counter()
            if progress.step < teacher_steps:
                title = "loss"
                rate = _schedule(progress.step, teacher_steps, config.warmup_steps)
                rate *= config.learning_rate
                _set_rate(optimizer, rate)
                value = teacher_step(
                    accelerator,
                    model,
                    optimizer,
                    window,
                    label_smoothing=config.label_smoothing,
                    attention_supervision=config.attention_supervision,
                    clip_norm=config.clip_norm,
                )
            else:
                title, rate = "reward", config.scst_rate
                if progress.step == teacher_steps:  # go on from the averaged weights
                    for p, average in zip(captioner.parameters(), averaged.module.parameters()):
                        p.data.copy_(average)
                averaged.multi_avg_fn = get_ema_multi_avg_fn(SCST_DECAY)
                seed = torch.Generator().manual_seed(config.seed * 1_000_003 + progress.step)
                _set_rate(optimizer, rate)
                value = self_critical_step(
                    accelerator,
                    model,
                    optimizer,
                    window,
                    critic,
                    whole(captioner),
                    seed,
                    clip_norm=config.clip_norm,
                )
            skipped = skipped + 1 if optimizer.step_was_skipped else 0
            if not math.isfinite(value) or skipped == MOST_SKIPPED:
                what = "gradient" if skipped else f"{title} or its gradient"
                raise ValueError(
                    f"step {progress.step + 1}: the {what} is not finite: lower the learning rate, "
                    f"{rate:.1e}; the last checkpoint and the best model are kept"
                )
            averaged.update_parameters(captioner)
            progress.step += 1
            log.step(progress.step, title, value, rate, window, time.perf_counter() - started)
            if progress.step % TIDY_EVERY == 0:
                _return_memory()

            last = progress.step == total_steps
            if last or _is_time_to_evaluate(progress.step, teacher_steps, steps_per_epoch, config):
                writer = whole(averaged.module)
                score, told = _evaluate(writer, dev, dev_records, log, progress.step)
                if score >= progress.best:
                    progress.best = score
                    if accelerator.is_main_process:
                        writer.save_pretrained(out, scores=told)
            if progress.step % config.checkpoint_every == 0 or last:
                run.save(accelerator, progress)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        best = Captioner.from_pretrained(out).to(accelerator.device)
        write_json(out / "config.json", asdict(choose_overlay(best, dev_records).config))
    accelerator.wait_for_everyone()
    best = Captioner.from_pretrained(out)
    if accelerator.is_main_process:
        shutil.rmtree(out / "features", ignore_errors=True)
        draw_curves(out)
        draw_captions(out, best, dev_records or train_records)
    return best


def _read(config: TrainConfig, accelerator: Accelerator) -> tuple[list[Record], list[Record]]:
    """The records to train on, and those of the dev split; says what was read."""
    records, report = read_records(
        config.data,
        config.layout,
        image_column=config.image_column,
        caption_column=config.caption_column,
    )
    accelerator.print(report, flush=True)
    train_records, dev_records = ([r for r in records if r.split == s] for s in ("train", "dev"))
    if not train_records:
        raise DataError(f"{config.data} has no pictures to train on")
    return train_records, dev_records


def _precision(wanted: str) -> str:
    """The `mixed_precision` of accelerate, the same in every process."""
    AcceleratorState._reset_state()  # a run before, in this process, may have had another one
    PartialState(cpu=parse_flag_from_env("ACCELERATE_USE_CPU"))  # lets the processes talk
    return broadcast_object_list([_fastest_precision(wanted)])[0]


def _fastest_precision(wanted: str) -> str:
    if wanted != "auto":
        return "no" if wanted == "fp32" else wanted
    if torch.cuda.is_available():
        return "bf16" if torch.cuda.is_bf16_supported() else "fp16"
    return "bf16" if HAS_FAST_BF16 else "no"


def _build(config: TrainConfig, out: Path, records: list[Record], resuming: bool) -> Captioner:
    if config.init is not None:
        captioner = Captioner.from_pretrained(config.init)
    else:
        captioner = _new_captioner(config, out, records, resuming)
    if config.finetune_encoder:
        if not isinstance(captioner.encoder, TimmEncoder):
            raise ValueError("finetune_encoder is for an encoder of timm: the vit learns anyway")
        captioner.encoder.finetune(config.finetune_encoder)
    return captioner


def _new_captioner(
    config: TrainConfig, out: Path, records: list[Record], resuming: bool
) -> Captioner:
    file = out / "tokenizer.json"
    if resuming and file.is_file():
        tokenizer = Tokenizer.load(file)
    else:
        tokenizer = Tokenizer.train(
            (caption for record in records for caption in record.captions),
            kind=config.tokenizer,
            vocab_size=config.vocab_size,
            min_frequency=config.min_frequency,
            lowercase=config.lowercase,
        )
    captioner = Captioner(config.captioner, tokenizer, pretrained=config.pretrained)
    if config.encoder_weights is not None:
        captioner.encoder.load_weights(config.encoder_weights)
    return captioner


def _data_sets(
    config: TrainConfig,
    accelerator: Accelerator,
    captioner: Captioner,
    train_records: list[Record],
    dev_records: list[Record],
) -> tuple[CaptionDataset, CaptionDataset]:
    """What to train on, and this process's share of the dev split."""
    rank, count = accelerator.process_index, accelerator.num_processes
    grid_size = captioner.encoder.grid_size if config.attention_supervision else None
    options = {"views": config.views, "grid_size": grid_size}
    data = _dataset(config, captioner, train_records, **options)
    dev = _dataset(config, captioner, dev_records[rank::count])
    if data.truncated:
        limit = captioner.config.max_len
        accelerator.print(f"cut {data.truncated:,} captions at max_len={limit} tokens", flush=True)
    texts = [text for record in train_records for text in record.captions]
    if unknown := captioner.tokenizer.unknown_rate(texts):
        accelerator.print(f"{unknown:.2%} of the words are not in the vocabulary", flush=True)
    if getattr(captioner.encoder, "frozen", False):
        captioner.to(accelerator.device)
        folder = config.cache_features or Path(config.out) / "features"

        def encode(dataset: CaptionDataset, name: str) -> KeptFeatures:
            with accelerator.autocast():
                return encode_pictures(
                    captioner,
                    dataset,
                    folder,
                    title=f"encoding {name}",
                    num_workers=config.num_workers,
                )

        data.features, dev.features = encode(data, "train"), encode(dev, "dev")
    return data, dev


def _dataset(
    config: TrainConfig, captioner: Captioner, records: list[Record], **options: Any
) -> CaptionDataset:
    return CaptionDataset(
        records,
        captioner.tokenizer,
        captioner.preprocess,
        max_len=captioner.config.max_len,
        captions_per_image=config.captions_per_image,
        **options,
    )


def _optimizer(config: TrainConfig, captioner: Captioner) -> torch.optim.Optimizer:
    """AdamW; norms and biases do not decay; an encoder that learnt before has its own rate."""
    encoder = captioner.encoder
    learnt = isinstance(encoder, TimmEncoder) or config.init is not None
    pretrained = set(encoder.parameters()) if learnt else set()
    groups = {}
    for p in captioner.parameters():
        if p.requires_grad:
            groups.setdefault((p.dim() > 1, p in pretrained), []).append(p)
    optimizer = torch.optim.AdamW(
        [
            {
                "params": params,
                "weight_decay": config.weight_decay if decays else 0.0,
                "scale": config.encoder_rate if is_encoder else 1.0,
            }
            for (decays, is_encoder), params in groups.items()
        ],
        lr=config.learning_rate,
        betas=(0.9, 0.98),
        fused=True,
    )
    shard_optimizer(optimizer)
    return optimizer


def _usable(data: CaptionDataset) -> list[int]:
    """The records whose pictures could be read, as far as that is known."""
    if data.features is None:
        return list(range(len(data)))
    usable = [i for i in range(len(data)) if data.features[i, 0] is not None]
    if not usable:
        raise DataError("none of the pictures to train on could be read")
    return usable


def _windows(
    data: CaptionDataset,
    usable: list[int],
    config: TrainConfig,
    accelerator: Accelerator,
    steps_per_epoch: int,
    step: int,
) -> Iterator[list[Batch]]:
    """This process's share of the batches of each optimiser step from `step` on, without end."""
    rank, count = accelerator.process_index, accelerator.num_processes
    epoch, done = divmod(step, steps_per_epoch)
    while True:
        turn = data.epoch(epoch)
        lengths = turn.lengths()
        lengths = [lengths[i] for i in usable]
        order = epoch_batches(
            lengths, config.batch_size, seed=config.seed, epoch=epoch, window=config.sort_window
        )
        batches = iter(
            DataLoader(
                turn,
                batch_sampler=[
                    [usable[i] for i in batch[rank::count]]
                    for batch in order[done * config.accumulation :]
                ],
                collate_fn=collate,
                num_workers=config.num_workers,
                pin_memory=accelerator.device.type == "cuda",
                generator=torch.Generator(),  # the global random numbers stay as they are
            )
        )
        while window := list(islice(batches, config.accumulation)):
            yield window
        epoch, done = epoch + 1, 0


def _schedule(step: int, total_steps: int, warmup_steps: int) -> float:
    """Share of the highest rate: linear warm-up, then half a cosine to zero."""
    warmup_steps = min(warmup_steps, total_steps // 5)
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    return 0.5 * (1 + math.cos(math.pi * (step - warmup_steps) / (total_steps - warmup_steps)))


def _set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate * group["scale"]


def _return_memory() -> None:
    """Give back what is free: glibc keeps gigabytes between tensors of ever other sizes."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


def _is_time_to_evaluate(
    step: int, teacher_steps: int, steps_per_epoch: int, config: TrainConfig
) -> bool:
    if step <= teacher_steps:
        return step % (config.eval_every * steps_per_epoch) == 0 or step == teacher_steps
    return (step - teacher_steps) % SCST_EVAL_STEPS == 0


def _evaluate(
    captioner: Captioner, dev: CaptionDataset, records: list[Record], log: RunLog, step: int
) -> tuple[float, str]:
    """Of greedy captions of the dev split: CIDEr, or BLEU-4 where that is not defined; and a line.

    Args:
        dev: this process's share of the records.
    """
    shares = gather_object([write_captions(captioner.eval(), dev, num_beams=1)])
    written = {name: text for share in shares for name, text in share.items()}
    if not written:
        return 0.0, ""
    scores, habits = score_captions(written, records), Habits.of(written)
    log.write(f"step {step}: dev {scores}")
    if habits.is_collapsed:
        log.write(f"WARNING, hardly any caption tells pictures apart: {habits}")
    log.add(step, {"dev/cider": scores.cider, "dev/bleu_4": scores.bleu[3]})
    score = scores.bleu[3] if math.isnan(scores.cider) else scores.cider
    return score, f"Greedy captions of {len(written):,} pictures of the dev split: {scores}."
