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


def environment_page() -> str:
    """Markdown."""
    rows = [[f"`{name}`", about] for name, about in VARIABLES.items()]
    return "\n".join(["# Environment variables", "", table(["variable", ""], rows)])
