"""The command `train`: check its options, build a TrainConfig, run the training."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from memstore.cli import console
from memstore.cli.command import command
from memstore.cli.options import Json, Seed, flag, option

if TYPE_CHECKING:
    from memstore.model.landmark.transformer import ModelConfig


@command(
    "train",
    "memstore train books.jsonl.zst --out run1 --minutes 60",
    "memstore train books.jsonl.zst --out run1 --minutes 60 --resume",
    "memstore train books.jsonl.zst --out run2 --init run1 --from-stage finish",
    "memstore train books.jsonl.zst --out run3 --model ~/models/my-decoder --minutes 60",
    interrupted="interrupted; --resume continues from the last checkpoint",
)
def train(
    texts: Annotated[
        list[Path], typer.Argument(metavar="TEXT...", help="Files of text: .txt or .jsonl.zst.")
    ],
    out: Annotated[Path, option("--out", "DIR", "Directory of the checkpoint and its metrics.")],
    *,
    preset: Annotated[
        str | None,
        option(
            "--preset",
            "NAME",
            "Shape: test, books, small, medium or paper; default: that of --resume or --init, else "
            "test.",
        ),
    ] = None,
    minutes: Annotated[
        float | None, option("--minutes", "M", "Wall clock; default: the whole plan.")
    ] = None,
    seed: Seed = 0,
    init: Annotated[
        Path | None, option("--init", "DIR", "Start from these weights of the same shape.")
    ] = None,
    from_stage: Annotated[
        str | None, option("--from-stage", "NAME", "Begin the plan at this stage (with --init).")
    ] = None,
    model: Annotated[
        str | None,
        option(
            "--model",
            "NAME",
            "Fine-tune this Hugging Face decoder (smollm2, a directory, a hub name).",
        ),
    ] = None,
    full: Annotated[
        bool, flag("--full", "With --model: train all weights; else adapters (LoRA).")
    ] = False,
    rank: Annotated[
        int | None, option("--rank", "N", "Of the adapters; default: 16.", min=1)
    ] = None,
    block_size: Annotated[
        int | None, option("--block-size", "N", "With --model: tokens; default: 32.", min=2)
    ] = None,
    resume: Annotated[bool, flag("--resume", "Go on from the run in DIR.")] = False,
    threads: Annotated[int, option("--threads", "N", "CPU cores to use.", min=1)] = 1,
    device: Annotated[str, option("--device", "DEVICE", "Where to compute: cpu or cuda.")] = "cpu",
    precision: Annotated[
        Literal["auto", "float32", "bfloat16"],
        typer.Option(
            "--precision", help="Of the forward pass; auto: what the machine is faster at."
        ),
    ] = "auto",
    as_json: Json = False,
) -> None:
    """Train a model on text; the directory of a landmark model can be given to --model."""
    from memstore.training.curriculum import default_curriculum, finetune_stages, stages_from
    from memstore.training.subject import Finetune, TrainConfig
    from memstore.training.train import train as run_training

    if minutes is not None and not minutes > 0:
        raise typer.BadParameter(f"--minutes must be above 0, got {minutes}")
    if model is None and (full or rank or block_size):
        raise typer.BadParameter("--full, --rank and --block-size need --model")
    if model is not None and (preset or init):
        raise typer.BadParameter("--model names the model to train; leave out --preset and --init")
    if full and rank:
        raise typer.BadParameter("--full trains all weights, --rank adapters; choose one")
    finetune, stages = None, default_curriculum()
    if model is not None:
        defaults = Finetune(model)
        rank = None if full else rank or defaults.rank
        finetune, stages = replace(defaults, block_size=block_size, rank=rank), finetune_stages()
    start = out if resume and (out / "config.json").is_file() else init
    config = TrainConfig(
        out=out,
        model=_config(preset, start if model is None else None),
        stages=stages_from(from_stage, stages),
        finetune=finetune,
        minutes=minutes,
        seed=seed or 0,
        threads=threads,
        device=device,
        precision=precision,
        init=init,
    )
    lines: list[dict[str, Any]] = []

    def report(line: dict[str, Any]) -> None:
        lines.append(line)
        console.note(", ".join(f"{name} {value}" for name, value in line.items()))

    run_training(config, texts, resume=resume, report=report)
    if as_json:
        console.emit({"out": str(out), "metrics": lines[-1] if lines else None})
    else:
        console.say(f"trained; ask with --model {out}")


def _config(preset: str | None, start: Path | None) -> "ModelConfig":
    """The configuration of --preset, else of the checkpoint `start`, else of the preset "test"."""
    from memstore.model.landmark.landmark_model import read_configuration
    from memstore.model.landmark.transformer import PRESETS

    if preset is not None and preset not in PRESETS:
        raise typer.BadParameter(f"no preset {preset!r}; choose one of {', '.join(PRESETS)}")
    if preset is None and start is not None:
        return read_configuration(start)
    return PRESETS[preset or "test"]


COMMANDS = (train,)
