"""The tables and the figure of recall.py."""

from typing import Any

from benchmarks.common.intervals import wilson
from benchmarks.common.needles import TASKS
from benchmarks.common.tables import rate, table, tokens_text
from memstore.model.lookup_settings import GRANULARITIES, LookupSettings


def by_index(rows: list[dict[str, Any]], kinds: list[str]) -> str:
    """Accuracy and the time of a question by kind of index."""
    points = {(row["task"], row["length"]): row for row in rows if row["index"] != kinds[0]}
    of = {
        (
            row["task"],
            row["length"],
            row["index"],
        ): f"{rate(row['right'], row['trials'])}, {row['seconds'] / row['trials'] * 1000:.0f} ms"
        for row in reversed(rows)  # of rows at one point the first: the usual settings
    }
    body = [
        [f"{task} {tokens_text(length)}", *(of.get((task, length, kind), "") for kind in kinds)]
        for task, length in points
    ]
    return table(["", *kinds], body)


def range_text(score_range: float | None) -> str:
    return "" if score_range is None else f"range={score_range:g}"


def blocks_read(row: dict[str, Any]) -> str:
    """Blocks read by a lookup, the mean."""
    return f"{row['blocks_read'] / max(1, row['lookups']['done']):.2f}"


def usual(rows: list[dict[str, Any]], lookup: LookupSettings) -> list[dict[str, Any]]:
    """The points measured with the model's own settings."""
    own = (lookup.top_k, lookup.score_range, lookup.granularity)
    return [row for row in rows if (row["top_k"], row["score_range"], row["granularity"]) == own]


def by_length(rows: list[dict[str, Any]], lookup: LookupSettings) -> str:
    """The table of tasks and lengths."""
    rows = usual(rows, lookup)
    lengths = sorted({row["length"] for row in rows})
    lines = []
    for task, title in TASKS.items():
        found = {row["length"]: row for row in rows if row["task"] == task}
        if found:
            trials = sorted({row["trials"] for row in found.values()})
            lines.append(
                [
                    title,
                    "-".join(map(str, trials)),
                    *(
                        rate(found[n]["right"], found[n]["trials"]) if n in found else ""
                        for n in lengths
                    ),
                ]
            )
    return table([f"memory (k={lookup.top_k})", "trials", *map(tokens_text, lengths)], lines)


def variations(rows: list[dict[str, Any]]) -> str:
    """The table of tasks, top_k, score_range and granularity, at the one length where they were
    varied.
    """
    by = {
        (
            r["task"],
            GRANULARITIES.index(r["granularity"]),
            r["top_k"],
            range_text(r["score_range"]),
            r["length"],
        ): r
        for r in rows
    }
    settings = list(dict.fromkeys(key[1:4] for key in sorted(by, key=lambda key: key[1:3])))
    tasks = [task for task in TASKS if len({key[1:4] for key in by if key[0] == task}) > 1]
    if not tasks:
        return ""
    # The length where a task has been asked with the most settings is the one where they were
    # varied.
    lengths = {key[4] for key in by if key[0] in tasks}
    at = max(lengths, key=lambda n: len({key[:4] for key in by if key[4] == n}))
    lines = []
    for g, *choice in settings:
        found = [by.get((task, g, *choice, at)) for task in tasks]
        cells = [
            text
            for row in found
            for text in ([rate(row["right"], row["trials"]), blocks_read(row)] if row else ["", ""])
        ]
        lines.append([GRANULARITIES[g], *choice, *cells])
    heads = [head for task in tasks for head in (task, "blocks read")]
    return table([f"at {tokens_text(at)}: granularity", "top_k", "", *heads], lines)


def draw(figure: Any, rows: list[dict[str, Any]], lookup: LookupSettings) -> None:
    """Accuracy by length, by top_k and by granularity."""
    left, middle, right = figure.subplots(1, 3, sharey=True)
    own = usual(rows, lookup)
    for task in TASKS:
        points = (
            sorted((row["length"], row) for row in own if row["task"] == task)
            if task != "in_place"
            else []
        )
        if points:
            bars(left, [n for n, _ in points], [row for _, row in points], task)
    left.set_xscale("log", base=2)
    left.set_xlabel("tokens of memory")
    left.set_ylabel("exact match")
    left.set_xticks(
        sorted({row["length"] for row in own}),
        [tokens_text(n) for n in sorted({row["length"] for row in own})],
    )
    varied = [row for row in rows if row not in own]
    for task in dict.fromkeys(row["task"] for row in varied):
        length = next(row["length"] for row in varied if row["task"] == task)
        same = [row for row in rows if row["task"] == task and row["length"] == length]
        same = [row for row in same if row["score_range"] == lookup.score_range]
        points = sorted((r["top_k"], r) for r in same if r["granularity"] == lookup.granularity)
        bars(middle, [k for k, _ in points], [row for _, row in points], task)
        named = {r["granularity"]: r for r in same if r["top_k"] == lookup.top_k}
        shown = [name for name in GRANULARITIES if name in named]
        bars(right, shown, [named[name] for name in shown], task, line="o")
        middle.set_xlabel(f"top_k, at {tokens_text(length)}")
        right.set_xlabel(f"granularity, at {tokens_text(length)}")
    right.tick_params(axis="x", labelrotation=20)
    left.set_ylim(0, 1.02)
    for axes in (left, middle, right):
        axes.grid(alpha=0.3)
    figure.legend(
        *left.get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=8
    )


def bars(
    axes: Any, at: list[Any], rows: list[dict[str, Any]], label: str, line: str = "o-"
) -> None:
    """Points with their intervals."""
    rates = [row["right"] / row["trials"] for row in rows]
    ends = [wilson(row["right"], row["trials"]) for row in rows]
    below = [max(0.0, rate - low) for rate, (low, _) in zip(rates, ends)]
    above = [max(0.0, high - rate) for rate, (_, high) in zip(rates, ends)]
    colour = f"C{list(TASKS).index(label)}"  # a task has one colour in every panel
    axes.errorbar(
        at, rates, yerr=[below, above], fmt=line, color=colour, markersize=4, capsize=2, label=label
    )
