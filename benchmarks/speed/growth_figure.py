"""How does every cost grow, by the kept results of `growth`: tables, slopes, and one picture.

A slope is the exponent of a power law fitted to a curve (least squares of the logarithms): 0 is
flat, 1 grows as the work does; `last` is that of its last two points alone, where a constant part
hides less. Predicted ones were written before the curves were measured. A share is of what main
memory, matrix products or the disk could do, measured in the same turns, and 1 at best.

    python -m benchmarks.speed.growth_figure docs/results/cost.json --out docs/results/cost.png
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.common.options import figure_parser
from benchmarks.common.results import save_figure
from benchmarks.common.tables import table, tokens_text

Point = dict[str, Any]


class Curve(NamedTuple):
    """Something that grows with the x of a part's points."""

    part: str  # and series: what the names of its points begin with
    title: str
    of: Callable[[Point], float]
    predicted: float
    ends: str = ""  # the names of its points end with it


def core(name: str, scale: float = 1e3) -> Callable[[Point], float]:
    """Milliseconds of a core of what was measured."""
    return lambda point: scale * point["seconds"][name]["core"]


def a_token(point: Point) -> float:
    """Microseconds of a core to read a token in."""
    return 1e6 * point["seconds"]["read in"]["core"] / point["tokens"]


def opened(point: Point) -> float:
    """Milliseconds of a core to open a memory and list its documents."""
    warm = point["opening"]["warm"]
    return 1e3 * (warm["open_core"] + warm["list_core"])


def answered(point: Point) -> float:
    """Milliseconds of a core from opening to a first token."""
    return 1e3 * float(point["opening"]["to first token"]["core"])


def _of_model(name: str, first: float, decode: float, fresh: float) -> list[Curve]:
    part = f"tokens {name}"
    return [
        Curve(part, "reading in, µs a token", a_token, 0),
        Curve(part, "first token, ms", core("first token"), first),
        Curve(part, "decoding, ms a token", core("decode"), decode),
        Curve(part, "bytes a token", lambda point: point["file_bytes_per_token"], 0),
        Curve(part, "opening, ms", opened, 0),
        Curve(part, "opening to first token, ms", answered, fresh),
    ]


CURVES = [
    *_of_model("books-1m", 0.3, 0.2, 0.7),
    *_of_model("smollm2", 0.1, 0, 0.3),
    Curve("documents", "opening and listing, ms", opened, 0.6),
    Curve("documents", "listing again, ms", core("list"), 1),
    Curve("documents", "first token over all, ms", core("ask"), 0.3),
    Curve("documents", "opening to first token, ms", answered, 0.6),
    Curve("readers", "ms of a core a question", lambda one: 1e3 * one["core_per_question"], 0),
    Curve("readers", "MB of each alone", lambda one: one["own_part"] / 1e6, 0),
    Curve("models", "reading in, µs a token", a_token, 1, "full"),
    Curve("models", "first token, ms", core("first token"), 1, "full"),
    Curve("models", "decoding in bfloat16, ms a token", core("decode"), 1, "full"),
    Curve("models", "decoding in int8, ms a token", core("decode"), 1, "int8"),
]


def main() -> None:
    options = figure_parser(__doc__)
    options.add_argument("results", type=Path, help="--out of speed.growth")
    given = options.parse_args()
    points = json.loads(given.results.read_text())
    print("\n\n".join(tables(points)))
    save_figure(given.out, lambda figure: draw(figure, points), (9.5, 7.5))


def points_of(points: dict[str, Any], curve: Curve) -> tuple[list[float], list[float]]:
    """x and y of a curve, by x."""
    found = [
        one["found"]
        for name, one in points.items()
        if name.startswith(f"{curve.part} ") and name.endswith(curve.ends)
    ]
    found.sort(key=lambda one: one["x"])
    return [one["x"] for one in found], [curve.of(one) for one in found]


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """The exponent p of y = c x**p."""
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def tables(points: dict[str, Any]) -> list[str]:
    """One of every part, and the slopes."""
    return [*filter(None, (of_tokens(points), of_documents(points), of_readers(points),
                           of_models(points))), slopes(points)]  # fmt: skip


def slopes(points: dict[str, Any]) -> str:
    """A curve a line."""
    lines = []
    for curve in CURVES:
        x, y = points_of(points, curve)
        if len(x) > 1:
            ends = f"{y[0]:.3g} to {y[-1]:.3g}"
            fitted = [f"{slope(x, y):.2f}", f"{slope(x[-2:], y[-2:]):.2f}"]
            lines.append([curve.part, curve.title, ends, f"{curve.predicted:g}", *fitted])
    return table(["by", "curve", "from, to", "predicted", "slope", "last"], lines)


def of_tokens(points: dict[str, Any]) -> str:
    """A model and a length a line, shares in brackets."""
    head = ["model", "tokens", "read in, tokens/s", "first token, ms", "decoding, tokens/s"]
    head += ["bytes a token", "opening, ms: warm, cold", "to first token, ms"]
    lines = []
    for name, one in _sorted(points, "tokens"):
        at, share = one["opening"], one["shares"]
        cold = 1e3 * (at["cold"]["open"] + at["cold"]["list"])
        lines.append(
            [name.split()[0], tokens_text(_near(one["x"])), *_speeds(one, share)]
            + [f"{one['file_bytes_per_token']:,.0f}", f"{opened(one):.1f}, {cold:.1f}"]
            + [f"{answered(one):,.0f}"]
        )
    return table(head, lines) if lines else ""


def _near(tokens: float) -> int:
    """The power of two that a text's tokens are about."""
    return int(2 ** np.round(np.log2(tokens)))


def _speeds(one: Point, share: dict[str, float]) -> list[str]:
    seconds = one["seconds"]
    return [
        f"{one['tokens'] / seconds['read in']['core']:,.0f} ({share['read in']:.2f})",
        f"{1e3 * seconds['first token']['core']:,.0f} ({share.get('first token', np.nan):.2f})",
        f"{1 / seconds['decode']['core']:,.0f} ({share['decode']:.2f})",
    ]


def of_documents(points: dict[str, Any]) -> str:
    """A number of documents a line."""
    head = ["documents", "opening, ms", "listing, ms", "both cold, ms", "listing again, ms"]
    head += ["first token over all, ms", "opening to first token, ms"]
    lines = []
    for _, one in _sorted(points, "documents"):
        warm, cold = one["opening"]["warm"], one["opening"]["cold"]
        lines.append(
            [f"{one['x']:,}", f"{1e3 * warm['open_core']:.1f}", f"{1e3 * warm['list_core']:,.1f}"]
            + [f"{1e3 * (cold['open'] + cold['list']):,.1f} ({one['shares']['cold']:.3f})"]
            + [f"{core('list')(one):.2f}", f"{core('ask')(one):,.0f} ({one['shares']['ask']:.2f})"]
            + [f"{answered(one):,.0f}"]
        )
    return table(head, lines) if lines else ""


def of_readers(points: dict[str, Any]) -> str:
    """A number of readers a line."""
    head = ["readers", "questions/s", "cores they had", "questions/s of a core"]
    head += ["latency, ms: median, 99%", "resident MB", "MB of its own"]
    some = _sorted(points, "readers")
    lines = [
        [one["x"], f"{one['questions_per_second']:.1f}", f"{one['cores_had']:.2f}"]
        + [f"{1 / one['core_per_question']:.1f} ({_least(some) / one['core_per_question']:.2f})"]
        + [", ".join(f"{1e3 * one['latency'][at]:,.0f}" for at in ("median", "99%"))]
        + [f"{one['resident'] / 1e6:,.0f}", f"{one['own_part'] / 1e6:,.0f}"]
        for _, one in some
    ]
    return table(head, lines) if lines else ""


def _least(readers: list[tuple[str, Point]]) -> float:
    """Seconds of a core a question where they are fewest."""
    return min(float(one["core_per_question"]) for _, one in readers)


def of_models(points: dict[str, Any]) -> str:
    """A size and its weights a line, shares in brackets."""
    head = ["parameters", "weights", "read in, tokens/s", "first token, ms", "decoding, tokens/s"]
    lines = [
        [f"{one['parameters'] / 1e6:,.0f}M", name.split()[1], *_speeds(one, one["shares"])]
        for name, one in _sorted(points, "models")
    ]
    return table(head, lines) if lines else ""


def _sorted(points: dict[str, Any], part: str) -> list[tuple[str, Point]]:
    """A part's points by series and x, their names without the part's."""
    some = [(name, one["found"]) for name, one in points.items() if name.split()[0] == part]
    named = [(name.partition(" ")[2], one) for name, one in some]
    series = part == "tokens"
    return sorted(named, key=lambda one: (one[0].split()[0] if series else "", one[1]["x"]))


def draw(figure: Any, points: dict[str, Any]) -> None:
    """A panel a part, both axes logarithmic."""
    panels = figure.subplots(2, 2).flat
    parts: dict[str, tuple[str, Callable[[float], str]]] = {
        "tokens": ("tokens of memory (dashed: books-1m)", lambda x: tokens_text(_near(x))),
        "documents": ("documents", "{:,.0f}".format),
        "readers": ("readers", "{:.0f}".format),
        "models": ("parameters", lambda x: f"{x / 1e6:,.0f}M"),
    }
    for axes, (part, (about, named)) in zip(panels, parts.items()):
        colours: dict[str, str] = {}
        ticks: dict[str, float] = {}
        for curve in (one for one in CURVES if one.part.split()[0] == part):
            x, y = points_of(points, curve)
            dashed = "--" if curve.part.endswith("books-1m") else "-"
            label = None if curve.title in colours else curve.title
            colour = colours.setdefault(curve.title, f"C{len(colours)}")
            ticks |= {named(one): one for one in x}
            axes.loglog(x, y, f"o{dashed}", color=colour, label=label, markersize=3)
        axes.minorticks_off()
        axes.set_xticks(list(ticks.values()), list(ticks))
        axes.set_xlabel(about)
        axes.grid(alpha=0.3)
        axes.set_ylim(top=axes.get_ylim()[1] * 20)  # room for the names, on a logarithmic axis
        axes.legend(fontsize=7, loc="upper left", ncols=2)
    figure.suptitle("What costs more as work grows, and what does not", fontsize=11)


if __name__ == "__main__":
    main()
