"""Reading records: a batch into the slots of a slab, and what the page cache does not hold."""
