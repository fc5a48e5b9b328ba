"""What memstore finds, how fast and at what cost: one script a question, listed in README.md."""

import memstore as memstore  # before torch: a benchmark's threads wait as the product's do
