"""The reference page of environment variables, which are listed here alone."""

from docs_build.markdown import table

VARIABLES = {
    "MEMSTORE_STORE": "the default of `--store`, instead of `./memory`",
    "MEMSTORE_MODEL": "the default of `--model` for a new memory",
    "MEMSTORE_VALKEY": "the default of `--valkey`; ignored for a directory",
    "MEMSTORE_CACHE": "directory of converted models, adapters, selectors and digests of weights; "
    "default: `memstore` in `$XDG_CACHE_HOME` or `~/.cache`",
    "MEMSTORE_KERNELS": "`reference` or `triton`: which kernels compute "
    "([kernels](../appendix/kernels.md#which-implementation-runs))",
}


_THREADS = """\
When memstore is imported before torch, it sets `GOMP_SPINCOUNT=1000` and `KMP_BLOCKTIME=0`, so that
threads that wait for each other sleep soon instead of spinning. It changes neither where it is set,
and sets none if `OMP_WAIT_POLICY` is set."""


def environment_page() -> str:
    """Markdown."""
    rows = [[f"`{name}`", about] for name, about in VARIABLES.items()]
    return "\n".join(["# Environment variables", "", table(["variable", ""], rows), "", _THREADS])
