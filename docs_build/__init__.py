"""The documentation site: reference pages, tables, and hooks of mkdocs."""
