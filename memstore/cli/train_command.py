"""The command that trains a model."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from memstore.cli.command_options import Json, Seed, command
from memstore.cli.terminal import console


@command(
    "train",
    "memstore train books.jsonl.zst --out run1 --minutes 60",
    "memstore train books.jsonl.zst --out run1 --minutes 60 --resume",
    "memstore train books.jsonl.zst --out run2 --init run1 --from-stage finish",
    "memstore train books.jsonl.zst --out run3 --model ~/models/my-decoder --minutes 60",
    interrupted="interrupted; --resume goes on from the last checkpoint",
)
def train(
    texts: Annotated[
        list[Path], typer.Argument(metavar="TEXT...", help="Files of text: .txt or .jsonl.zst.")
    ],
    out: Annotated[
        Path,
        typer.Option("--out", metavar="DIR", help="Directory of the checkpoint and its metrics."),
    ],
    preset: Annotated[
        str | None,
        typer.Option(
            "--preset",
            metavar="NAME",
            help="Shape: test, books, small, medium or paper; default: that of --resume or --init, "
            "else test.",
        ),
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option("--minutes", metavar="M", help="Wall clock; default: the whole plan."),
    ] = None,
    seed: Seed = 0,
    init: Annotated[
        Path | None,
        typer.Option("--init", metavar="DIR", help="Start from these weights of the same shape."),
    ] = None,
    from_stage: Annotated[
        str | None,
        typer.Option(
            "--from-stage", metavar="NAME", help="Begin the plan at this stage (with --init)."
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="NAME",
            help="Fine-tune this Hugging Face decoder (smollm2, a directory, a hub name).",
        ),
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="With --model: train all weights; else adapters (LoRA).")
    ] = False,
    rank: Annotated[
        int | None, typer.Option("--rank", metavar="N", min=1, help="Of the adapters; default: 16.")
    ] = None,
    block_size: Annotated[
        int | None,
        typer.Option("--block-size", metavar="N", min=2, help="With --model: tokens; default: 32."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the run in DIR.")] = False,
    threads: Annotated[
        int, typer.Option("--threads", metavar="N", min=1, help="CPU cores to use.")
    ] = 1,
    device: Annotated[
        str, typer.Option("--device", metavar="DEVICE", help="Where to compute: cpu or cuda.")
    ] = "cpu",
    precision: Annotated[
        Literal["auto", "float32", "bfloat16"],
        typer.Option(
            "--precision", help="Of the forward pass; auto: what the machine is faster at."
        ),
    ] = "auto",
    as_json: Json = False,
) -> None:
    """Train a model on text; the directory of a landmark model can be given to --model."""
    from memstore.model.landmark.checkpoint import read_configuration
    from memstore.model.landmark.config import PRESETS
    from memstore.training.curriculum import default_curriculum, stages_from
    from memstore.training.finetune import Finetune, finetune_stages
    from memstore.training.train import train as run_training
    from memstore.training.train_config import TrainConfig

    if preset is not None and preset not in PRESETS:
        raise typer.BadParameter(f"no preset {preset!r}; choose one of {', '.join(PRESETS)}")
    if minutes is not None and not minutes > 0:
        raise typer.BadParameter(f"--minutes must be above 0, is {minutes}")
    if model is None and (full or rank or block_size):
        raise typer.BadParameter("--full, --rank and --block-size go with --model")
    if model is not None and (preset or init):
        raise typer.BadParameter("--model is what is trained; --preset and --init name another")
    if full and rank:
        raise typer.BadParameter("--full trains all weights, --rank adapters; choose one")
    finetune = None
    if model is not None:
        usual = Finetune(model)
        finetune = replace(usual, block_size=block_size, rank=None if full else rank or usual.rank)
    lines: list[dict[str, Any]] = []

    def report(line: dict[str, Any]) -> None:
        lines.append(line)
        console.note(", ".join(f"{name} {value}" for name, value in line.items()))

    shape = PRESETS[preset or "test"]
    begun = out if resume and (out / "config.json").is_file() else init
    if model is None and begun is not None and preset is None:
        shape = read_configuration(begun)
    config = TrainConfig(
        out=out,
        model=shape,
        stages=stages_from(
            from_stage, default_curriculum() if finetune is None else finetune_stages()
        ),
        finetune=finetune,
        minutes=minutes,
        seed=seed or 0,
        threads=threads,
        device=device,
        precision=precision,
        init=init,
    )
    run_training(config, texts, resume=resume, report=report)
    if as_json:
        console.emit({"out": str(out), "metrics": lines[-1] if lines else None})
    else:
        console.say(f"trained; ask with --model {out}")


COMMANDS = (train,)
