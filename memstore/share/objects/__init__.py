"""Object stores behind one small face."""
