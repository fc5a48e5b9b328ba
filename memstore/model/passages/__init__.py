"""Passage models: any decoder, whose passages are chosen once for a question."""
