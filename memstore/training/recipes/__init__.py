"""What training and benchmarks plant in text and ask for: facts, words, sentences, pages."""
