"""The commands that fit a model to texts: adapt makes a selector, calibrate what a skipped lookup
gives.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memstore.cli.command import command
from memstore.cli.options.command_options import Json, Seed
from memstore.cli.terminal import console
from memstore.errors import InvalidInput

if TYPE_CHECKING:
    from memstore.hf.passage_adapter import HuggingFacePassageModel

Texts = Annotated[
    list[Path],
    typer.Option(
        "--text", metavar="FILE", help="Prose to hide facts in: .txt or .jsonl.zst; repeatable."
    ),
]
Windows = Annotated[
    int, typer.Option("--windows", metavar="N", min=8, help="Most places of the texts to read.")
]


@dataclass(frozen=True)
class AdaptSettings:
    """What is made, and of how much text: an option a field."""

    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="FILE", help="Where to; default: where this model is looked for."
        ),
    ] = None
    windows: Windows = 240
    seed: Seed = 0


@command(
    "adapt",
    "memstore adapt smollm2 --text novels.txt",
    "memstore adapt ~/models/my-decoder --text books.jsonl.zst",
    interrupted="interrupted; the same command goes on with what was read",
)
def adapt(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="smollm2, a directory, a GGUF, a hub name.")
    ],
    text: Texts,
    *,
    how: AdaptSettings,
    as_json: Json = False,
) -> None:
    """Make a selector for a Hugging Face model.

    It chooses the passages that a question reads; later commands find it by the model's weights.
    """
    from memstore.hf.models_by_name import reader_named
    from memstore.hf.passage_adapter import HuggingFacePassageModel
    from memstore.model.landmark.landmark_model import LandmarkModel
    from memstore.model.passages.adaptation import UNADAPTED
    from memstore.training.corpus import read_documents

    # without the selector that it has, which may be a damaged one
    reader = reader_named(model, own_process=True, adaptation=UNADAPTED)
    if isinstance(reader, LandmarkModel):
        raise InvalidInput(
            f"{model} was trained to choose by landmarks, and takes no selector; `memstore "
            "calibrate` measures what its skipped lookups give"
        )
    assert isinstance(reader, HuggingFacePassageModel)  # others take no selector, and were refused
    _selector(reader, model, list(read_documents(text)), how, as_json=as_json)


@command(
    "calibrate",
    "memstore calibrate run1 --text books.jsonl.zst --out run1-calibrated",
    interrupted="interrupted; nothing was written",
)
def calibrate(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="books-1m, or a directory that `train` wrote.")
    ],
    text: Texts,
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Directory of the model with its values.")
    ],
    windows: Windows = 240,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Measure what skipped lookups give a landmark model.

    These are the values of its context miss token. Memories that the model made stay its own.
    """
    from memstore.hf.models_by_name import reader_named
    from memstore.model.landmark.checkpoint import save_checkpoint
    from memstore.model.landmark.landmark_model import LandmarkModel
    from memstore.training.cmt_values import measure_cmt_values
    from memstore.training.corpus import read_documents

    if out.exists() and not out.is_dir():
        raise InvalidInput(f"--out: {out} is no directory")
    reader = reader_named(model, own_process=True)
    if not isinstance(reader, LandmarkModel):
        raise InvalidInput(
            f"{model} was not trained to skip lookups; `memstore adapt` makes a selector for it"
        )
    texts = list(read_documents(text))
    values, lost = measure_cmt_values(
        reader, texts, places=windows, seed=seed or 0, report=console.note
    )
    reader.transformer.cmt_values = values
    save_checkpoint(reader.transformer, reader.tokenizer, out)
    share = float(lost.mean())
    if as_json:
        console.emit({"values": list(values.shape), "lost": share, "file": str(out)})
        return
    console.say(f"of what lookups that are skipped would have read, {share:.0%} is lost")
    console.say(f"written to {out}")


def _selector(
    reader: "HuggingFacePassageModel",
    model: str,
    texts: list[str],
    how: AdaptSettings,
    *,
    as_json: bool,
) -> None:
    """Make a selector for a Hugging Face model, and say what held-out questions say of it."""
    from memstore.hf.load import load_reader
    from memstore.hf.model_directory import cache_directory
    from memstore.hf.passage_adapter import HuggingFacePassageModel
    from memstore.hf.weights import made_here
    from memstore.model.passages.adaptation import save_selector
    from memstore.training.selectors.calibrate_reading import calibrate_reading
    from memstore.training.selectors.make_selector import AdaptOptions
    from memstore.training.selectors.make_selector import adapt as run
    from memstore.training.selectors.passage_subject import subject_of

    subject = subject_of(reader, reader.made_for)
    work = cache_directory() / "adapting" / subject.made_for.weights
    options = AdaptOptions(windows=how.windows, held_out=min(48, how.windows), seed=how.seed or 0)
    adaptation = run(subject, texts, work, options=options, report=console.note)
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
    path = how.out or made_here(subject.made_for.weights)
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


COMMANDS = (adapt, calibrate)
