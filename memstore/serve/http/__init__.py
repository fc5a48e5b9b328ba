"""HTTP: what every request passes, how an answer is sent, and the inspector."""
