"""The Python API: a memory and the model that reads and asks it, behind one object."""
