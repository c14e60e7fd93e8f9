"""What pyproject.toml cannot say: the folder ``solvers`` goes into the wheel as a subpackage.

So the wheel claims one name, ``cactus_theory``, and ``python -m cactus_theory.solvers`` is what
``python -m solvers`` is in a checkout. For this the files in it import each other relatively.
"""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["cactus_theory*"]), "cactus_theory.solvers"],
    package_dir={"cactus_theory.solvers": "solvers"},
)
