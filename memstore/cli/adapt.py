"""The command that makes a selector for a model."""

import shutil
from pathlib import Path
from typing import Annotated

import typer

from memstore.cli import console
from memstore.cli.options import Json, Seed, command


@command(
    "adapt",
    "memstore adapt smollm2 --text novels.txt",
    "memstore adapt ~/models/my-decoder --train --text books.jsonl.zst",
    interrupted="interrupted; the same command goes on with what was read",
)
def adapt(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="smollm2, a directory, a GGUF, a hub name.")
    ],
    text: Annotated[
        list[Path],
        typer.Option(
            "--text", metavar="FILE", help="Prose to hide facts in: .txt or .jsonl.zst; repeatable."
        ),
    ],
    train: Annotated[
        bool,
        typer.Option("--train", help="Learn a projection (some 10 minutes); else pointer heads."),
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", metavar="FILE", help="Where to; default: where this model is looked for."
        ),
    ] = None,
    windows: Annotated[
        int, typer.Option("--windows", metavar="N", min=8, help="Of 1,024 tokens, read at most.")
    ] = 240,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Find out how a Hugging Face model should choose the blocks that a question reads."""
    from memstore.errors import InvalidInput
    from memstore.hf.load import load_reader
    from memstore.hf.reader import HuggingFaceReader
    from memstore.hf.selectors import made_here
    from memstore.hf.weights import cache_directory
    from memstore.model.selector_file import save_selector
    from memstore.training.adapt import AdaptOptions
    from memstore.training.adapt import adapt as run
    from memstore.training.adapt_reader import subject_of
    from memstore.training.adapt_reading import calibrate_reading
    from memstore.training.corpus import read_documents

    texts = list(read_documents(text))
    reader = load_reader(model)
    if not isinstance(reader, HuggingFaceReader):
        raise InvalidInput(
            f"{model} is trained with landmarks and looks blocks up by itself; it needs no selector"
        )
    subject = subject_of(reader, reader.made_for)
    work = cache_directory() / "adapting" / subject.made_for.weights
    options = AdaptOptions(
        windows=windows, calibration=min(24, windows), held_out=min(48, windows), seed=seed or 0
    )
    adaptation = run(subject, texts, work, train=train, options=options, report=console.note)
    with_it = load_reader(model, adaptation=adaptation)
    assert isinstance(with_it, HuggingFaceReader)
    adaptation = calibrate_reading(
        with_it, adaptation, texts, windows=min(16, windows), seed=seed or 0, report=console.note
    )
    path = output or made_here(subject.made_for.weights)
    save_selector(adaptation, subject.made_for, path)
    shutil.rmtree(work, ignore_errors=True)
    if as_json:
        name = adaptation.selector.form.name
        console.emit({"selector": name, "file": str(path), "scores": dict(adaptation.scores)})
        return
    shares = dict(adaptation.scores)
    answers = shares.pop("answers", 0.0)
    found = ", ".join(f"{kind} {share:.0%}" for kind, share in shares.items())
    console.say(f"{adaptation.selector.form.name}: right block among the best 8: {found}")
    console.say(f"questions about planted facts answered: {answers:.0%}")
    console.say(f"written to {path}")


COMMANDS = (adapt,)
