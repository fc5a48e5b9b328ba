"""The commands that fit a model to memories: adapt makes a reading adapter and a selector;
calibrate measures the values of skipped lookups.
"""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from memstore.cli import console
from memstore.cli.command import command
from memstore.cli.options import Json, Seed, option
from memstore.errors import InvalidInput

if TYPE_CHECKING:
    from memstore.hf.passage_adapter import HuggingFacePassageModel
    from memstore.hf.reading_adapter import Kind
    from memstore.training.reading_questions import AskedContext

_TEXT = option("--text", "FILE", "Prose to hide facts in: .txt or .jsonl.zst; repeatable.")
Texts = Annotated[list[Path], _TEXT]
Windows = Annotated[int, option("--windows", "N", "Most places of the texts to read.", min=8)]


@command(
    "adapt",
    "memstore adapt smollm2 --questions questions.jsonl --text novels.txt",
    "memstore adapt ~/models/my-decoder --text books.jsonl.zst",
    interrupted="interrupted; the same command resumes the training",
)
def adapt(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="smollm2, a directory, a GGUF, a hub name.")
    ],
    text: Annotated[list[Path] | None, _TEXT] = None,
    *,
    questions: Annotated[
        Path | None,
        option("--questions", "FILE", "Texts and questions about them: .jsonl or .jsonl.zst."),
    ] = None,
    reading_tokens: Annotated[
        int,
        option("--reading-tokens", "N", "Tokens to train the reading adapter on; 0: none.", min=0),
    ] = 2_000_000,
    out: Annotated[
        Path | None,
        option("--out", "FILE", "The selector's file; default: where this model finds it."),
    ] = None,
    windows: Windows = 240,
    device: Annotated[str, option("--device", "NAME", "cpu, cuda, mps or auto.")] = "auto",
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Fit a Hugging Face model to memories: a reading adapter and a selector.

    The adapter teaches the model to read stored passages. --questions trains it on people's
    questions for passages, questions and answers, and tells when to refuse; --text alone trains it
    for passages only, if the model has no adapter yet. The selector learns from both to choose the
    passages of a question. Later commands find adapter and selector by the weights.
    """
    from memstore.compute import Compute
    from memstore.hf.model_directory import cache_directory
    from memstore.hf.models_by_name import reader_named
    from memstore.hf.passage_adapter import HuggingFacePassageModel
    from memstore.hf.weights import made_here
    from memstore.model.landmark.landmark_model import LandmarkModel
    from memstore.model.passages.adaptation import UNADAPTED
    from memstore.training.corpus import read_documents
    from memstore.training.reading_questions import read_questions

    if not text and questions is None:
        raise typer.BadParameter("give --text, --questions or both")
    # without the selector that it has, which may be damaged
    compute = Compute(device=device, weights="full")
    reader = reader_named(model, compute=compute, adaptation=UNADAPTED)
    if isinstance(reader, LandmarkModel):
        raise InvalidInput(
            f"{model} was trained to choose by landmarks, and takes no selector; `memstore "
            "calibrate` measures what its skipped lookups give"
        )
    assert isinstance(reader, HuggingFacePassageModel)  # reader_named refuses others
    contexts = None if questions is None else read_questions(questions)
    texts = list(read_documents(text or ()))
    work = cache_directory() / "adapting" / reader.made_for.weights
    result: dict[str, Any] = {}
    trained = work / "adapter"  # holds the digest of one that an interrupted run has trained
    if reader.adapter and trained.is_file() and trained.read_text() == reader.adapter.digest:
        console.note("the reading adapter is trained already")
    elif reading_tokens and (contexts is not None or reader.adapter is None):
        result |= _adapt_reading(reader, texts, contexts, work, reading_tokens, windows, seed or 0)
        reader = cast(
            HuggingFacePassageModel, reader_named(model, compute=compute, adaptation=UNADAPTED)
        )
        assert reader.adapter is not None
        work.mkdir(parents=True, exist_ok=True)
        trained.write_text(reader.adapter.digest)
    path = out or made_here(reader.made_for.weights)
    result |= _make_selector(model, reader, texts, contexts or [], work, path, windows, seed or 0)
    if contexts is not None:
        result |= _fit_doubt(model, reader, contexts, work, path, seed or 0)
    shutil.rmtree(work, ignore_errors=True)
    if as_json:
        console.emit(result)


def _adapt_reading(
    reader: "HuggingFacePassageModel",
    texts: Sequence[str],
    contexts: "Sequence[AskedContext] | None",
    work: Path,
    tokens: int,
    windows: int,
    seed: int,
) -> dict[str, Any]:
    """Train and store a reading adapter; what --json prints of it."""
    from memstore.hf.weights import adapter_made_here
    from memstore.training.planted import planted_questions
    from memstore.training.reading import ReadingOptions, adapt_reading

    kind: Kind = "writer" if contexts is None else "both"
    if contexts is None:
        contexts = planted_questions(texts, 4 * windows, "train", seed, facts_only=True)
    options = ReadingOptions(
        tokens=tokens, learning_rate=5e-4 if kind == "writer" else 8e-4, seed=seed
    )
    adapter = adapt_reading(reader, contexts, kind, work, options, console.note)
    directory = adapter_made_here(reader.made_for.weights)
    adapter.save(directory)
    for name, share in adapter.scores.items():
        console.note(f"held-out questions, {name}: {share:.0%}")
    console.note(f"reading adapter written to {directory}")
    return {"adapter": str(directory), "reading": dict(adapter.scores)}


def _make_selector(
    model: str,
    reader: "HuggingFacePassageModel",
    texts: Sequence[str],
    contexts: "Sequence[AskedContext]",
    work: Path,
    path: Path,
    windows: int,
    seed: int,
) -> dict[str, Any]:
    """Make and store a selector; what --json prints of it."""
    from memstore.hf.load import load_reader
    from memstore.hf.passage_adapter import HuggingFacePassageModel
    from memstore.model.passages.adaptation import save_selector
    from memstore.training.selectors.make_selector import AdaptOptions, calibrate_reading
    from memstore.training.selectors.make_selector import adapt as make_selector

    options = AdaptOptions(windows=windows, held_out=min(48, windows), seed=seed)
    # states are those of this adapter; an earlier run may have left others
    work /= reader.adapter.digest if reader.adapter else "stock"
    adaptation = make_selector(
        reader, texts, work, contexts=contexts, options=options, report=console.note
    )
    adapted = load_reader(model, device=str(reader.device), adaptation=adaptation)
    assert isinstance(adapted, HuggingFacePassageModel)
    adaptation = calibrate_reading(
        adapted,
        adaptation,
        texts,
        contexts=contexts,
        windows=min(16, windows),
        seed=seed,
        report=console.note,
    )
    save_selector(adaptation, reader.made_for, path)
    name, shares = adaptation.selector.spec.name, dict(adaptation.scores)
    result = {"selector": name, "file": str(path), "scores": dict(shares)}
    answers = shares.pop("answers", 0.0)
    found = ", ".join(f"{kind} {share:.0%}" for kind, share in shares.items())
    console.note(f"{name}: right passage among the best 8: {found}")
    console.note(f"held-out questions answered word for word: {answers:.0%}")
    console.note(f"selector written to {path}")
    return result


def _fit_doubt(
    model: str,
    reader: "HuggingFacePassageModel",
    contexts: "Sequence[AskedContext]",
    work: Path,
    path: Path,
    seed: int,
) -> dict[str, Any]:
    """Learn when to refuse, and store it with the selector at `path` or with the one that the model
    has; what --json prints of it.
    """
    from memstore.hf.load import load_reader
    from memstore.model.lookup_settings import CAUTIONS
    from memstore.model.passages.adaptation import load_selector, save_selector
    from memstore.training.doubt import fit_doubt

    if reader.refusal is None:
        console.note("the model has no reading adapter that refuses: nothing is fitted")
        return {}
    # the selector at `path` may be none that the model finds
    made = load_selector(path, reader.made_for) if path.is_file() else None
    selecting = load_reader(model, device=str(reader.device), adaptation=made)
    reader = cast("HuggingFacePassageModel", selecting)
    fitted = fit_doubt(reader, contexts, work / "doubt", seed=seed, report=console.note)
    if fitted is None:
        console.note("too few questions to learn when to refuse: the adapter alone decides")
        return {}
    doubt, shares = fitted
    weights = reader.made_for.weights
    adaptation = replace(
        reader.adaptation,
        doubt=doubt,
        weights=weights,
        scores={**reader.adaptation.scores, **shares},
    )
    save_selector(adaptation, reader.made_for, path)
    for caution, share in zip(CAUTIONS, shares.values()):
        console.note(
            f"--caution {caution}: {caution:.0%} of the answerable and {share:.0%} of the "
            "unanswerable questions refused"
        )
    return {"refusals": shares}


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
    from memstore.model.landmark.landmark_model import LandmarkModel, save_checkpoint
    from memstore.training.cmt_values import measure_cmt_values
    from memstore.training.corpus import read_documents

    if out.exists() and not out.is_dir():
        raise InvalidInput(f"--out: {out} is not a directory")
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
