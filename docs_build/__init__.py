"""The documentation's site: reference pages, tables, and hooks of mkdocs."""
