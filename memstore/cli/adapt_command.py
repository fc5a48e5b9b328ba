"""The command that makes a selector for a model."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memstore.cli.command import command
from memstore.cli.options.command_options import Json, Seed
from memstore.cli.terminal import console

if TYPE_CHECKING:
    from memstore.model.landmark.landmark_model import LandmarkModel
    from memstore.model.model_api import ModelAPI


@dataclass(frozen=True)
class AdaptSettings:
    """What is made, and of how much text: an option a field."""

    train: Annotated[
        bool,
        typer.Option("--train", help="Learn a projection (some 10 minutes); else pointer heads."),
    ] = False
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            metavar="FILE",
            help="Where to; default: where this model is looked for. Landmark models: a directory.",
        ),
    ] = None
    windows: Annotated[
        int,
        typer.Option(
            "--windows", metavar="N", min=8, help="Places of the texts that are read at most."
        ),
    ] = 240
    seed: Seed = 0


@command(
    "adapt",
    "memstore adapt smollm2 --text novels.txt",
    "memstore adapt ~/models/my-decoder --train --text books.jsonl.zst",
    interrupted="interrupted; the same command goes on with what a Hugging Face model has read",
)
def adapt(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="smollm2, a directory, a GGUF, a hub name, books-1m."),
    ],
    text: Annotated[
        list[Path],
        typer.Option(
            "--text", metavar="FILE", help="Prose to hide facts in: .txt or .jsonl.zst; repeatable."
        ),
    ],
    *,
    how: AdaptSettings,
    as_json: Json = False,
) -> None:
    """Find out how a Hugging Face model should choose the passages that a question reads, or what a
    landmark model gets where it skips a lookup (--output DIR).
    """
    from memstore.hf.models_by_name import reader_named
    from memstore.model.landmark.landmark_model import LandmarkModel
    from memstore.model.passages.selectors.adaptation import UNADAPTED
    from memstore.training.corpus import read_documents

    # without the selector that it has, which may be a damaged one
    reader = reader_named(model, own_process=True, adaptation=UNADAPTED)
    if isinstance(reader, LandmarkModel):
        into = _directory_of_values(model, how.output, train=how.train)
        _values(
            reader, list(read_documents(text)), how.windows, how.seed or 0, into, as_json=as_json
        )
        return
    _selector(reader, model, list(read_documents(text)), how, as_json=as_json)


def _selector(
    reader: "ModelAPI", model: str, texts: list[str], how: AdaptSettings, *, as_json: bool
) -> None:
    """Make a selector for a Hugging Face model, and say what held-out questions say of it."""
    from memstore.hf.known_selectors import made_here
    from memstore.hf.load import load_reader
    from memstore.hf.passage_adapter import HuggingFacePassageModel
    from memstore.hf.weights import cache_directory
    from memstore.model.passages.selectors.selector_file import save_selector
    from memstore.training.selectors.calibrate_reading import calibrate_reading
    from memstore.training.selectors.make_selector import AdaptOptions
    from memstore.training.selectors.make_selector import adapt as run
    from memstore.training.selectors.passage_subject import subject_of

    assert isinstance(reader, HuggingFacePassageModel)  # others take no selector, and were refused
    subject = subject_of(reader, reader.made_for)
    work = cache_directory() / "adapting" / subject.made_for.weights
    options = AdaptOptions(
        windows=how.windows,
        calibration=min(24, how.windows),
        held_out=min(48, how.windows),
        seed=how.seed or 0,
    )
    adaptation = run(subject, texts, work, train=how.train, options=options, report=console.note)
    with_it = load_reader(model, adaptation=adaptation)
    assert isinstance(with_it, HuggingFacePassageModel)
    adaptation = calibrate_reading(
        with_it,
        adaptation,
        texts,
        windows=min(16, how.windows),
        seed=how.seed or 0,
        report=console.note,
    )
    path = how.output or made_here(subject.made_for.weights)
    save_selector(adaptation, subject.made_for, path)
    shutil.rmtree(work, ignore_errors=True)
    if as_json:
        name = adaptation.selector.spec.name
        console.emit({"selector": name, "file": str(path), "scores": dict(adaptation.scores)})
        return
    shares = dict(adaptation.scores)
    answers = shares.pop("answers", 0.0)
    found = ", ".join(f"{kind} {share:.0%}" for kind, share in shares.items())
    console.say(f"{adaptation.selector.spec.name}: right passage among the best 8: {found}")
    console.say(f"questions about planted facts answered: {answers:.0%}")
    console.say(f"written to {path}")


def _directory_of_values(model: str, output: Path | None, *, train: bool) -> Path:
    """Where a landmark model goes with its values; raises InvalidInput before anything is read."""
    from memstore.errors import InvalidInput

    if train:
        raise InvalidInput(f"{model} was trained by `memstore train`, which goes on with --init")
    if output is None:
        raise InvalidInput("name the directory of the model with its new values: --output DIR")
    if output.exists() and not output.is_dir():
        raise InvalidInput(f"--output: {output} is no directory")
    return output


def _values(
    reader: "LandmarkModel",
    texts: list[str],
    places: int,
    seed: int,
    output: Path,
    *,
    as_json: bool,
) -> None:
    """Give a landmark model the context miss token's values, in a directory."""
    from memstore.model.landmark.checkpoint import save_checkpoint
    from memstore.training.cmt_values import measure_cmt_values

    values, lost = measure_cmt_values(reader, texts, places=places, seed=seed, report=console.note)
    reader.transformer.cmt_values = values
    save_checkpoint(reader.transformer, reader.tokenizer, output)
    share = float(lost.mean())
    if as_json:
        console.emit({"values": list(values.shape), "lost": share, "file": str(output)})
        return
    console.say(f"of what lookups that are skipped would have read, {share:.0%} is lost")
    console.say(f"written to {output}")


COMMANDS = (adapt,)
