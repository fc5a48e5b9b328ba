"""The landmark model: every token and head looks blocks up by trained landmark keys."""

SHIPPED_NAME = "books-1m"
