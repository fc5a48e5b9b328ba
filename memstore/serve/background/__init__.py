"""What a server does behind the answers: ingest of uploads, backfill, garbage collection."""
