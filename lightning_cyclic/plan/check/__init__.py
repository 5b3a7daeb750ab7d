"""The proof that a program can run, and how one that cannot is refused."""
