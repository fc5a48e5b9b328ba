"""The command that trains a model."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from memstore.cli.command import command
from memstore.cli.options.command_options import Json, Seed
from memstore.cli.terminal import console

if TYPE_CHECKING:
    from memstore.training.finetune import Finetune
    from memstore.training.train_config import TrainConfig


@dataclass(frozen=True)
class RunOptions:
    """What is trained, and how: an option a field."""

    preset: Annotated[
        str | None,
        typer.Option(
            "--preset",
            metavar="NAME",
            help="Shape: test, books, small, medium or paper; default: that of --resume or --init, "
            "else test.",
        ),
    ] = None
    minutes: Annotated[
        float | None,
        typer.Option("--minutes", metavar="M", help="Wall clock; default: the whole plan."),
    ] = None
    seed: Seed = 0
    init: Annotated[
        Path | None,
        typer.Option("--init", metavar="DIR", help="Start from these weights of the same shape."),
    ] = None
    from_stage: Annotated[
        str | None,
        typer.Option(
            "--from-stage", metavar="NAME", help="Begin the plan at this stage (with --init)."
        ),
    ] = None
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="NAME",
            help="Fine-tune this Hugging Face decoder (smollm2, a directory, a hub name).",
        ),
    ] = None
    full: Annotated[
        bool, typer.Option("--full", help="With --model: train all weights; else adapters (LoRA).")
    ] = False
    rank: Annotated[
        int | None, typer.Option("--rank", metavar="N", min=1, help="Of the adapters; default: 16.")
    ] = None
    block_size: Annotated[
        int | None,
        typer.Option("--block-size", metavar="N", min=2, help="With --model: tokens; default: 32."),
    ] = None
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the run in DIR.")] = False
    threads: Annotated[
        int, typer.Option("--threads", metavar="N", min=1, help="CPU cores to use.")
    ] = 1
    device: Annotated[
        str, typer.Option("--device", metavar="DEVICE", help="Where to compute: cpu or cuda.")
    ] = "cpu"
    precision: Annotated[
        Literal["auto", "float32", "bfloat16"],
        typer.Option(
            "--precision", help="Of the forward pass; auto: what the machine is faster at."
        ),
    ] = "auto"

    def config(self, out: Path) -> "TrainConfig":
        """The run, whose directory is `out`. Raises typer.BadParameter for options that exclude
        each other, InvalidConfig.
        """
        from memstore.model.landmark.checkpoint import read_configuration
        from memstore.model.landmark.config import PRESETS
        from memstore.training.curriculum import default_curriculum, stages_from
        from memstore.training.finetune import finetune_stages
        from memstore.training.train_config import TrainConfig

        self._check()
        shape = PRESETS[self.preset or "test"]
        begun = out if self.resume and (out / "config.json").is_file() else self.init
        if self.model is None and begun is not None and self.preset is None:
            shape = read_configuration(begun)
        finetune = self._finetune()
        return TrainConfig(
            out=out,
            model=shape,
            stages=stages_from(
                self.from_stage, default_curriculum() if finetune is None else finetune_stages()
            ),
            finetune=finetune,
            minutes=self.minutes,
            seed=self.seed or 0,
            threads=self.threads,
            device=self.device,
            precision=self.precision,
            init=self.init,
        )

    def _check(self) -> None:
        from memstore.model.landmark.config import PRESETS

        if self.preset is not None and self.preset not in PRESETS:
            raise typer.BadParameter(
                f"no preset {self.preset!r}; choose one of {', '.join(PRESETS)}"
            )
        if self.minutes is not None and not self.minutes > 0:
            raise typer.BadParameter(f"--minutes must be above 0, is {self.minutes}")
        if self.model is None and (self.full or self.rank or self.block_size):
            raise typer.BadParameter("--full, --rank and --block-size go with --model")
        if self.model is not None and (self.preset or self.init):
            raise typer.BadParameter("--model is what is trained; --preset and --init name another")
        if self.full and self.rank:
            raise typer.BadParameter("--full trains all weights, --rank adapters; choose one")

    def _finetune(self) -> "Finetune | None":
        from memstore.training.finetune import Finetune

        if self.model is None:
            return None
        usual = Finetune(self.model)
        rank = None if self.full else self.rank or usual.rank
        return replace(usual, block_size=self.block_size, rank=rank)


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
    *,
    run: RunOptions,
    as_json: Json = False,
) -> None:
    """Train a model on text; the directory of a landmark model can be given to --model."""
    from memstore.training.train import train as run_training

    lines: list[dict[str, Any]] = []

    def report(line: dict[str, Any]) -> None:
        lines.append(line)
        console.note(", ".join(f"{name} {value}" for name, value in line.items()))

    run_training(run.config(out), texts, resume=run.resume, report=report)
    if as_json:
        console.emit({"out": str(out), "metrics": lines[-1] if lines else None})
    else:
        console.say(f"trained; ask with --model {out}")


COMMANDS = (train,)
