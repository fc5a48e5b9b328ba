"""What does each kind of index find, how fast, and what does it cost to build, keep and open?

Every kind at every size, all heads of one layer. Recall: share of the exact top 4 that is found;
mass: the sum of exp(score) of what is found over that of the exact top 4; regret: exact minus found
score, mean of the 4 (both as attention sees them). One query row a head, and 64. A kind whose build
would take longer than --build-limit, by its time at the size before, is left out.

    python -m benchmarks.index.engines --captured landmarks/
"""

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from benchmarks.common.options import add
from benchmarks.common.results import plot, write_part
from benchmarks.common.tables import spread, table, tokens_text
from benchmarks.common.timing import interleaved, paired_ratio, timed
from benchmarks.index.data import (
    TOP_K,
    Data,
    asked,
    begin,
    clock,
    documents,
    fill,
    in_parts,
    index_parser,
    make,
    ms,
    quality,
    searched,
)
from memstore.index import INDEX_KINDS, PackedIndex, Scope
from memstore.index.faiss import faiss_files
from memstore.index.faiss.faiss_index import RECALL, FaissIndex

ROWS = (1, 64)  # query rows a head


def measure(data: Data, options: argparse.Namespace) -> dict[str, Any]:
    seconds_a_key: dict[str, float] = {}  # that building a kind took at the size before
    sizes = []
    for size in options.sizes:
        sizes.append(engines_at(size, data, seconds_a_key, options))
        print(engines_table(sizes[-1]), flush=True)
    return {"layer": options.layer, "sizes": sizes}


def engines_at(
    size: int, data: Data, seconds_a_key: dict[str, float], options: argparse.Namespace
) -> dict[str, Any]:
    layer = options.layer
    keys, lengths = data.keys[layer][:size], documents(size, options.documents)
    rows: dict[str, dict[str, Any]] = {}
    indexes: dict[str, PackedIndex] = {}
    for kind in options.kinds:
        expected = size * seconds_a_key.get(kind, 0.0)
        if expected > options.build_limit:
            print(
                f"{kind} at {tokens_text(size)} left out: building it would take {expected:.0f} s",
                flush=True,
            )
            continue
        index = indexes[kind] = make(kind, keys)
        rows[kind], scope = built(index, layer, keys, lengths, data, options)
        seconds_a_key[kind] = rows[kind].get("build_seconds", 0.0) / size
        print(f"{kind} at {tokens_text(size)} is ready", flush=True)
    q = data.evenly(layer, options.queries)
    exact = in_parts(lambda some: indexes["packed"].search(layer, some, scope, TOP_K), q)
    for kind, index in indexes.items():
        # The others find the same however many rows come at once; "auto" chooses anew.
        search = partial(searched, index, layer, scope)
        rows[kind] |= quality(in_parts(search, q, 1 if kind == "auto" else 32), exact)
    for count in ROWS:
        name, burst = f"rows_{count}", max(1, min(16, (1 << 18) // (size * count)))
        repeats = options.repeats if count == 1 or size < 1 << 19 else max(3, options.repeats // 3)
        clocks = {
            kind: clock(data, layer, index, scope, count, burst, options.seed)
            for kind, index in indexes.items()
        }
        before = {kind: (index.searches, asked(index)) for kind, index in indexes.items()}
        measured = interleaved(clocks, repeats)
        for kind, index in indexes.items():
            searches = index.searches - before[kind][0]
            rows[kind][name] = {
                "seconds": statistics.median(measured[kind]),
                "to_packed": paired_ratio(measured[kind], measured["packed"]),
                "asked": (asked(index) - before[kind][1]) / searches,
            }
        if "auto" in rows:
            good = [kind for kind in rows if kind != "auto" and rows[kind]["recall"] >= RECALL]
            best = min((statistics.median(measured[kind]), kind) for kind in good)[1]
            rows["auto"][name] |= {
                "best": best,
                "to_best": paired_ratio(measured["auto"], measured[best]),
            }
    return {"landmarks": size, "documents": len(lengths), "kinds": rows}


def built(
    index: PackedIndex,
    layer: int,
    keys: Tensor,
    lengths: Sequence[int],
    data: Data,
    options: argparse.Namespace,
) -> tuple[dict[str, Any], Scope]:
    """Fill, build, save and open again one index; what that took, and the scope of all
    documents.
    """
    adding, scope = timed(lambda: fill(index, layer, keys, lengths))
    row: dict[str, Any] = {"add_seconds": adding, "keys_bytes": index.bytes}
    if isinstance(index, FaissIndex):
        index.queries.kept = data.samples(layer)
        row["build_seconds"], _ = timed(lambda: index.build(layer, TOP_K))
        row["effort"] = [head.calibration.effort for head in index.built[layer].heads]
        with tempfile.TemporaryDirectory(dir=options.work) as place:
            directory = Path(place)
            row["save_seconds"], _ = timed(
                lambda: faiss_files.write_engines(directory, index, layer)
            )
            row["file_bytes"] = faiss_files.file_of(directory, layer).stat().st_size
            row["open_seconds"], _ = timed(
                lambda: index.install(layer, faiss_files.read_engines(directory, index, layer))
            )
    row["bytes"] = index.bytes
    return row, scope


def engines_table(at: dict[str, Any]) -> str:
    times_of = " | ".join([*(f"{n} row, ms" for n in ROWS), *(f"{n} row / packed" for n in ROWS)])
    head = (
        f"kind | recall@4 | worst head | mass | regret | {times_of} | engine asked | "
        "memory MB | build s | file MB | save s | open s"
    )
    lines = []
    for kind, row in at["kinds"].items():
        of_engine = "- | - | - | -"
        if "build_seconds" in row:
            of_engine = (
                f"{row['build_seconds']:.2f} | {row['file_bytes'] / 1e6:.1f} | "
                f"{row['save_seconds']:.2f} | {row['open_seconds']:.2f}"
            )
        of = [row[f"rows_{n}"] for n in ROWS]
        asked_of = "/".join(f"{x['asked']:.0%}" for x in of)
        times = " | ".join([*(ms(x["seconds"]) for x in of), *(spread(x["to_packed"]) for x in of)])
        lines.append(
            f"{kind} | {row['recall']:.3f} | {row['worst_head']:.3f} | {row['mass']:.4f} | "
            f"{row['regret']:.4f} | {times} | {asked_of} | "
            f"{row['bytes'] / 1e6:.0f} | {of_engine}"
        )
    text = (
        f"\nengines, {at['landmarks']:,} landmarks a head in {at['documents']} documents\n\n"
        + table(head, lines)
    )
    if "auto" in at["kinds"]:
        for n in ROWS:
            row = at["kinds"]["auto"][f"rows_{n}"]
            best = f"{row['best']}, the best with a recall of {RECALL}"
            text += f"\nauto / {best}, {n} row: {spread(row['to_best'])}"
    return text


def draw(figure: Any, found: dict[str, Any]) -> None:
    """Recall against the time of a search, a panel a size; of kinds that can be chosen."""
    sizes = found["sizes"]
    panels = figure.subplots(1, len(sizes), squeeze=False, sharey=True)[0]
    for axes, at in zip(panels, sizes):
        for number, kind in enumerate(INDEX_KINDS):
            if (row := at["kinds"].get(kind)) is None:
                continue
            for count, marker in zip(ROWS, "os"):
                axes.plot(
                    1000 * row[f"rows_{count}"]["seconds"],
                    row["recall"],
                    marker,
                    color=f"C{number}",
                    alpha=0.75,
                    label=kind if count == 1 else None,
                )
        axes.axhline(RECALL, color="grey", linewidth=0.7, linestyle="--")
        axes.set(
            title=f"{tokens_text(at['landmarks'])} landmarks a head",
            xscale="log",
            xlabel="ms a search",
        )
        axes.tick_params(axis="x", which="minor", labelbottom=False)
    panels[0].set_ylabel("recall@4 (circle: 1 query row a head, square: 64)")
    figure.legend(
        *panels[0].get_legend_handles_labels(), fontsize=8, loc="outside lower center", ncol=8
    )


def main() -> None:
    arguments = index_parser(__doc__)
    arguments.add_argument("--kinds", nargs="+", choices=INDEX_KINDS, default=list(INDEX_KINDS))
    add(arguments, "--build-limit", 3600, "seconds that building one kind may take", type=float)
    options = arguments.parse_args()
    if "packed" not in options.kinds:
        arguments.error("--kinds must have packed: it is what the others are compared with")
    found = measure(begin(options), options)
    write_part(options, "engines", found)
    plot(options, lambda figure: draw(figure, found), (12, 4.5))


if __name__ == "__main__":
    main()
