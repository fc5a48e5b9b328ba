"""The command `adapt`: make a reading adapter and a selector for a Hugging Face model."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from memstore.cli import console
from memstore.cli.command import command
from memstore.cli.options import Json, Seed, option
from memstore.errors import InvalidInput, InvalidWeights

if TYPE_CHECKING:
    from memstore.hf.reading_adapter import Kind

_PARTS = 4000  # parts of texts to make questions from


@command(
    "adapt",
    "memstore adapt ~/models/my-decoder --questions questions.jsonl",
    "memstore adapt ~/models/my-decoder --text books.jsonl.zst",
    interrupted="interrupted; the same command resumes the training of the reading adapter",
)
def adapt(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="smollm2, a directory, a GGUF file, or a name on the hub."
        ),
    ],
    *,
    questions: Annotated[
        Path | None,
        option("--questions", "FILE", "Texts and questions about them: .jsonl or .jsonl.zst."),
    ] = None,
    text: Annotated[
        list[Path] | None,
        option("--text", "FILE", "Prose, instead of --questions: .txt or .jsonl.zst (repeatable)."),
    ] = None,
    reading_tokens: Annotated[
        int,
        option("--reading-tokens", "N", "Tokens to train the reading adapter on; 0: none.", min=0),
    ] = 2_000_000,
    out: Annotated[
        Path | None,
        option(
            "--out", "FILE", "Selector file; default: where later commands look.", dir_okay=False
        ),
    ] = None,
    device: Annotated[str, option("--device", "NAME", "cpu, cuda, mps or auto.")] = "auto",
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Train a reading adapter and a selector for a Hugging Face model.

    The adapter teaches the model to read stored passages. With --questions it also learns to answer
    from them and to refuse. --text does not teach this, but keeps an adapter that has learned it.
    The selector learns to choose the passages of a question; it begins with the present one. Later
    commands find both by the model's weights.

    Each line of the questions file is {"context": TEXT, "title": TITLE, "questions": [{"question":
    TEXT, "answers": [TEXT]}]}. If there are no answers, the model learns to refuse. SmolLM2 learned
    from tens of thousands of questions; how few are enough is not measured.
    """
    from memstore.compute import Compute
    from memstore.hf.load import load_reader
    from memstore.hf.model_directory import cache_directory
    from memstore.hf.models_by_name import reader_named
    from memstore.hf.passage_adapter import HuggingFacePassageModel
    from memstore.hf.weights import adaptation_of, adapter_made_here, made_here
    from memstore.model.passages.adaptation import UNADAPTED, save_selector
    from memstore.training.corpus import read_documents
    from memstore.training.doubt import fit_doubt
    from memstore.training.reading import ReadingOptions, adapt_reading
    from memstore.training.reading_questions import questions_of, read_questions
    from memstore.training.selectors.learn import LearnConfig
    from memstore.training.selectors.make_selector import adapt as make_selector

    if (questions is None) == (not text):
        raise typer.BadParameter("give --questions or --text")

    def loaded() -> HuggingFacePassageModel:
        """The model without its present selector, which may be damaged."""
        compute = Compute(device=device, weights="full")
        found = reader_named(model, compute=compute, adaptation=UNADAPTED)
        if not isinstance(found, HuggingFacePassageModel):
            raise InvalidInput(
                f"{model} is a landmark model, which needs no adapter; name a Hugging Face model"
            )
        return found

    reader, seed = loaded(), seed or 0
    weights = reader.made_for.weights
    if questions is not None:
        contexts = read_questions(questions)
    else:
        contexts = questions_of(list(read_documents(text or ())), _PARTS, seed)
    work = cache_directory() / "adapting" / weights
    result: dict[str, Any] = {}
    if reading_tokens and questions is None and reader.adapted_turns:
        console.note("the model has a reading adapter that answers from passages; it is kept")
    elif reading_tokens:
        kind: Kind = "writer" if questions is None else "both"
        rate = 5e-4 if kind == "writer" else 8e-4
        options = ReadingOptions(tokens=reading_tokens, learning_rate=rate, seed=seed)
        adapter = adapt_reading(reader, contexts, kind, work, options, console.note)
        directory = adapter_made_here(weights)
        adapter.save(directory)
        for name, share in adapter.scores.items():
            console.note(f"held-out questions, {name}: {share:.0%}")
        console.note(f"reading adapter written to {directory}")
        result |= {"adapter": str(directory), "reading": dict(adapter.scores)}
        reader = loaded()
    begin = None
    try:
        begin = adaptation_of(reader.made_for).selector.learned
    except InvalidWeights:
        console.note("the present selector cannot be read; the new one begins with random weights")
    config = LearnConfig(seed=seed, rate=2e-3 if begin is None else 1e-3)
    adaptation = make_selector(reader, contexts, begin=begin, config=config, report=console.note)
    found = adaptation.scores["asked"]
    console.note(f"right passage of held-out questions among the best 8: {found:.0%}")
    selecting = load_reader(model, device=str(reader.device), adaptation=adaptation)
    fitted = None
    if questions is not None and selecting.refusal is not None:
        fitted = fit_doubt(selecting, contexts, seed=seed, report=console.note)
    if fitted is None:
        console.note("refusals not fitted: they need --questions, enough of them, and an adapter")
    else:
        doubt, shares = fitted
        scores = {**adaptation.scores, **shares}
        adaptation = replace(adaptation, doubt=doubt, scores=scores)
        for name, share in shares.items():
            console.note(f"{name}: {share:.0%}")
    path = out or made_here(weights)
    save_selector(adaptation, reader.made_for, path)
    console.note(f"selector written to {path}")
    shutil.rmtree(work, ignore_errors=True)
    name = adaptation.selector.spec.name
    result |= {"selector": name, "file": str(path), "scores": dict(adaptation.scores)}
    if as_json:
        console.emit(result)


COMMANDS = (adapt,)
