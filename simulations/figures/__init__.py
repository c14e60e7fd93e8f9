"""The numbers of the figures and of the pages' tables, as CSV."""
