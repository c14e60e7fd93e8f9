"""Grids of policies, verifiers and knobs on one machine or many, with the same bytes as a result.

A *task* is plain data that says all that decides its rows (:mod:`.tasks`), so that it does not
matter on which executor it runs (:mod:`.drive`), in which order, or how often it was begun.
Finished tasks are on the disk before more are handed out.
"""
