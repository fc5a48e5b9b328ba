"""The environment variables that memstore reads: the one table of them."""

from docs_build.markdown import table

VARIABLES = {
    "MEMSTORE_STORE": "what `--store` is where it is not given, else `./memory`",
    "MEMSTORE_MODEL": "the model of a new memory where `--model` is not given",
    "MEMSTORE_VALKEY": "what `--valkey` is where it is not given; not asked for a directory",
    "MEMSTORE_CACHE": "directory of converted models, selectors and digests of weights; else "
    "`memstore` in `$XDG_CACHE_HOME` or `~/.cache`",
    "MEMSTORE_KERNELS": "`reference` or `triton`: which kernels compute "
    "([kernels](../appendix/kernels.md#which-implementation-runs))",
}


_THREADS = """\
When memstore is imported before torch, it sets `GOMP_SPINCOUNT=1000` and `KMP_BLOCKTIME=0`: threads
of a computation then spin only briefly before they sleep, while they wait for each other. It sets
neither if one of the two, `OMP_WAIT_POLICY` or `OMP_NUM_THREADS` is set."""


def environment_page() -> str:
    """Markdown."""
    rows = [[f"`{name}`", about] for name, about in VARIABLES.items()]
    return "\n".join(["# Environment variables", "", table(["variable", ""], rows), "", _THREADS])
