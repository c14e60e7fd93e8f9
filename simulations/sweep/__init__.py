"""Grids of policies, verifiers and knobs, in this process or on a Dask cluster.

A *task* is plain data that says all that decides its rows (:mod:`.tasks`), so that it does not
matter where it runs (:mod:`.executors`), in which order, or how often it was begun. Its rows are
in the journal before the next ones are taken.
"""
