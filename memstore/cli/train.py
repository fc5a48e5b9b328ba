"""The command `train`: check its options, build a TrainConfig, run the training."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from memstore.cli import console
from memstore.cli.command import command
from memstore.cli.options import Json, Seed, flag, option


@command(
    "train",
    "memstore train books.jsonl.zst --out run1 --minutes 60",
    "memstore train books.jsonl.zst --out run1 --minutes 60 --resume",
    "memstore train books.jsonl.zst --out run2 --init run1 --from-stage finish",
    interrupted="interrupted; --resume continues from the last checkpoint",
)
def train(
    texts: Annotated[
        list[Path], typer.Argument(metavar="TEXT...", help="Files of text: .txt or .jsonl.zst.")
    ],
    out: Annotated[Path, option("--out", "DIR", "Directory of the checkpoint and its metrics.")],
    *,
    preset: Annotated[
        Literal["test", "books", "paper"] | None,
        typer.Option("--preset", help="Size; default: that of --resume or --init, else test."),
    ] = None,
    minutes: Annotated[
        float | None, option("--minutes", "M", "Time limit; default: train the whole plan.")
    ] = None,
    seed: Seed = 0,
    init: Annotated[
        Path | None, option("--init", "DIR", "Start from these weights of the same shape.")
    ] = None,
    from_stage: Annotated[
        str | None, option("--from-stage", "NAME", "Begin the plan at this stage (with --init).")
    ] = None,
    resume: Annotated[bool, flag("--resume", "Continue the run in --out.")] = False,
    threads: Annotated[int, option("--threads", "N", "CPU cores to use.", min=1)] = 1,
    device: Annotated[str, option("--device", "DEVICE", "Device: cpu or cuda.")] = "cpu",
    precision: Annotated[
        Literal["auto", "float32", "bfloat16"],
        typer.Option(
            "--precision", help="Number format of the forward pass; auto: the faster one."
        ),
    ] = "auto",
    as_json: Json = False,
) -> None:
    """Train a landmark model on text. Other commands take its directory as --model."""
    from memstore.model.landmark.landmark_model import read_configuration
    from memstore.model.landmark.transformer import PRESETS
    from memstore.training.curriculum import default_curriculum, stages_from
    from memstore.training.train import TrainConfig
    from memstore.training.train import train as run_training

    if minutes is not None and not minutes > 0:
        raise typer.BadParameter(f"--minutes must be above 0, got {minutes}")
    start = out if resume and (out / "config.json").is_file() else init
    model = PRESETS[preset or "test"] if preset or start is None else read_configuration(start)
    config = TrainConfig(
        out=out,
        model=model,
        stages=stages_from(from_stage, default_curriculum()),
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
    told = {"out": str(out), "metrics": lines[-1] if lines else None}
    console.result(told, f"trained; ask with --model {out}", as_json)


COMMANDS = (train,)
