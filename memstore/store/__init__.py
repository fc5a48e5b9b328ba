"""A memory as its users hold it: documents, their landmark index and their tiers behind one
object.
"""
