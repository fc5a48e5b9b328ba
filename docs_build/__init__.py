"""The documentation's site: reference pages out of the code, and what mkdocs needs besides."""
