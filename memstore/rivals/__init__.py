"""Other memories than landmarks, on the same decoder: what landmark attention is compared with."""
