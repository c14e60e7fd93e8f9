"""Small programs, each with one picture: what the package is for, in about fifty lines each."""
