"""How many lookups do the tiers answer without the disk, by budget, policy and prefetcher?

live     A model asks about several books on disk: passages of them to be continued, and questions
         about names there, with every budget, policy and prefetcher, each with cold tiers; the
         answers must be the same. The lookups are recorded as well.
slow     The same with one policy and every prefetcher, where every record takes 1 ms of a source
         that serves 8 at a time: how long lookups wait with a prefetcher and without.
replay   The recorded lookups (or --replay TRACE) against every capacity, policy and prefetcher,
         with Belady's optimum as the bound, and against a host tier under a device tier.
         Predictions arrive at once: an upper bound.

A budget is a share of the blocks of all books; a capacity of a replay is a share of the blocks that
were looked up.

    python -m benchmarks.storage.hit_rate --text books-test.jsonl.zst
"""

import argparse
from pathlib import Path
from typing import Any

from benchmarks.common.memories import workplace
from benchmarks.common.options import add, load, parser
from benchmarks.common.results import plot, write_results
from benchmarks.common.slow_source import slowed
from benchmarks.common.tables import table
from benchmarks.common.text import Books
from memstore import LandmarkModel, MemoryStore
from memstore.cli.bench_replay import ALL_POLICIES, REPLAY_PREFETCH, Settings, run_replay
from memstore.cli.bench_tiers import run_live
from memstore.tiers.recorded import Recorded
from memstore.tiers.replay import replay_tiers
from memstore.tiers.tier_options import DEFAULT_POLICY, PREDICTORS

PARTS = ("live", "slow", "replay")
DEVICE = 0.02  # capacity of the device tier above the host tier, as a share


def live(
    model: LandmarkModel, path: Path, trace: Path, options: argparse.Namespace
) -> dict[str, Any]:
    settings = Settings(options.budgets, options.policies, options.prefetch)
    return run_live(
        model, path, settings, questions=options.questions, seed=options.seed, trace=trace
    )


def slow(model: LandmarkModel, path: Path, options: argparse.Namespace) -> dict[str, Any]:
    def prepare(memory: MemoryStore) -> None:
        slowed(memory, options.slow_ms / 1000, options.parallel)

    settings = Settings(options.budgets, (DEFAULT_POLICY,), PREDICTORS)
    return run_live(
        model, path, settings, questions=options.questions, seed=options.seed, prepare=prepare
    )


def replayed(trace: Path, options: argparse.Namespace) -> dict[str, Any]:
    result = run_replay(trace, Settings(options.capacities, ALL_POLICIES, REPLAY_PREFETCH))
    recorded = Recorded.load(trace)
    device = max(1, round(DEVICE * recorded.units))
    below = []
    for share in options.capacities:
        for policy in ALL_POLICIES:
            capacities = [device, max(1, round(share * recorded.units))]
            upper, lower = replay_tiers(recorded.requests, capacities, policy)
            below.append(
                {
                    "share": share,
                    "policy": policy,
                    "device_hit_rate": upper.hit_rate,
                    "host_hit_rate": lower.hit_rate,
                }
            )
    return result | {"trace": trace.name, "two_tiers": below}


def shares(text: str) -> float:
    """ "5%" -> 0.05"""
    return float(text.removesuffix("%")) / 100


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    add(arguments, "--books", 6)
    add(arguments, "--book-tokens", 1 << 15, "most to read of a book", type=int)
    add(arguments, "--questions", 40)
    add(arguments, "--budgets", [0.005, 0.01, 0.02, 0.05], type=shares, metavar="SHARE")
    arguments.add_argument(
        "--policies", nargs="+", choices=ALL_POLICIES, default=list(ALL_POLICIES)
    )
    add(arguments, "--prefetch", ["off", "speculative"], choices=PREDICTORS)
    add(
        arguments,
        "--capacities",
        [0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75],
        type=shares,
        metavar="SHARE",
    )
    add(arguments, "--slow-ms", 1.0, "what the slowed source takes for a record")
    add(arguments, "--parallel", 8, "records that it serves at once")
    add(arguments, "--replay", None, "replay this trace instead of the one recorded", type=Path)
    options = arguments.parse_args()
    model = load(options)
    results: dict[str, Any] = {}
    with workplace(options) as directory:
        path, trace = directory / "memory", options.replay or directory / "trace.zst"
        if set(options.parts) & {"live", "slow"}:
            build(model, path, options)
        if "live" in options.parts:
            results["live"] = live(model, path, directory / "trace.zst", options)
        if "slow" in options.parts:
            results["slow"] = slow(model, path, options)
        if "replay" in options.parts:
            results["replay"] = replayed(trace, options)
    for part in ("live", "slow"):
        if part in results:
            assert results[part]["same_answers"], "the answers depend on the tiers"
            print(f"\n{part}\n\n" + live_table(results[part]))
    if "replay" in results:
        print("\nreplay, hit rates on demand\n\n" + replay_table(results["replay"]))
        print(
            f"\nreplay, hit rates of {DEFAULT_POLICY} with predictions at once\n\n"
            + ahead_table(results["replay"])
        )
        print("\n" + best(results["replay"]))
    write_results(options, model, results)
    plot(options, lambda figure: draw(figure, results), (11, 8))


def build(model: LandmarkModel, path: Path, options: argparse.Namespace) -> None:
    """Read the books, each to be a document of the memory."""
    if path.exists():
        return
    books = Books.read(options.text, model.tokenizer, path.parent / "tokens").books[: options.books]
    with MemoryStore.create(path, model.signature) as memory:
        for number, book in enumerate(books, 1):
            text = model.tokenizer.decode(book[: options.book_tokens].tolist())
            model.ingest(text, memory, name=f"book {number}")


def live_table(result: dict[str, Any]) -> str:
    head = (
        "budget | policy | prefetch | hit rate | misses | in time | late | unused | stall | seconds"
    )
    return table(
        head,
        [
            (
                f"{run['share']:.1%} | {run['policy']} | {run['prefetch']} | "
                f"{run['hit_rate']:.3f} | {run['misses']:,} | {run['prefetched']:,} | "
                f"{run['late']:,} | {run['unused']:,} | {run['seconds']:.2f} s | "
                f"{run['total_seconds']:.1f}"
            )
            for run in result["runs"]
        ],
    )


def rate(result: dict[str, Any], share: float, policy: str, prefetch: str = "off") -> float:
    """The hit rate of one replay."""
    for run in result["runs"]:
        if (run["share"], run["policy"], run["prefetch"]) == (share, policy, prefetch):
            return float(run["hit_rate"])
    raise KeyError((share, policy, prefetch))


def replay_table(result: dict[str, Any]) -> str:
    return table(
        ["capacity", "units", *ALL_POLICIES, "belady"],
        [
            [
                f"{bound['share']:.0%}",
                bound["capacity"],
                *(f"{rate(result, bound['share'], policy):.3f}" for policy in ALL_POLICIES),
                f"{bound['hit_rate']:.3f}",
            ]
            for bound in result["belady"]
        ],
    )


def ahead_table(result: dict[str, Any]) -> str:
    return table(
        ["capacity", *REPLAY_PREFETCH],
        [
            [
                f"{bound['share']:.0%}",
                *(
                    f"{rate(result, bound['share'], DEFAULT_POLICY, prefetch):.3f}"
                    for prefetch in REPLAY_PREFETCH
                ),
            ]
            for bound in result["belady"]
        ],
    )


def best(result: dict[str, Any]) -> str:
    """The policy with the best mean over the capacities."""
    means = {
        policy: sum(rate(result, bound["share"], policy) for bound in result["belady"])
        / len(result["belady"])
        for policy in ALL_POLICIES
    }
    order = sorted(means, key=lambda policy: -means[policy])
    return "mean hit rate: " + ", ".join(f"{policy} {means[policy]:.4f}" for policy in order)


def draw(figure: Any, results: dict[str, Any]) -> None:
    """Hit rate against capacity, of one tier and of the lower of two; reuse by layer; stall with
    each prefetcher.
    """
    one, two, reuse, stall = figure.subplots(2, 2).flatten()
    if "replay" in results:
        found = results["replay"]
        capacities = [bound["share"] * 100 for bound in found["belady"]]
        one.plot(
            capacities, [bound["hit_rate"] for bound in found["belady"]], "k--", label="Belady"
        )
        for policy in ALL_POLICIES:
            one.plot(
                capacities,
                [rate(found, c["share"], policy) for c in found["belady"]],
                ".-",
                label=policy,
            )
            below = [row for row in found["two_tiers"] if row["policy"] == policy]
            two.plot(
                [row["share"] * 100 for row in below],
                [row["host_hit_rate"] for row in below],
                ".-",
                label=policy,
            )
        one.set(
            title="one tier",
            xlabel="capacity, % of the units looked up",
            ylabel="hit rate",
            ylim=(0, 1),
        )
        two.set(
            title=f"host tier under a device tier of {DEVICE:.0%}",
            xlabel="capacity of the host tier, %",
            ylabel="hit rate of the host tier",
            ylim=(0, 1),
        )
        for layer, ages in found["reuse"].items():
            reuse.plot(list(map(int, ages)), list(ages.values()), ".-", label=f"layer {layer}")
        reuse.set(
            title="read again",
            xlabel="within so many lookups of the layer",
            xscale="log",
            ylim=(0, 1),
            ylabel="share of the units read",
        )
        for axes in (one, two, reuse):
            axes.legend(fontsize=8)
    if "slow" in results:
        runs = results["slow"]["runs"]
        budgets = sorted({run["share"] for run in runs})
        for number, prefetch in enumerate(PREDICTORS):
            waited = [
                run["seconds"]
                for share in budgets
                for run in runs
                if (run["share"], run["prefetch"]) == (share, prefetch)
            ]
            stall.bar(
                [place + (number - 0.5) / 3 for place in range(len(budgets))],
                waited,
                1 / 3,
                label=prefetch,
            )
        stall.set(
            title="waiting for a slowed disk", xlabel="budget, % of all units", ylabel="seconds"
        )
        stall.set_xticks(range(len(budgets)), [f"{share:.1%}" for share in budgets])
        stall.legend(fontsize=8)


if __name__ == "__main__":
    main()
