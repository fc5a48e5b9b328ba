"""What generates tokens faster than a decoder's modules: weights of fewer bits, and flat graphs."""
