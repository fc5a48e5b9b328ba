"""The commands that fit a model to texts: adapt makes a selector, calibrate measures the values of
skipped lookups.
"""

import shutil
from pathlib import Path
from typing import Annotated

import typer

from memstore.cli import console
from memstore.cli.command import command
from memstore.cli.options import Json, Seed, option
from memstore.errors import InvalidInput

Texts = Annotated[
    list[Path], option("--text", "FILE", "Prose to hide facts in: .txt or .jsonl.zst; repeatable.")
]
Windows = Annotated[int, option("--windows", "N", "Most places of the texts to read.", min=8)]


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
    out: Annotated[
        Path | None, option("--out", "FILE", "Where to; default: where this model is looked for.")
    ] = None,
    windows: Windows = 240,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Make a selector for a Hugging Face model.

    It chooses the passages that a question reads; later commands find it by the model's weights.
    """
    from memstore.hf.load import load_reader
    from memstore.hf.model_directory import cache_directory
    from memstore.hf.models_by_name import reader_named
    from memstore.hf.passage_adapter import HuggingFacePassageModel
    from memstore.hf.weights import made_here
    from memstore.model.landmark.landmark_model import LandmarkModel
    from memstore.model.passages.adaptation import UNADAPTED, save_selector
    from memstore.training.corpus import read_documents
    from memstore.training.selectors.make_selector import AdaptOptions, Subject, calibrate_reading
    from memstore.training.selectors.make_selector import adapt as make_selector

    # without the selector that it has, which may be damaged
    unadapted = reader_named(model, adaptation=UNADAPTED)
    if isinstance(unadapted, LandmarkModel):
        raise InvalidInput(
            f"{model} was trained to choose by landmarks, and takes no selector; `memstore "
            "calibrate` measures what its skipped lookups give"
        )
    assert isinstance(unadapted, HuggingFacePassageModel)  # reader_named refuses others
    texts = list(read_documents(text))
    subject = Subject.of(unadapted, unadapted.made_for)
    work = cache_directory() / "adapting" / subject.made_for.weights
    options = AdaptOptions(windows=windows, held_out=min(48, windows), seed=seed or 0)
    adaptation = make_selector(subject, texts, work, options=options, report=console.note)
    adapted = load_reader(model, adaptation=adaptation)
    assert isinstance(adapted, HuggingFacePassageModel)
    adaptation = calibrate_reading(
        adapted, adaptation, texts, windows=min(16, windows), seed=seed or 0, report=console.note
    )
    path = out or made_here(subject.made_for.weights)
    save_selector(adaptation, subject.made_for, path)
    shutil.rmtree(work, ignore_errors=True)
    name, shares = adaptation.selector.spec.name, dict(adaptation.scores)
    if as_json:
        console.emit({"selector": name, "file": str(path), "scores": shares})
        return
    answers = shares.pop("answers", 0.0)
    found = ", ".join(f"{kind} {share:.0%}" for kind, share in shares.items())
    console.say(f"{name}: right passage among the best 8: {found}")
    console.say(f"questions about planted facts answered: {answers:.0%}")
    console.say(f"written to {path}")


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
    out: Annotated[Path, option("--out", "DIR", "Directory of the model with its values.")],
    windows: Windows = 240,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Measure what skipped lookups give a landmark model.

    These are the values of its context miss token. Memories of the model stay valid.
    """
    from memstore.hf.models_by_name import reader_named
    from memstore.model.landmark.checkpoint import save_checkpoint
    from memstore.model.landmark.landmark_model import LandmarkModel
    from memstore.training.cmt_values import measure_cmt_values
    from memstore.training.corpus import read_documents

    if out.exists() and not out.is_dir():
        raise InvalidInput(f"--out: {out} is no directory")
    landmark_model = reader_named(model)
    if not isinstance(landmark_model, LandmarkModel):
        raise InvalidInput(
            f"{model} was not trained to skip lookups; `memstore adapt` makes a selector for it"
        )
    values, lost = measure_cmt_values(
        landmark_model,
        list(read_documents(text)),
        places=windows,
        seed=seed or 0,
        report=console.note,
    )
    landmark_model.transformer.cmt_values = values
    save_checkpoint(landmark_model.transformer, landmark_model.tokenizer, out)
    share = float(lost.mean())
    if as_json:
        console.emit({"values": list(values.shape), "lost": share, "file": str(out)})
        return
    console.say(f"of what lookups that are skipped would have read, {share:.0%} is lost")
    console.say(f"written to {out}")


COMMANDS = (adapt, calibrate)
